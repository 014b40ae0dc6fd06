"""``LLM`` as a guest in programs of every kind: each runs it with one rank and with two, and keeps what is its own.

The hosts are scripts in processes of their own, with engines that start as a user's do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import on_this_machine
from tests.ranks.launch import ROOT, TWO_RANKS, torchrun
from tp_engine import LLM, SamplingParams

PROMPT = [5, 9, 13, 7]

COMMON = """
import gc, os, signal, sys, threading
import torch
import torch.distributed as dist
from tp_engine import LLM, SamplingParams
OPTIONS = dict(device="cpu", dtype="float32", num_gpu_blocks_override=32, max_model_len=64)
OPTIONS["tensor_parallel_size"] = {ranks}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
def answer(llm):
    one = llm.generate([[5, 9, 13, 7]], PARAMS, use_tqdm=False)[0].outputs[0]
    return one.token_ids, [f"{{at.logprob:.9e}}" for place in one.logprobs for at in place.values()]
def ask():
    with LLM({model!r}, **OPTIONS) as llm:
        return answer(llm)
def group():
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
"""

HOSTS = {
    "script": "print(ask())",
    "hostile defaults": """
        torch.set_default_dtype(torch.{dtype})
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.set_flush_denormal(True)
        torch.autograd.set_detect_anomaly(True)
        torch.set_num_threads(1)
        before = torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed()
        with torch.enable_grad(), torch.autocast("cpu"):
            print(ask())
        assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed())
    """,
    "nothing of the process is touched": """
        class Node:
            pass
        import weakref
        node = Node(); node.me = node
        gone = weakref.ref(node)
        handlers = [signal.getsignal(number) for number in range(1, signal.NSIG)]
        state = torch.get_rng_state(), torch.get_num_threads(), gc.get_freeze_count(), gc.get_threshold()
        environ = dict(os.environ)
        with LLM({model!r}, **OPTIONS) as llm:
            print(answer(llm))
            del node
            gc.collect()
            assert gone() is None and not dist.is_initialized()
            now = torch.get_rng_state(), torch.get_num_threads(), gc.get_freeze_count(), gc.get_threshold()
            assert torch.equal(state[0], now[0]) and state[1:4] == now[1:]
            assert handlers == [signal.getsignal(number) for number in range(1, signal.NSIG)]
            assert environ == dict(os.environ)
            assert len(torch.utils.data.DistributedSampler(range(10), 1, 0)) == 10
            loader = torch.utils.data.DataLoader(range(10), batch_size=5, num_workers=2, multiprocessing_context="fork")
            assert [batch.tolist() for batch in loader] == [list(range(5)), list(range(5, 10))]
            assert answer(llm) == answer(llm)
    """,
    "two engines": """
        with LLM({model!r}, **OPTIONS) as one, LLM({model!r}, **OPTIONS) as other:
            assert answer(one) == answer(other)
            print(answer(one))
    """,
    "a thread": """
        found = []
        thread = threading.Thread(target=lambda: found.append(ask()))
        thread.start(); thread.join()
        print(found[0])
    """,
    "a daemon of multiprocessing, spawned": """
        import multiprocessing
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(ask))
    """,
    "a daemon of multiprocessing, forked": """
        import multiprocessing
        torch.ones(300, 300) @ torch.ones(300, 300)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.apply(ask))
    """,
    "a trainer with DDP": """
        group()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        with LLM({model!r}, **OPTIONS) as llm:
            model(torch.ones(2, 4)).sum().backward()
            print(answer(llm))
            total = torch.ones(2)
            dist.all_reduce(total)
            assert dist.get_world_size() == 1 and total.tolist() == [1.0, 1.0]
        dist.destroy_process_group()
    """,
    "torch.distributed after the engine": """
        with LLM({model!r}, **OPTIONS) as llm:
            group()
            print(answer(llm))
        assert dist.is_initialized()
        dist.destroy_process_group()
    """,
    "accelerate": """
        from accelerate import Accelerator
        with LLM({model!r}, **OPTIONS) as llm:
            assert Accelerator(cpu=True).num_processes == 1
            print(answer(llm))
    """,
    "a trainer's variables": """
        os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        print(ask())
    """,
    "a notebook": """
        import nbclient, nbformat
        cell = nbformat.v4.new_code_cell({common!r} + "print(ask())")
        notebook = nbformat.v4.new_notebook(cells=[cell])
        nbclient.NotebookClient(notebook, timeout={limit_s}, kernel_name="python3").execute()
        print(next(one.text for one in cell.outputs if one.get("name") == "stdout").strip())
    """,
    "nothing global is changed": """
        import asyncio, decimal, faulthandler, glob, locale, logging, multiprocessing, random, resource, socket, time
        import numpy, transformers, warnings
        transformers.PreTrainedTokenizerFast  # libraries set filters of warnings, and more, when they are loaded
        def told(path):
            try:
                return open(path).read()
            except OSError:
                return ""
        def snapshot():
            mask = os.umask(0); os.umask(mask)
            hooks = sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace()
            logs = logging.root.level, logging.root.handlers[:], logging.root.manager.disable, logging.getLoggerClass()
            limits = sys.getrecursionlimit(), sys.getswitchinterval(), socket.getdefaulttimeout()
            rules = [repr(resource.getrlimit(number)) for number in range(16)], os.sched_getaffinity(0), os.nice(0)
            dice = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
            handled = [signal.getsignal(number) for number in range(1, signal.NSIG)]
            sets = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1), signal.getitimer(0)
            torches = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
            collector = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.callbacks[:]
            places = dict(os.environ), os.getcwd(), mask, locale.setlocale(locale.LC_ALL), sys.path[:], sys.meta_path[:]
            ways = multiprocessing.get_start_method(allow_none=True), asyncio.get_event_loop_policy().__class__
            numbers = str(decimal.getcontext()), str(numpy.geterr()), faulthandler.is_enabled()
            streams = sys.stdin, sys.stdout, sys.stderr, [os.get_blocking(number) for number in range(3)]
            return [hooks, logs, limits, rules, dice, handled, sets, torches, collector, places, ways, numbers, streams,
                    warnings.filters[:], warnings.showwarning]
        def kept():
            stats = [told(path).rsplit(")", 1)[-1].split() for path in glob.glob("/proc/[0-9]*/stat")]
            children = sum(len(one) > 1 and one[1] == str(os.getpid()) for one in stats)
            names = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
            return children, threading.active_count(), names, len(os.listdir("/proc/self/fd"))
        def settled():
            until = time.monotonic() + 20
            while (left := kept()) != held:  # a thread that has given its result has its end before it
                assert time.monotonic() < until, (held, left, threading.enumerate())
                time.sleep(0.01)
        before, held = snapshot(), kept()
        with LLM({model!r}, **OPTIONS) as llm:
            assert snapshot() == before
            print(answer(llm))
            assert snapshot() == before
            children, threads, names, files = kept()
            assert children == held[0] + 1 and threads <= held[1] + 1 and files <= held[3] + 8 and not names
        assert snapshot() == before
        settled()
        with LLM(**OPTIONS) as llm:  # the demo model, which has a chat template
            assert llm.chat([{{"role": "user", "content": "12+34="}}], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
            assert snapshot() == before
        assert snapshot() == before
        settled()
    """,
    "pytest with xdist and timeout": """
        import pathlib, subprocess, textwrap
        pathlib.Path("test_guest.py").write_text({common!r} + textwrap.dedent('''
            import pathlib, pytest
            @pytest.fixture(scope="module")
            def llm():
                with LLM({model!r}, **OPTIONS) as llm:
                    yield llm
            def test_before(llm):
                pathlib.Path("before").write_text(str(answer(llm)))
            @pytest.mark.timeout(2)
            @pytest.mark.xfail(strict=True)
            def test_that_takes_too_long(llm):
                while True:
                    llm.generate([[5, 9]] * 20, PARAMS, use_tqdm=False)
            def test_after(llm):
                assert str(answer(llm)) == pathlib.Path("before").read_text()
        '''))
        command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--timeout-method=signal"]
        done = subprocess.run([*command, "test_guest.py"], capture_output=True, text=True)
        assert "2 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
        print(pathlib.Path("before").read_text())
    """,
    "a Ray task": """
        import ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        print(ray.get(ray.remote(num_cpus=2)(ask).remote()))
        ray.shutdown()
    """,
}
NEEDS = {"a Ray task": ("ray", "Ray is not installed (extra: ray); run scripts/test_ray")}
DTYPES = {1: "bfloat16", 2: "float64"}
QUICK = {("nothing of the process is touched", 2), ("hostile defaults", 1)}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The oracle: an engine of one rank in this process."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), **{**TWO_RANKS, "tensor_parallel_size": 1}) as llm:
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("host", "ranks"),
    [
        pytest.param(host, ranks, marks=[] if (host, ranks) in QUICK else [pytest.mark.slow])
        for host in HOSTS
        for ranks in (1, 2)
    ],
)
def test_a_host_has_its_answer_and_all_that_it_had(
    host: str, ranks: int, folder: Path, expected: list[int], tmp_path: Path
) -> None:
    """Oracle: the tokens of an engine in this process; what the host itself asserts."""
    package, reason = NEEDS.get(host, ("torch", ""))
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason)
    limit_s = on_this_machine(150)
    common = COMMON.format(ranks=ranks, model=str(folder))
    body = textwrap.dedent(HOSTS[host]).format(
        ranks=ranks, model=str(folder), dtype=DTYPES[ranks], common=common, limit_s=int(limit_s)
    )
    script = tmp_path / "host.py"
    script.write_text(common + body)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=limit_s, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(f"({expected}, "), done.stdout


JOINED = """
import torch
import torch.distributed as dist
{common}
torch.set_default_dtype(torch.{dtype})
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True)
torch.autograd.set_detect_anomaly(True)
torch.set_flush_denormal(True)
def state():
    return torch.get_default_dtype(), torch.get_num_threads(), gc.get_freeze_count(), torch.initial_seed()
before = state()
with torch.autocast("cpu"), LLM({model!r}, **OPTIONS) as llm:
    print(answer(llm))
    torch.set_default_dtype(torch.float32)
    print(answer(llm))
    torch.set_default_dtype(torch.{dtype})
    assert not dist.is_initialized() and (state()[0], state()[2]) == (before[0], before[2])
assert before == state()
print("as before")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_under_torchrun_the_process_keeps_what_it_had(
    dtype: str, folder: Path, expected: list[int], tmp_path: Path
) -> None:
    """Oracle: the tokens of one rank, whatever the processes of the ranks have set for torch, before the start and
    after it; no default process group; threads and collector as before."""
    script = tmp_path / "job.py"
    common = COMMON.format(ranks=2, model=str(folder))
    script.write_text(JOINED.format(common=common, model=str(folder), dtype=dtype))
    job = torchrun(2, [str(script)])
    assert job.returncode == 0, job.stdout[-4000:]
    assert job.stdout.count(f"({expected}, ") == 2 and "as before" in job.stdout


COLOCATED = """
import safetensors.torch
{common}
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for ranks in (1, 2):
    OPTIONS["tensor_parallel_size"] = ranks
    with LLM({model!r}, distributed_executor_backend="external_launcher", **OPTIONS) as llm:
        model(torch.ones(2, 4)).sum().backward()
        said = [None] * 2
        found = answer(llm)[0]
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        tensors = safetensors.torch.load_file({model!r} + "/model.safetensors")
        version = llm.update_weights(tensors.items())
        llm.reset_prefix_cache()
        llm.wake_up(tags=["kv_cache"])
        try:
            llm.generate([[5, 10**6]], PARAMS, use_tqdm=False)
        except ValueError as error:
            refused = "token id 1000000" in str(error)
        dist.all_gather_object(said, (found, answer(llm)[0], version, refused))
        if rank == 0:
            print("ranks", ranks, said, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_trainer_share_an_engine(folder: Path, expected: list[int], tmp_path: Path) -> None:
    """Oracle: the tokens of one rank, on every rank of a job with DDP, from an engine of its own and from one together;
    the calls of TRL between steps: sleep, wake up by tags, new weights (the same, here)."""
    script = tmp_path / "job.py"
    common = COMMON.format(ranks=1, model=str(folder))
    script.write_text(COLOCATED.format(common=common, model=str(folder)))
    job = torchrun(2, [str(script)])
    assert job.returncode == 0, job.stdout[-4000:]
    for ranks in (1, 2):
        assert f"ranks {ranks} {[(expected, expected, '1', True)] * 2}" in job.stdout, job.stdout[-4000:]
