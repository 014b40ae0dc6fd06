"""Engines of a trainer's ranks, under what the trainer has set for torch as a whole, and with a rank that is struck.

The engines' ranks are processes of their own, so they are started once; the trainer's processes hand them weights.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import on_this_machine
from tests.ranks.launch import ROOT

JOB = """
import contextlib, signal, sys, threading, time
import safetensors.torch, torch, torch.distributed as dist
from tp_engine import LLM, SamplingParams
folder = sys.argv[1]
OPTIONS = dict(device="cpu", dtype="float32", num_gpu_blocks_override=64, max_model_len=512)
dist.init_process_group("gloo")
stored = safetensors.torch.load_file(folder + "/model.safetensors")
other = {name: tensor.flip(0) if "embed" in name or "lm_head" in name else tensor for name, tensor in stored.items()}

@contextlib.contextmanager
def globally(switch, value, before):
    switch(value)
    try:
        yield
    finally:
        switch(before)

SETTINGS = {
    "bfloat16": lambda: globally(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float16": lambda: globally(torch.set_default_dtype, torch.float16, torch.float32),
    "float64": lambda: globally(torch.set_default_dtype, torch.float64, torch.float32),
    "a default device": lambda: globally(torch.set_default_device, "meta", None),
    "a device of a block": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "deterministic algorithms": lambda: globally(torch.use_deterministic_algorithms, True, False),
    "one thread": lambda: globally(torch.set_num_threads, 1, torch.get_num_threads()),
    "flush denormals": lambda: globally(torch.set_flush_denormal, True, False),
    "anomaly mode": lambda: globally(torch.autograd.set_detect_anomaly, True, False),
}
def state():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.tensor(1.0).device)

def answer(llm, num_tokens=5):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    one = llm.generate([[5, 9, 13, 7]], params, use_tqdm=False)[0].outputs[0]
    return one.token_ids, [at.logprob for place in one.logprobs for at in place.values()]

class Late(Exception):
    pass

def late(*_):
    raise Late

def strike(within):
    main, until_s = threading.main_thread().ident, time.monotonic() + 60
    while time.monotonic() < until_s:
        frame = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name == within:
                return signal.pthread_kill(main, signal.SIGALRM)
            frame = frame.f_back
        time.sleep(0.001)

def use(ranks):
    before = state()
    with contextlib.ExitStack() as all_of_them:
        for setting in SETTINGS.values():
            all_of_them.enter_context(setting())
        llm = LLM(folder, distributed_executor_backend="external_launcher", tensor_parallel_size=ranks, **OPTIONS)
    assert state() == before
    with llm:
        found = {}
        for weights in (other, stored):
            llm.update_weights(weights.items())
            found[id(weights)] = answer(llm)
        assert found[id(other)] != found[id(stored)]
        for number, (name, setting) in enumerate(SETTINGS.items()):
            weights = (other, stored)[number % 2]
            with setting():
                held = state()
                llm.update_weights(weights.items())
                assert answer(llm) == found[id(weights)], name
                assert state() == held, name
            assert state() == before, name
        for place, within in ((1, "_wait_for"), (0, "take")) if ranks > 1 else ():
            if dist.get_rank() == place:
                threading.Thread(target=strike, args=(within,)).start()
            said = "nothing"
            try:
                answer(llm, 500)
            except (Late, RuntimeError) as error:
                said = str(error) or "struck"
            print("told", place, said, flush=True)
            assert answer(llm) == found[id(weights)]
    return found[id(stored)][0]

signal.signal(signal.SIGALRM, late)
print("all right", use(1), use(2), flush=True)
"""


@pytest.mark.slow
def test_defaults_and_interrupts_of_a_trainer(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: with engines of one rank and of both, tokens and log-probabilities of the same weights without the
    settings, after each update; the settings as they were; a struck rank has its exception, which is told to the other
    if it is the first; both have the next answer."""
    script, folder = tmp_path / "job.py", checkpoint("qwen3")
    script.write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)], env={**os.environ, **job, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=on_this_machine(150))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0].splitlines()[-1] == said[1].splitlines()[-1] and "all right" in said[0]
    assert "told 1 nothing\n" in said[0] and "told 1 struck\n" in said[1], said
    assert "told 0 struck\n" in said[0] and "told 0 struck\n" in said[1], said
