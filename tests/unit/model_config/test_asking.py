"""The answers of transformers' classes: which are kept, for whom, and what becomes of a child that fails."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.patience import on_this_machine
from tests.unit.models.test_recognition import family_values, served_values
from tp_engine.model_config import asking, kept_answers, read_model
from tp_engine.model_config.asked_decoder import AskedDecoder, ClassAnswer
from tp_engine.model_config.asking import ask
from tp_engine.model_config.installed_classes import has_class
from tp_engine.models.class_model import guard
from tp_engine.models.recognition import child, model_class, whole
from tp_engine.models.recognition.refusal import RefusalError

_VALUES = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}
_LASTING = ClassAnswer(problem="it attends twice")
_PASSING = ClassAnswer(problem="no space left on device", is_lasting=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the cache, which is not made yet."""
    monkeypatch.setenv("TP_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "classes"


def kept(*answers: ClassAnswer) -> tuple[ClassAnswer, int]:
    """What a start is told where the class would say ``answers``, and how many times it was asked."""
    left = list(answers)
    found = kept_answers.kept(_VALUES, lambda: left.pop(0))
    return found, len(answers) - len(left)


def test_an_answer_is_kept_for_all_who_may_read_it(folder: Path) -> None:
    """Oracle: the first answer, the permissions that the umask leaves, and no other files."""
    before = os.umask(0o022)
    try:
        assert kept(_LASTING) == (_LASTING, 1)
    finally:
        os.umask(before)
    assert kept(_PASSING) == (_LASTING, 0)
    assert {(one.suffix, one.stat().st_mode & 0o777) for one in folder.iterdir()} == {
        (".json", 0o644),
        (".lock", 0o644),
    }


def test_an_answer_that_may_change_is_not_kept() -> None:
    """Oracle: the answer of the second start."""
    assert kept(_PASSING) == (_PASSING, 1)
    assert kept(_LASTING) == (_LASTING, 1)


@pytest.mark.parametrize("change", ['"mystery":1,', "", None])
def test_a_file_of_another_form_is_no_answer(change: str | None, folder: Path) -> None:
    """Oracle: a field that is unknown, one that is missing, and a part of a file: the class is asked again."""
    kept(_LASTING)
    (file,) = folder.glob("*.json")
    text = file.read_text()
    wanted = (
        text.replace('"is_lasting":true', "").replace(",}", "}")
        if change == ""
        else text.replace("{", "{" + (change or ""), 1)
    )
    file.write_text(text[:9] if change is None else wanted)
    assert kept(_PASSING) == (_PASSING, 1)


@pytest.mark.parametrize(
    "part", ["model_config/spec.py", "models/decoder.py", "layers/norm.py", "attention/torch_backend.py"]
)
def test_an_answer_holds_for_the_code_that_verified_it(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: another key where a description, a layer or a kernel has changed, and the same one in a plain copy."""
    package = tmp_path / "tp_engine"
    for name in ("model_config/kept_answers.py", part):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(kept_answers.__file__).parents[1] / name, package / name)
    monkeypatch.setattr(kept_answers, "__file__", str(package / "model_config" / "kept_answers.py"))
    first = kept_answers._key(_VALUES)
    assert kept_answers._key(dict(_VALUES)) == first
    with (package / part).open("a") as file:
        file.write("# changed\n")
    assert kept_answers._key(_VALUES) != first


@pytest.mark.parametrize("what", ["mkdir", "open", "write", "replace", "flock"])
def test_a_cache_that_cannot_be_used_is_none(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the answers of a read-only, a full and a lockless file system, at once, and no file that is left."""

    def refuse(*_given: Any, **_named: Any) -> Any:
        raise OSError(errno.ENOLCK if what == "flock" else errno.EROFS, "refused")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "no space")

    place, name, change = {
        "mkdir": (Path, "mkdir", refuse), "open": (os, "open", refuse),
        "write": (Path, "write_bytes", full), "replace": (Path, "replace", refuse),
        "flock": (fcntl, "flock", refuse),
    }[what]  # fmt: skip
    monkeypatch.setattr(place, name, change)
    monkeypatch.setattr(time, "sleep", None)  # nobody waits
    assert kept(_LASTING) == (_LASTING, 1)
    left = {one.suffix for one in folder.iterdir()} if folder.exists() else set()
    assert left <= {".lock", ".json"} and (".json" in left) == (what in ("open", "flock"))


def test_who_waits_for_another_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: one line in the log, and the answer that the other one has kept meanwhile."""
    kept(_LASTING)
    (file,), (lock,) = folder.glob("*.json"), folder.glob("*.lock")
    data = file.read_bytes()
    file.unlink()
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def wait(_seconds: float) -> None:
            file.write_bytes(data)
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", wait)
        caplog.set_level(logging.INFO, kept_answers.logger.name)
        monkeypatch.setattr(kept_answers.logger, "propagate", True)
        assert kept(_PASSING) == (_LASTING, 0)
    assert caplog.text.count("waits for its answer") == 1


def test_bookkeeping_asks_nobody_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one question for checkpoints that differ in keys that tell nothing of the decoder, two for other ones."""
    asked: list[dict[str, Any]] = []

    def answer(values: dict[str, Any]) -> ClassAnswer:
        asked.append(values)
        return _LASTING

    monkeypatch.setattr(asking, "_ask_child", answer)
    for version in ("5.22.0", "5.23.0"):
        ask({**_VALUES, "transformers_version": version, "_name_or_path": f"of {version}", "quantization_config": {}})
    assert asked == [_VALUES]
    ask({**_VALUES, "hidden_size": 128})
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "gave no answer that can be read"),
        (b'{"decoder":{"vocab_size":null}}', "can be read"),
        (None, "ended with code 3"),
    ],
)
def test_a_child_that_fails_is_a_problem(data: bytes | None, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the words of the refusal, which another start may not get."""

    def start(_module: str, _settings: bytes, *, pass_fds: list[int], **_named: Any) -> Any:
        os.write(pass_fds[0], data or b"")
        return subprocess.Popen(["sh", "-c", f"exit {3 if data is None else 0}"])

    monkeypatch.setattr(asking, "start_child", start)
    found = ask(_VALUES)
    assert problem in found.problem and not found.is_lasting


def test_numbers_that_json_has_not_are_a_problem() -> None:
    """Oracle: infinity is no number of JSON, and None is not it either; what has none is written as it is."""
    spec = read_model(family_values("llama"))
    own = {name: getattr(spec, name, ()) for name in {*AskedDecoder.__dataclass_fields__} - {"kinds", "order"}}
    found = ClassAnswer(decoder=AskedDecoder.of_layers(spec.layers, **own))
    assert msgspec.json.decode(child.written(found), type=ClassAnswer) == found
    assert found.decoder is not None
    changes: tuple[dict[str, Any], ...] = ({"embedding_scale": math.inf}, {"logit_softcap": math.inf})
    for change in changes:
        endless = ClassAnswer(decoder=replace(found.decoder, **change))
        assert "not finite" in msgspec.json.decode(child.written(endless), type=ClassAnswer).problem


@pytest.mark.parametrize(
    ("error", "is_lasting"),
    [
        (RefusalError("it attends twice"), True),
        (KeyError("full_attention"), True),
        (RuntimeError("Tensor.item() cannot be called on meta tensors"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 25600000000 bytes"), False),
        (RuntimeError("can't start new thread"), False),
        (threading.BrokenBarrierError(), False),
        (OSError(errno.ENOSPC, "no space left"), False),
        (MemoryError(), False),
        (ImportError("mamba_ssm"), False),
        (SafetensorError("I/O error: File too large (os error 27)"), False),
    ],
)
@pytest.mark.parametrize("where", ["ModelClass", "describe"])
def test_what_the_machine_lacks_is_not_kept(
    error: Exception, is_lasting: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what each error comes of: the class's code, or a disk, memory, waiting, or packages."""

    def fail(*_given: Any) -> Any:
        raise error

    monkeypatch.setattr(model_class, "ModelClass", fail if where == "ModelClass" else lambda _values: None)
    monkeypatch.setattr(whole, "describe", fail)
    monkeypatch.setattr(guard, "served_by_modules", fail)
    found = child.answer(_VALUES)
    assert found.way == "refused" and found.is_lasting == is_lasting


def test_a_child_ends_with_its_parent() -> None:
    """Oracle: the kernel's list of processes, after a parent that could tell nobody."""
    settings = f"json.dumps([1, os.getpid(), {_VALUES!r}]).encode()"
    program = (
        "import json, os, signal; from tp_engine.system.child_process import start_child; "
        f"child = start_child({asking._CHILD!r}, {settings}, pass_fds=[1], output=open(os.devnull, 'wb')); "
        "print(child.pid, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=False, timeout=on_this_machine(60)
    )
    pid, deadline = int(parent.stdout.split()[0]), time.monotonic() + on_this_machine(60)
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether it runs: nobody may wait for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_limits_are_only_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the smallest of the limits."""
    none, made = resource.RLIM_INFINITY, []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: made.append(limits))
    for limits in ((8, none), (none, none), (none, 16), (64, 64)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, found=limits: found)
        child.limit(resource.RLIMIT_AS, 32)
    assert made == [(8, none), (32, none), (16, 16), (32, 64)]


def test_names_of_classes_are_no_types() -> None:
    """Oracle: transformers' own table."""
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert all(map(has_class, listed.values())) and not any(map(has_class, {*listed} - {*listed.values()}))


@pytest.mark.slow
def test_a_child_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the answer in this process; the second start finds the first one's, and an ended child keeps nothing."""
    values = served_values("GemmaForCausalLM")
    with monkeypatch.context() as patch:
        patch.setattr(asking, "_CHILD", "tp_engine.no_such_module")
        assert "ended with code" in ask(values).problem
    found = ask(values)
    assert found == child.answer({key: one for key, one in values.items() if key not in asking.UNASKED_KEYS})
    monkeypatch.setattr(asking, "start_child", None)
    assert ask(values) == found
