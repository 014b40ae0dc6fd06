"""Which models, numbers of ranks and options ``tp_invariant`` takes: the same bits on 1, 2, 4 and 8 ranks.

The columns of every row-parallel product are ``NUM_SHARDS`` equal parts; ``kernels/linear/tree_sum.py`` adds them up.
"""

from collections.abc import Iterator

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.model_config import split_problem
from tp_engine.model_config.mlp import INNER_UNIT, ExpertsSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec

NUM_SHARDS = 8
WORLD_SIZES = (1, 2, 4, 8)  # whose ranks have whole subtrees of the shards


def check_tp_invariant(config: EngineConfig, model: ModelSpec) -> None:
    """Raise ``ConfigError`` if sums over the ranks would depend on their number; ``config`` is resolved."""
    problem = _problem_of_options(config) or _problem_of_model(model, 1 if config.dtype == "float32" else 2)
    if problem is None and config.device == "cuda":
        problem = _problem_on_gpus(model)
    if problem is not None:
        raise ConfigError(f"tp_invariant is set, but {problem}; leave tp_invariant out")
    legal = [size for size in WORLD_SIZES if split_problem(model, size) is None]
    if config.tensor_parallel_size not in legal:
        raise ConfigError(
            f"tp_invariant is set and tensor_parallel_size is {config.tensor_parallel_size}; this {model.architecture} "
            f"has the same bits on {', '.join(map(str, legal))} ranks: choose one of these, or leave tp_invariant out"
        )


def _problem_of_options(config: EngineConfig) -> str | None:
    if config.quantization is not None:
        return f"quantization is {config.quantization}, and only unquantised weights have sums by shard"
    if config.enable_expert_parallel:
        return "enable_expert_parallel gives each rank other experts, whose outputs have no fixed order of sums"
    if config.enable_lora:
        return "enable_lora is too, and the products of adapters have no sums by shard"
    only, needs = ("native", "a C compiler") if config.device == "cpu" else ("triton", "the triton package")
    if config.attention_backend != only:
        return (
            f"attention_backend is {config.attention_backend}, and on a {config.device.upper()} only {only} computes a "
            f"row alike in each batch (it needs {needs})"
        )
    return None


def _problem_on_gpus(model: ModelSpec) -> str | None:
    """What of the model has no kernel for GPUs that computes a row alike in each batch."""
    for layer in model.distinct_layers:
        if layer.experts is not None:
            return f"this {model.architecture} has experts, whose kernels for GPUs choose tiles by the batch"
        if layer.attention is None:
            continue
        if not isinstance(layer.attention, AttentionSpec) or layer.attention.latent is not None:
            return f"this {model.architecture} has attention whose kernels for GPUs split work by the batch"
    return None


def _problem_of_model(model: ModelSpec, unit: int) -> str | None:
    """What of the model cannot be divided into shards of whole ``unit`` columns."""
    name = model.architecture
    if model.modules is not None:
        return f"this {name} is run by transformers' own modules, which promise no order of sums"
    if model.quantization is not None:
        return f"this {name} has quantised weights, and only unquantised ones have sums by shard"
    if model.hidden_size % unit:
        return f"the hidden size of this {name}, {model.hidden_size}, is odd"
    for layer in model.distinct_layers:
        for what, columns, own_unit in _columns(layer, unit):
            if columns % (NUM_SHARDS * own_unit):
                return f"the {what} of this {name}, {columns}, is not a multiple of {NUM_SHARDS * own_unit}"
        attention = layer.attention
        if isinstance(attention, AttentionSpec) and attention.shared_row is not None:
            return f"this {name} projects the outputs of each group of heads, by sums without shards"
        if isinstance(attention, AttentionSpec) and attention.qk_norm is not None and attention.qk_norm.spans_heads:
            return f"this {name} normalises all heads together, by a sum over the ranks"
    return None


def _columns(layer: LayerSpec, unit: int) -> Iterator[tuple[str, int, int]]:
    """What the columns of each row-parallel product are, their number, and the unit of a shard."""
    if layer.attention is not None:
        yield "width of all heads", layer.attention.out_size, unit
    for mlp in layer.mlps:
        if isinstance(mlp, ExpertsSpec):
            yield "experts' inner size", mlp.inner_size, INNER_UNIT
        dense = mlp.shared if isinstance(mlp, ExpertsSpec) else mlp
        if dense is not None:
            yield "intermediate size", dense.inner_size, unit
