"""What a model, a GPU and hosts cannot have of the tiers."""

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.tiers.options import is_lossy, may_refuse, pca_settings
from tp_engine.model_config.spec import ModelSpec

_MIN_FP8_CAPABILITY = (8, 9)


def check(config: EngineConfig, model: ModelSpec, capability: tuple[int, int] | None, num_hosts: int) -> None:
    """Raise ``ConfigError`` for tiers that the model, a GPU of this compute capability, or so many hosts cannot
    have."""
    _check_codec(config, model, capability, num_hosts)
    _check_disk(config, num_hosts)


def _check_codec(config: EngineConfig, model: ModelSpec, capability: tuple[int, int] | None, num_hosts: int) -> None:
    """Raise ``ConfigError`` for a codec that the model, a GPU of this compute capability, or hosts cannot have."""
    codec = config.kv_offloading_codec
    layout, pca = model.kv_layout_on(config.tensor_parallel_size), pca_settings(codec)
    if is_lossy(codec) and any(one.latent is not None for one in model.attentions):
        raise ConfigError(
            f"kv_offloading_codec is {codec}, but this {model.architecture} keeps latents, and codecs know keys and "
            "values only: set kv_offloading_codec=none"
        )
    if is_lossy(codec) and not layout.is_uniform:
        raise ConfigError(
            f"kv_offloading_codec is {codec}, but layers of this {model.architecture} differ in KV heads or head_dim, "
            "and a codec needs blocks of one shape: set kv_offloading_codec=none"
        )
    if pca is not None and pca.rank > layout.groups[0].head_dim:
        raise ConfigError(
            f"kv_offloading_codec is {codec}, but heads of this {model.architecture} have {layout.groups[0].head_dim} "
            "dimensions: set a rank of at most as many"
        )
    if may_refuse(codec) and num_hosts > 1:
        raise ConfigError(
            f"kv_offloading_codec is {codec}, whose stores all ranks confirm on one host's board, but they are on "
            f"{num_hosts} hosts; set kv_offloading_codec=int8"
        )
    if codec == "fp8" and capability is not None and capability < _MIN_FP8_CAPABILITY:
        raise ConfigError(
            f"kv_offloading_codec is fp8, which GPUs before compute capability 8.9 do not have, and this one is of "
            f"{capability[0]}.{capability[1]}; set kv_offloading_codec=int8"
        )


def _check_disk(config: EngineConfig, num_hosts: int) -> None:
    if config.kv_disk_path is not None and num_hosts > 1:
        raise ConfigError(
            f"kv_disk_path is {config.kv_disk_path!r}, and a disk tier is for ranks on one host, but they are on "
            f"{num_hosts}; leave it out"
        )
