"""The common part of checks of an engine and of a server: the prompts, and the runs of the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_engine.apps.check.judged import Judge
from tp_engine.apps.check.observed import Observed
from tp_engine.apps.check.oracle import EXACT, Oracle
from tp_engine.apps.check.passes import Passed, run_pass
from tp_engine.apps.check.prompts import CheckPrompt, make_prompts
from tp_engine.apps.check.report import CheckFinding, CheckStatus
from tp_engine.apps.check.rounding import FINER, Rounding, rounding_of
from tp_engine.model_config import load_model_config
from tp_engine.model_config.spec import ModelSpec

FindingsOf = Callable[[Judge], Iterable[CheckFinding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleCheck:
    """``quick``: with fewer prompts and set-ups.  ``note`` is told what begins, ``note_layer`` of each layer that the
    oracle has done, on ``oracle_device``."""

    quick: bool = False
    oracle_device: str = "cpu"
    note: Callable[[str], None] = lambda _text: None
    note_layer: Callable[[], None] = lambda: None

    @property
    def max_tokens(self) -> int:
        """Tokens of each answer."""
        return 8 if self.quick else 24

    def prompts(self, tokenizer: Any | None, spec: ModelSpec, max_len: int, long_len: int) -> list[CheckPrompt]:
        """Prompts, the last one of ``long_len`` tokens, that fit with their answers into ``max_len``."""
        return make_prompts(
            tokenizer,
            vocab_size=spec.vocab_size,
            long_len=long_len,
            max_len=max(8, max_len - self.max_tokens - 2),
            quick=self.quick,
        )

    def judge(
        self, folder: Path, overrides: Mapping[str, Any] | None, observed: Observed, findings_of: FindingsOf
    ) -> tuple[Judge, list[CheckFinding]]:
        """Run the oracle, and its twin unless the engine computes in float32; returns the findings and their judge.

        A model may amplify float32's roundings: what is wrong beside transformers in float32 is judged beside float64,
        where torch has kernels for it.
        """

        def run(rounding: Rounding) -> Passed:
            if rounding is not EXACT:
                self.note(f"its twin: transformers in {str(rounding.dtype).removeprefix('torch.')}")
            with Oracle(folder, rounding=rounding, device=self.oracle_device, overrides=overrides) as oracle:
                return run_pass(oracle, observed, self.note_layer)

        self.note("the oracle: transformers in float32, layer by layer")
        exact = run(EXACT)
        rounding = rounding_of(observed.configuration, exact.quantization, observed.device)
        spec, _ = load_model_config(str(folder))
        judge = Judge(
            observed=observed,
            exact=exact,
            twin=None if rounding.is_exact else run(rounding),
            rounding=rounding,
            has_experts=any(layer.experts is not None for layer in spec.layers),
        )
        findings = list(findings_of(judge))
        if rounding.is_exact and any(one.status is CheckStatus.WRONG for one in findings):
            with contextlib.suppress(RuntimeError):
                judge = replace(judge, exact=run(FINER), twin=exact)
                findings = list(findings_of(judge))
        return judge, findings
