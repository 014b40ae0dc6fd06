"""``tp-engine check MODEL``: the conductor.  First the engines run, then the oracle, then all is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tp_engine.api.llm import LLM
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.check.behaviour import check_behaviour
from tp_engine.check.files import check_files
from tp_engine.check.judged import EXACT_LAYERS, Judge, judged
from tp_engine.check.linears import LinearFault, Linears, missing_rows
from tp_engine.check.observed import CHUNK, Observed, Sizes, observe
from tp_engine.check.oracle import Oracle, check_oracle_device
from tp_engine.check.passes import Passed, questions, run_pass
from tp_engine.check.prompts import CheckPrompt, make_prompts
from tp_engine.check.report import CheckFinding, CheckReport, describe_environment
from tp_engine.check.rounding import Rounding, rounding_of
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import ConfigError, EngineDeadError, WeightError
from tp_engine.hf_overrides import parse_overrides
from tp_engine.model_config import load_model_config
from tp_engine.model_config.source import resolve_model_folder
from tp_engine.model_config.spec import ModelSpec

_QUICK_LONG, _LONG = 96, 768
_QUICK_TOKENS, _TOKENS = 8, 24
_BEHIND_WINDOW = 48

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """What to check: ``options`` of ``LLM`` (the model too), ``chats`` of a server (None: those of ``LLM``), and how.

    ``reference`` is the folder of the checkpoint that the oracle reads, None for the model's own.  ``note`` is told
    what begins, ``note_layer`` of each layer that the oracle has done.
    """

    options: Mapping[str, Any]
    chats: ChatOptions | None = None
    quick: bool = False
    reference: str | None = None
    oracle_device: str = "cpu"
    note: Note = lambda _text: None
    note_layer: Callable[[], None] = lambda: None

    @property
    def folder(self) -> Path:
        """The folder of the oracle's checkpoint."""
        return resolve_model_folder(self.reference or str(self.options["model"]), self.options.get("revision"))

    def run(self) -> tuple[CheckReport, Observed | None]:
        """Return the report, and what was observed, for a golden file; None if the engine did not run."""
        check_oracle_device(self.oracle_device)
        model = str(self.options["model"])
        environment = describe_environment()
        folder = self.folder
        begin_s = time.monotonic()
        findings = [check_files(folder)]
        try:
            observed, behaviour = self._observe(folder)
        except (WeightError, EngineDeadError, RuntimeError, OSError) as error:
            findings.append(CheckFinding.not_checked("engine", f"it does not start: {error}"))
            return CheckReport(subject=model, findings=tuple(findings), environment=environment), None
        try:
            findings += behaviour + self._judge(folder, observed)
        except (ConfigError, WeightError, MemoryError) as error:
            findings += behaviour
            findings.append(CheckFinding.not_checked("oracle", f"it can not run the model: {error}"))
        configuration = observed.configuration
        environment |= {"seconds": f"{time.monotonic() - begin_s:.1f}"}
        environment |= {
            name: str(configuration[name])
            for name in ("dtype", "quantization", "kv_cache_dtype", "tensor_parallel_size", "attention_backend")
        }
        return CheckReport(subject=model, findings=tuple(findings), environment=environment), observed

    def _observe(self, folder: Path) -> tuple[Observed, list[CheckFinding]]:
        tokenizer = load_tokenizer(str(self.options.get("tokenizer") or folder))
        spec, _ = load_model_config(str(folder))
        behaviour: list[CheckFinding] = []

        def with_llm(llm: LLM, observed: Observed) -> None:
            if self.chats is not None:
                llm.input_processor.chat = ChatFormat(llm.get_tokenizer(), self.chats)
            behaviour.extend(check_behaviour(llm, tokenizer, folder))

        prompts = self._prompts(tokenizer, spec)
        max_tokens = _QUICK_TOKENS if self.quick else _TOKENS
        longest = max(len(one.token_ids) for one in prompts) + max_tokens + 1
        layout = spec.kv_layout_on(int(self.options.get("tensor_parallel_size", 1)))
        num_blocks = layout.blocks_for(longest, int(self.options.get("block_size", 16)), CHUNK)
        observed = observe(
            self.options,
            prompts,
            sizes=Sizes(longest, num_blocks),
            max_tokens=max_tokens,
            quick=self.quick,
            with_llm=with_llm,
            note=self.note,
        )
        return observed, behaviour

    def _prompts(self, tokenizer: Any | None, spec: ModelSpec) -> list[CheckPrompt]:
        windows = [one for one in spec.kv_layout_on(1).windows if one is not None]
        longest = self.options.get("max_model_len") or spec.max_position
        room = max(8, int(longest) - (_QUICK_TOKENS if self.quick else _TOKENS) - 2)
        long_len = max(_QUICK_LONG if self.quick else _LONG, 0 if self.quick else max(windows, default=0))
        long_len = min(room, long_len + (0 if self.quick else _BEHIND_WINDOW))
        return make_prompts(
            tokenizer,
            vocab_size=spec.vocab_size,
            long_len=long_len,
            max_len=room,
            quick=self.quick,
            has_template=bool(getattr(tokenizer, "chat_template", None)),
        )

    def _judge(self, folder: Path, observed: Observed) -> list[CheckFinding]:
        asked, watched = questions(observed), observed.watched
        assert watched is not None, "the engine ran"
        alone = next(one for one in observed.alone if one.prompt.name == watched.prompt.name)
        after_last = np.maximum(
            alone.alternatives[: len(watched.prompt.token_ids)], 0
        )  # what is asked after its states
        overrides = parse_overrides(self.options.get("hf_overrides"))

        def passed(oracle: Oracle) -> Passed:
            return run_pass(oracle, asked, (watched, after_last), self.note_layer)

        def run_with(rounding: Rounding) -> Passed:
            self.note(f"its twin: transformers in {str(rounding.dtype).removeprefix('torch.')}")
            with Oracle(folder, rounding=rounding, device=self.oracle_device, overrides=overrides) as other:
                return passed(other)

        self.note("the oracle: transformers in float32, layer by layer")
        with Oracle(folder, device=self.oracle_device, overrides=overrides) as oracle:
            exact = passed(oracle)
            quantization = oracle.quantization
            rounding = rounding_of(observed.configuration, quantization, observed.device)
            twin = None if rounding.is_exact else run_with(rounding)
            self.note("linear layers beside their stored weights")
            wide = frozenset(() if twin is None else twin.wide)
            products = Linears(
                oracle.stored, activation=oracle.activation, rounding=rounding, floor=EXACT_LAYERS, wide=wide
            )
            faults = list(products.faults(watched))
        spec, _ = load_model_config(str(folder))
        has_experts = any(layer.experts is not None for layer in spec.layers)
        judge = Judge(
            observed=observed,
            asked=asked,
            exact=exact,
            twin=twin,
            has_experts=has_experts,
            is_rough=has_experts or rounding.is_rough,
        )
        judge, findings = judged(
            judge, rounding, run_with, lambda one: [one.layers(faults), one.head(), *one.set_ups()]
        )
        observed.bound = judge.allowed
        return [_linears_finding(products, faults, missing_rows(watched)), *findings]


def _linears_finding(products: Linears, faults: Sequence[LinearFault], missing: Iterable[str]) -> CheckFinding:
    name = "linear layers"
    detail = (
        f"{products.num_compared} products, {products.num_quantised} of quantised weights, beside the stored weights: "
        f"{products.largest_ratio:.2f} of the bound at most"
    )
    problems = list(missing)
    if not faults and not problems:
        return CheckFinding.right(name, detail)
    first = faults[0] if faults else None
    return CheckFinding.wrong(
        name,
        detail if first is None else f"{detail}; {len(faults)} are wrong, the first one by {first.error:.1e}",
        place=first.place if first is not None else "; ".join(problems),
        meaning="a rank multiplies with other numbers than the checkpoint has: another shard, scale, packing or byte",
        remedy="another format of the same model; --dtype float32; compare the weights' files with the original",
    )
