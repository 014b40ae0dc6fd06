"""What each layer of this rank reads, and what each linear layer makes of it, recorded for ``tp-engine check``.

::

    streams   for each layer, the residual stream (N, hidden) that it reads; then the one after the last layer
    inner     for each layer with an MLP, what that reads (N, hidden), normalised
    linears   for each linear layer of a rank (LocalLinear), its first rows x (n, in) and its products y (n, out)
    experts   for each layer's experts the first rows y (n, hidden) of this rank's part of their output
    rows      of each row of the streams (N,) the number of its step, its token and its position

Steps of several requests, or of parts of a prompt, follow one another.  Of linear layers, ``NUM_ROWS`` rows of prompts
are kept and ``NUM_DECODES`` of decodes: their products are far larger than the streams.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tp_engine.errors import RequestError
from tp_engine.layers.experts import Experts
from tp_engine.layers.linear import LocalLinear
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import StepPlan
from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import ModelReader, RunnerHooks
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import Prepared
from tp_engine.worker.results.readback import PendingStep

NUM_ROWS: Final = 40
NUM_DECODES: Final = 16


class LayerWatch(ModelReader):
    """Records as long as it is a feature of a runner, which launches every step meanwhile."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._found: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._num_steps, self._most_rows = 0, NUM_ROWS

    def attach(self, hooks: RunnerHooks) -> None:
        super().attach(hooks)
        hooks.must_launch.append(self.must_launch)
        hooks.reads_all.append(self.reads_all)
        hooks.around_model.append(self.around_model)

    def must_launch(self, plan: StepPlan) -> bool:
        return True

    def reads_all(self, inputs: StepInputs) -> bool:
        return True

    def around_model(self, step: PendingStep, inputs: StepInputs) -> AbstractContextManager[object]:
        self._num_steps += 1
        self._most_rows = NUM_ROWS + (NUM_DECODES if inputs.layout.is_decode_only else 0)
        self._keep("rows.steps", torch.full_like(inputs.positions, self._num_steps))
        self._keep("rows.tokens", inputs.input_ids)
        self._keep("rows.places", inputs.positions)
        return self._recording()

    def write(self, path: Path) -> None:
        """Write all that was recorded as float32, and as JSON ``layout``: which stored rows each linear layer has, and
        ``experts_layout``: which experts, and which of their inner elements, are here."""
        arrays: dict[str, Any] = {name: torch.cat(parts).numpy() for name, parts in self._found.items()}
        layout = {name: _layout_of(linear) for name, linear in self._linears() if f"linears.{name}.x" in arrays}
        arrays["rows.most"] = np.array([NUM_ROWS])
        experts = {name: _experts_of(one) for name, one in self._experts() if f"experts.{name}.y" in arrays}
        np.savez(path, layout=np.array(json.dumps(layout)), experts_layout=np.array(json.dumps(experts)), **arrays)

    def _linears(self) -> list[tuple[str, LocalLinear]]:
        return [(name, one) for name, one in self._model.named_modules() if isinstance(one, LocalLinear)]

    def _experts(self) -> list[tuple[str, Experts]]:
        """Those whose parts are summed over the ranks, and not before."""
        found = [(name, one) for name, one in self._model.named_modules() if isinstance(one, Experts)]
        return [(name, one) for name, one in found if not one.shape.num_shards]

    def _keep(self, name: str, values: object) -> None:
        if isinstance(values, torch.Tensor):  # not codes of 8 bits
            self._found[name].append(values.detach().float().cpu().clone())

    @contextmanager
    def _recording(self) -> Iterator[None]:
        assert isinstance(self._model, CausalLM)
        layers, last = self._model.layers, len(self._model.layers)
        behind: list[torch.Tensor] = []

        def on_layer(name: str, _layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            self._keep(name, inputs[1])

        def on_mlp(name: str, _mlp: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            self._keep(name, inputs[0])

        def on_last(_layer: torch.nn.Module, _inputs: object, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
            behind.append(outputs[1])  # the last join adds the layer's output to it

        with ExitStack() as hooks:
            for index, layer in enumerate(layers):
                hooks.enter_context(layer.register_forward_pre_hook(partial(on_layer, f"streams.{index}")))
                if (mlp := getattr(layer, "mlp", None)) is not None:  # there is none in some layers of one block
                    hooks.enter_context(mlp.register_forward_pre_hook(partial(on_mlp, f"inner.{index}")))
            hooks.enter_context(layers[last - 1].register_forward_hook(on_last))
            for name, experts in self._experts():
                hooks.enter_context(experts.register_forward_hook(partial(self._on_experts, f"experts.{name}.y")))
            for name, linear in self._linears():
                linear.product = self._recorded(name, linear.product)  # type: ignore[method-assign]
                hooks.callback(linear.__dict__.pop, "product")
            yield
            self._keep(f"streams.{last}", behind[0])

    def _on_experts(self, name: str, _experts: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        if (room := self._most_rows - sum(map(len, self._found.get(name, ())))) > 0:
            self._keep(name, output[:room])

    def _recorded(self, name: str, product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def recorded(x: object, bias: torch.Tensor | None) -> torch.Tensor:
            room = self._most_rows - sum(map(len, self._found.get(f"linears.{name}.y", ())))
            y = product(x, bias)
            if room > 0 and isinstance(x, torch.Tensor):
                self._keep(f"linears.{name}.x", x[:room])
                self._keep(f"linears.{name}.y", y[:room])
            return y

        return recorded


def _layout_of(linear: LocalLinear) -> dict[str, Any]:
    """Which row of which stored module each row of the product is, -1 for none, and which columns it has."""
    parts = []
    for part in linear.shape.parts:
        stored = torch.arange(part.taken.start, part.taken.start + part.taken.size, dtype=torch.int64, device="cpu")
        rows = part.decode(stored).tolist()
        parts.append({"name": part.name, "stored_rows": part.stored_rows, "rows": rows, "room": part.room})
    columns = linear.shape.columns
    activation = linear.shape.activation
    return {
        "parts": parts,
        "columns": [columns.start, columns.start + columns.size],
        "stored_columns": linear.shape.stored_columns,
        "is_activated": activation is not None,
    }


def _experts_of(experts: Experts) -> dict[str, Any]:
    """Which experts are here, and which of the inner elements of each."""
    shape = experts.shape
    spans = {"experts": shape.experts, "inner": shape.inner}
    found: dict[str, Any] = {name: [span.start, span.start + span.size] for name, span in spans.items()}
    return {**found, "inner_size": shape.spec.inner_size, "adds_bias": shape.adds_down_bias}


def watch_layers(runner: ModelRunner, rank: int, arguments: Any) -> Prepared:
    """Begin to record, or write what was recorded below ``folder``, a file per rank, and end."""
    if not isinstance(runner.model, CausalLM):
        raise RequestError(
            "layers are recorded of native ones, and this model is run by transformers' own modules, which leave "
            "nothing to compare: they are the reference"
        )
    if "folder" not in arguments:
        last = runner.feature(LayerWatch)
        return Prepared(lambda: runner.replace_features([last], [LayerWatch(runner.model)]))
    watch = runner.required(LayerWatch)
    watch.write(Path(arguments["folder"]) / f"rank{rank}.npz")
    return Prepared(lambda: runner.replace_features([watch], []))
