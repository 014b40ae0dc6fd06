"""Modules that each kind of process must not import: each takes a good part of a second, or several.

Oracle of all: ``sys.modules`` of a fresh interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "tp_engine" / "models" / "demo_model"
COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "torch.onnx")
HTTP = ("fastapi", "pydantic", "uvicorn")
MODELLING = ("transformers.modeling_utils", "transformers.activations", "transformers.generation.utils")

# What a process does at its start -> modules that it must not have imported then.
STARTS = {
    "import tp_engine": ("torch", "transformers", "tokenizers", "numpy", "zmq", *HTTP),
    # every run of pytest where the package is installed
    "import tp_engine.apps.testing.plugin": (
        "torch",
        "numpy",
        "msgspec",
        "zmq",
        "tp_engine.options",
        "tp_engine.cli",
        *HTTP,
    ),
    # rank 0 of a server, until its frontend has been started
    "import tp_engine.cli.serve": ("torch", "transformers", "tokenizers", "triton", "fastapi", "uvicorn"),
    # a rank that rank 0 started, before and after its first sign of life
    "import tp_engine.engine.rank_process": ("torch", "transformers", *HTTP),
    "import tp_engine.engine.start": ("transformers", "tokenizers", "triton", *COMPILERS, *HTTP),
    # the process for isolated calls, and what it imports for grammars
    "import tp_engine.system.isolation.host": ("torch", "transformers", "numpy", "zmq", "llguidance", *HTTP),
    "import tp_engine.grammar.compiler_process, llguidance": ("torch", "transformers", "numpy", "zmq", *HTTP),
    "from tp_engine import LLM": ("transformers", "tokenizers", "triton", *COMPILERS, "fastapi", "uvicorn"),
    f"from tp_engine.engine.tokenizer import load_tokenizer; load_tokenizer({str(DEMO)!r})": (
        *COMPILERS,
        *MODELLING,
    ),
    # the frontend process, which loads a tokenizer too
    f"from tp_engine.server import main; main._do_without_torch(); main._load_early({str(DEMO)!r})": (
        "torch.nn",
        "triton",
        "tp_engine.worker",
        "tp_engine.engine.start",
        *COMPILERS,
        *MODELLING,
    ),
}


@pytest.mark.parametrize(("start", "heavy"), STARTS.items(), ids=range(len(STARTS)))
def test_a_process_does_not_import(start: str, heavy: tuple[str, ...]) -> None:
    """Oracle: no heavy module that the process does not need."""
    code = f"import sys; {start}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.slow
def test_an_engine_starts_and_generates_without_a_compiler() -> None:
    """Oracle: no operation of a start uses the Python decompositions of torch, whose sizes are sympy's."""
    code = (
        "import sys; from tp_engine import LLM, SamplingParams\n"
        "with LLM(device='cpu', num_gpu_blocks_override=16, max_model_len=64) as llm:\n"
        "    llm.generate([[65, 66]], SamplingParams(max_tokens=4), use_tqdm=False)\n"
        f"print([name for name in {(*COMPILERS, *MODELLING)!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
