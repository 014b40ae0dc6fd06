"""Plans made before earlier results are known.  Oracle: the same load without running ahead, and the fake model."""

from __future__ import annotations

import pytest

from tests.unit.sched.scheduler_harness import Simulation, expected_tokens, limits
from tp_engine.requests.request import FinishReason


def run(ahead: int, **changes: object) -> Simulation:
    """Sixteen requests of mixed lengths, to their end."""
    simulation = Simulation(limits(num_blocks=200, **changes), ahead=ahead)
    for number in range(16):
        simulation.add([number + 8] * (5 + number), max_tokens=4 + number % 7, ignore_eos=number % 2 == 0)
    simulation.run()
    return simulation


@pytest.mark.parametrize("ahead", [1, 2])
def test_tokens_are_those_of_a_run_that_never_runs_ahead(ahead: int) -> None:
    """Oracle: ahead = 0.  The logs of all sequences are equal, tokens and ends."""
    expected, found = run(0), run(ahead)
    for key, output in expected.outputs.items():
        assert found.outputs[key].token_ids == output.token_ids
        assert found.outputs[key].finish_reason is output.finish_reason


def test_a_sequence_that_ends_by_length_computes_nothing_too_much() -> None:
    """The end is known when the last token is scheduled.  Oracle: prompt and all generated tokens but the last."""
    simulation = Simulation(limits(), ahead=1)
    simulation.add([1] * 6, max_tokens=5, ignore_eos=True)
    simulation.run()
    assert simulation.worker.num_computed_tokens == 6 + 4
    assert [plan.num_tokens for plan in simulation.plans] == [6, 1, 1, 1, 1]


def test_a_stop_is_seen_one_step_late() -> None:
    """By hand: the step already sent computes one token of the ended row, which the scheduler drops."""
    prompt, (*_, stop_id) = [8, 9], expected_tokens([8, 9], 0, 8, frozenset())
    counts = []
    for ahead in (0, 1):
        simulation = Simulation(limits(), ahead=ahead)
        simulation.add(prompt, max_tokens=40, seed=0, ignore_eos=True, stop_token_ids=(stop_id,))
        simulation.run()
        assert simulation.outputs["r0", 0].finish_reason is FinishReason.STOP
        counts.append(simulation.worker.num_computed_tokens)
    assert counts[1] == counts[0] + 1


def test_requests_with_one_prefix_share_it_however_far_plans_run_ahead() -> None:
    """By hand: followers wait for the step that computes the prefix, although the next plan precedes its result."""
    computed = []
    for ahead in (0, 1, 2):
        simulation = Simulation(limits(num_blocks=64, max_model_len=128, max_num_batched_tokens=64), ahead=ahead)
        for number in range(6):
            simulation.add([5] * 40 + [number + 8], max_tokens=3, ignore_eos=True)
        simulation.run()
        computed.append(simulation.worker.num_computed_tokens)
    assert computed == [computed[0]] * 3


def test_siblings_fork_before_the_prompt_has_been_confirmed() -> None:
    """n = 3 computes the prompt once, and the forks its last token.  Oracle: the count without running ahead."""
    computed = []
    for ahead in (0, 1):
        simulation = Simulation(limits(num_blocks=64), ahead=ahead)
        simulation.add(list(range(8, 21)), n=3, max_tokens=4, ignore_eos=True)
        simulation.run()
        computed.append(simulation.worker.num_computed_tokens)
    assert computed[0] == computed[1] == 13 + 2 * 1 + 3 * 3


def test_nobody_is_preempted_while_a_result_is_outstanding() -> None:
    """By hand: no blocks for the next plan: it waits for the result, which ends one row, and no row is preempted."""
    simulation = Simulation(limits(num_blocks=4), ahead=1)
    simulation.add([9] * 7, max_tokens=6, ignore_eos=True)
    simulation.add([10] * 7, max_tokens=2, ignore_eos=True)
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions == 0


def test_results_must_come_in_order() -> None:
    """Oracle: an error for a result that is not the oldest outstanding one."""
    simulation = Simulation(limits())
    simulation.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    first, second = simulation.scheduler.schedule(), simulation.scheduler.schedule()
    assert first is not None and second is not None
    simulation.worker.execute(first)
    with pytest.raises(AssertionError, match="is due"):
        simulation.scheduler.update(second, simulation.worker.execute(second))
