"""One client beside another that sends as much as it can.  Oracle: the number of steps, counted, and the fake model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.sched.scheduler_harness import RandomLoad, Simulation, limits
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import SchedulerLimits
from tp_engine.sched.waiting_queue import PORTION

ROWS, TOKENS = 32, 8
ROOMY = limits(num_blocks=1200, max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=200, block_size=4)
TIGHT = replace(ROOMY, num_blocks=200)
KINDS = ("copies", "copies of a long prompt", "prompts", "long prompts", "bodies")


def request(
    name: str, client: str, *, length: int = 3, tokens: int = TOKENS, n: int = 1, place: int = 0
) -> EngineRequest:
    params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, seed=len(name) + place)
    prompt = [(place + position) % 7 + 1 for position in range(length)]
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, client=client, place=place)


def flood(simulation: Simulation, kind: str, client: str) -> None:
    """What one client sends: copies, prompts of one body, or many bodies."""
    if kind == "copies":
        simulation.add_request(request("flood", client, n=400, tokens=180))
    elif kind == "copies of a long prompt":
        simulation.add_request(request("flood", client, n=400, length=150, tokens=40))
    for number in range(200 if kind in ("prompts", "bodies", "long prompts") else 0):
        place, length = (0 if kind == "bodies" else number), (150 if kind == "long prompts" else 3)
        simulation.add_request(request(f"flood{number}", client, place=place, length=length, tokens=190 - length))


def steps_of_a_chat(simulation: Simulation, name: str, client: str) -> int:
    """The steps from a chat's arrival to its end."""
    simulation.add_request(request(name, client))
    for step in range(1, 2000):
        simulation.step()
        if simulation.outputs[name, 0].finish_reason is not None:
            return step
    raise AssertionError("a chat has not ended")


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("kind", "client", "shape"),
    [
        # Of the same client, where a body's first portion alone fills the blocks, the next body waits.
        ("copies", "same", ROOMY),
        ("copies of a long prompt", "same", ROOMY),
        ("prompts", "same", ROOMY),
        ("long prompts", "same", ROOMY),
        *((kind, "other", shape) for kind in KINDS for shape in (ROOMY, TIGHT)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.num_blocks} blocks",
)
def test_a_chat_takes_at_most_twice_its_steps(kind: str, client: str, shape: SchedulerLimits, ahead: int) -> None:
    """Oracle: twice the steps of the same chat alone, for each of several, one after the other; and all still end."""
    alone = steps_of_a_chat(Simulation(shape, ahead=ahead), "chat", "same")
    simulation = Simulation(shape, ahead=ahead, checks=False)
    flood(simulation, kind, client)
    for _ in range(20):
        simulation.step()
    assert simulation.scheduler.stats().num_waiting > 0
    taken = [steps_of_a_chat(simulation, f"chat{number}", "same") for number in range(6)]
    assert max(taken) <= 2 * alone, (alone, taken)
    simulation.scheduler.check_integrity()
    simulation.abort(*(name for name in simulation.requests if name.startswith("flood")))
    simulation.drain()
    simulation.check_idle()


def test_a_long_prompt_leaves_a_part_of_each_step_to_other_clients() -> None:
    """Oracle: the steps of the chat alone, while a prompt of 20 steps is computed; one of its own client waits."""
    shape = replace(ROOMY, max_model_len=2000)
    alone = steps_of_a_chat(Simulation(shape), "chat", "b")
    simulation = Simulation(shape)
    simulation.add_request(request("long", "a", length=20 * 64, tokens=2))
    simulation.step()
    assert steps_of_a_chat(simulation, "chat", "b") == alone
    assert steps_of_a_chat(simulation, "own", "a") > alone
    simulation.run()
    assert len(simulation.plans) < 20 * 8 / 7 + 20


def test_up_to_a_portion_of_copies_is_served_in_order_of_arrival() -> None:
    """Oracle: the requests, as ever, in the order in which their first sequences enter."""
    simulation = Simulation(replace(ROOMY, max_num_seqs=4))
    for number in range(6):
        simulation.add_request(request(f"r{number}", "", n=PORTION if number % 2 else 3, place=0))
    simulation.run()
    first = {name: one.deltas[0].first_scheduled_s for (name, index), one in simulation.outputs.items() if index == 0}
    assert sorted(first, key=first.__getitem__) == sorted(first)
    assert simulation.scheduler.stats().num_preemptions == 0


def test_copies_are_made_as_they_enter() -> None:
    """Oracle: by hand: a request brings one sequence, whatever its ``n`` is, and each that is looked at one more;
    all have their end."""
    simulation = Simulation(ROOMY, checks=False)
    queue = simulation.scheduler.state.waiting
    for number in range(20):
        simulation.add_request(request(f"r{number}", "a", n=100, place=number))
    assert len(queue) == 20 and simulation.scheduler.stats().num_waiting == 2000
    for _ in range(12):
        simulation.step()
        stats = simulation.scheduler.stats()
        ended = sum(output.finish_reason is not None for output in simulation.outputs.values())
        assert len(queue) <= 20 + 2 * ROWS and stats.num_waiting + stats.num_running + ended == 2000
    simulation.scheduler.check_integrity()
    simulation.abort(*simulation.requests)
    simulation.drain()
    assert all(simulation.outputs[f"r{number}", 99].finish_reason is FinishReason.ABORT for number in range(20))
    simulation.check_idle()


def test_clients_take_turns() -> None:
    """Oracle: by hand: with one row, the clients one after the other; of each, its own order."""
    simulation = Simulation(replace(ROOMY, max_num_seqs=1))
    for name, client in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("c0", "c"), ("b1", "b")):
        simulation.add_request(request(name, client))
    simulation.run()
    ended = {name: output.deltas[0].first_scheduled_s for (name, _), output in simulation.outputs.items()}
    assert [name for name in sorted(ended, key=ended.__getitem__) if name[0] == "a"] == ["a0", "a1", "a2"]
    assert [name for name in sorted(ended, key=ended.__getitem__) if name[0] == "b"] == ["b0", "b1"]


def test_no_client_goes_before_others_by_a_priority() -> None:
    """Oracle: a priority below 0 counts as 0 beside another client; above 0 it waits for the other."""
    simulation = Simulation(replace(ROOMY, max_num_seqs=2))
    for number in range(40):
        simulation.add_request(replace(request(f"flood{number}", "a", tokens=100), priority=-(2**31)))
    assert steps_of_a_chat(simulation, "chat", "b") <= 4 * TOKENS
    simulation.add_request(replace(request("later", "b"), priority=5))
    simulation.run()
    first = {name: output.deltas[0].first_scheduled_s for (name, _), output in simulation.outputs.items()}
    assert first.pop("later") > max(first.values())


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("shape", ["tight", "few rows"])
def test_random_loads_of_several_clients(shape: str, ahead: int) -> None:
    """Oracle: the fake model on each sequence alone; all end, the counts of the queue agree, and no client is kept."""
    chosen = limits(num_blocks=14, max_num_batched_tokens=16) if shape == "tight" else limits(max_num_seqs=3)
    simulation = Simulation(chosen, ahead=ahead)
    load = RandomLoad(simulation, seed=5)
    add = simulation.add_request

    def add_of_a_client(given: EngineRequest) -> None:
        add(replace(given, client=load.random.choice("abc"), place=load.random.choice([0, 0, 20, 50])))

    simulation.add_request = add_of_a_client  # type: ignore[method-assign, assignment]
    for _ in range(400):
        load.act()
    simulation.run()
    assert any(output.finish_reason is FinishReason.LENGTH for output in simulation.outputs.values())
    assert simulation.scheduler.stats().num_preemptions > 0
    assert simulation.scheduler.state.waiting.num_clients == 0
