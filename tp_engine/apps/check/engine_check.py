"""``tp-engine check MODEL``: first the engines run, then the oracle, then all is compared."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.api.llm import LLM
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.apps.check.behaviour import check_behaviour, timed
from tp_engine.apps.check.engine_subject import EngineSubject
from tp_engine.apps.check.files import check_files
from tp_engine.apps.check.judged import EXACT_LAYERS, Judge
from tp_engine.apps.check.linears import LinearFault, Linears
from tp_engine.apps.check.observed import Observed, observe
from tp_engine.apps.check.oracle import check_oracle_device
from tp_engine.apps.check.oracle_check import OracleCheck
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.ranks import missing_rows
from tp_engine.apps.check.report import CheckFinding, CheckReport, describe_environment
from tp_engine.apps.check.set_ups import CHUNK, Sizes
from tp_engine.apps.check.stored import StoredWeights
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import ConfigError, EngineDeadError, WeightError
from tp_engine.model_config import load_model_config
from tp_engine.model_config.source import resolve_model_folder
from tp_engine.model_config.spec import ModelSpec
from tp_engine.options.hf_overrides import parse_overrides

_QUICK_LONG, _LONG = 96, 768
_BEHIND_WINDOW = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck(OracleCheck):
    """What to check: ``options`` of ``LLM`` (the model too), ``chats`` of a server (None: those of ``LLM``).

    ``reference`` is the folder of the checkpoint that the oracle reads, None for the model's own.
    """

    options: Mapping[str, Any]
    chats: ChatOptions | None = None
    reference: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the oracle's checkpoint."""
        return resolve_model_folder(self.reference or str(self.options["model"]), self.options.get("revision"))

    def run(self) -> tuple[CheckReport, Observed | None]:
        """The report, and what was observed, for a golden file; None if the engine did not run."""
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
            findings.append(CheckFinding.not_checked("oracle", f"it cannot run the model: {error}"))
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
            subject = EngineSubject(llm)
            behaviour.extend(check_behaviour(subject, tokenizer, folder, subject.template))
            if tokenizer is not None and subject.template is not None:
                behaviour.extend(timed("tool round trip", subject.check_tools, tokenizer))

        prompts = self._prompts(tokenizer, spec)
        longest = max(len(one.token_ids) for one in prompts) + self.max_tokens + 1
        layout = spec.kv_layout_on(int(self.options.get("tensor_parallel_size", 1)))
        block_size = max(int(self.options.get("block_size", 16)), layout.largest_rate)
        observed = observe(
            self.options,
            prompts,
            sizes=Sizes(longest, block_size, lambda length: layout.blocks_for(length, block_size, CHUNK)),
            max_tokens=self.max_tokens,
            quick=self.quick,
            with_llm=with_llm,
            note=self.note,
        )
        return observed, behaviour

    def _prompts(self, tokenizer: Any | None, spec: ModelSpec) -> list[CheckPrompt]:
        windows = [one for one in spec.kv_layout_on(1).windows if one is not None]
        long_len = _QUICK_LONG if self.quick else max([_LONG, *windows]) + _BEHIND_WINDOW
        return self.prompts(tokenizer, spec, int(self.options.get("max_model_len") or spec.max_position), long_len)

    def _judge(self, folder: Path, observed: Observed) -> list[CheckFinding]:
        watched = observed.watched
        assert watched is not None, "the engine ran"

        def findings_of(judge: Judge) -> Iterator[CheckFinding]:
            self.note("linear layers beside their stored weights")
            with StoredWeights(folder, judge.exact.quantization) as stored:
                wide = frozenset(() if judge.twin is None else judge.twin.wide)
                products = Linears(
                    stored,
                    activation=judge.exact.activation,
                    rounding=judge.rounding,
                    floor=EXACT_LAYERS,
                    wide=wide,
                )
                faults = list(products.faults(watched))
            yield _linears_finding(products, faults, missing_rows(watched))
            yield from (judge.layers(faults), judge.head(), *judge.sampling(), *judge.set_ups())

        given = self.options.get("hf_overrides")
        overrides = {} if given is None else parse_overrides(given)
        judge, findings = self.judge(folder, overrides, observed, findings_of)
        observed.bound = judge.allowed
        return findings


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
        first.place if first is not None else "; ".join(problems),
        "a rank multiplies with other numbers than the checkpoint has: another shard, scale, packing or byte",
        "another format of the same model; --dtype float32; compare the weights' files with the original",
    )
