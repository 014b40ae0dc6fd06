"""Orders among real ranks: a rank that cannot follow, and one that dies on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launch import TWO_RANKS
from tests.services import stepping
from tests.unit.worker.test_profiling import names_in
from tp_engine import LLM, RequestError, SamplingParams
from tp_engine.api.output_streams import Outputs
from tp_engine.engine.admin_commands import act
from tp_engine.errors import EngineDeadError, RankError

pytestmark = pytest.mark.usefixtures("warm_children")

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 13, 7], [8, 8, 3]]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_not_follow_is_named_and_nothing_changes(
    rank: int, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the fault's text; the tokens before; no trace on the other rank; the same order, given again, is done."""
    monkeypatch.setenv("TP_ENGINE_FAULT", f"{rank}:prepare:raise")
    options = {**TWO_RANKS, "profile": str(tmp_path), "profile_steps": "none", "enforce_eager": True}
    with LLM(str(checkpoint("qwen3")), **options) as llm:
        expected = tokens(llm)
        with pytest.raises(RequestError, match=rf"^rank {rank}: RuntimeError: injected .* rank {rank} in prepare"):
            llm.engine.act("start_profile")
        assert tokens(llm) == expected
        llm.engine.act("stop_profile")
        assert not list(tmp_path.iterdir())
        llm.engine.act("start_profile")
        assert tokens(llm) == expected
        llm.engine.act("stop_profile")
        traces = [[name for name in names_in(path) if name.startswith("step ")] for path in sorted(tmp_path.iterdir())]
        assert len(traces) == 2 and traces[0] == traces[1] != []


@pytest.mark.slow
def test_results_of_steps_in_flight_are_kept(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the tokens of a run without orders; an order between any two steps, with a plan sent ahead."""
    options = {**TWO_RANKS, "profile": str(tmp_path), "profile_steps": "none"}
    with LLM(str(checkpoint("qwen3")), **options) as llm:
        expected = tokens(llm)
        requests = [llm.input_processor.process(prompt, PARAMS, request_id=str(i)) for i, prompt in enumerate(PROMPTS)]
        outputs = Outputs()
        found: dict[str, list[int]] = {}
        with stepping(llm) as engine:
            for request in requests:
                engine.add_request(request)
                outputs.add(request)
            while engine.has_unfinished:
                ended = outputs.process(engine.step()).finished
                found |= {one.request_id: one.outputs[0].token_ids for one in ended}
                act(engine.operator, "stop_profile", {})
        assert [found[request.request_id] for request in requests] == expected


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_a_rank_that_dies_ends_the_job(
    phase: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error names the rank; the engine answers nothing any more."""
    monkeypatch.setenv("TP_ENGINE_FAULT", f"1:{phase}:kill")
    with LLM(str(checkpoint("qwen3")), **TWO_RANKS, profile=str(tmp_path), profile_steps="none") as llm:
        with pytest.raises(RankError, match="rank 1"):
            llm.engine.act("start_profile")
        with pytest.raises(EngineDeadError):
            tokens(llm)
