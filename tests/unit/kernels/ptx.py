"""The machine language (PTX) of kernels: its instructions, and the rules that it must keep."""

from __future__ import annotations

import re
from typing import Any

WAIT = "griddepcontrol.wait"
# What is read before the wait, by kernel: weights and gains, which never change while steps run.
READ_EARLY = {
    "gated_delta_net_decode_kernel": {"weight"},
    "dequantise_kernel": {"codes", "factors", "scales", "zeros"},
    "latent_map_kernel": {"up"},
    "mamba2_decode_kernel": {"dt_bias", "log_decay", "skip"},
    "norm_codes_kernel": {"weight"},
    "norm_groups_kernel": {"weight"},
    "norm_kernel": {"weight"},
    "one_row_linear_kernel": {"weight"},
    "quantised_row_kernel": {"codes"},
    "reduce_norm_kernel": {"weight"},
}
FORBIDDEN = re.compile(r"\b(st\.global|atom\.|red\.|cp\.async|mbarrier|membar|fence)")
JOINING = {
    "best_above_kernel",
    "best_tokens_kernel",
    "front_of_slice_kernel",
    "paged_decode_kernel",
    "paged_latent_kernel",
    "weigh_kernel",
}
JOIN = ("st.global", "bar.sync", "atom.global.gpu.acq_rel.add", "bar.sync", "ld.global.cg")
_REGISTER = re.compile(r"%[a-z]+\d+")


def instructions(ptx: str) -> list[str]:
    """The lines of the kernel's body that are instructions, in order."""
    lines = (line.split("//")[0].strip() for line in ptx.split("{", 1)[1].splitlines())
    return [line for line in lines if line and not line.startswith((".", "{", "}", "//"))]


def parameters(kernel: Any) -> list[str]:
    """The names of the parameters that the compiled kernel has, in their order."""
    return [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]


def read_from(lines: list[str], names: list[str]) -> set[str]:
    """The parameters whose memory the instructions read: registers are followed from where they are set."""
    origins: dict[str, set[str]] = {}
    found: set[str] = set()
    for line in lines:
        parameter = re.search(r"_param_(\d+)\]", line)
        if parameter is not None:
            number = int(parameter.group(1))
            for register in _REGISTER.findall(line.split("[")[0]):
                origins[register] = {names[number]} if number < len(names) else {"scratch"}
            continue
        registers = _REGISTER.findall(line)
        if "ld.global" in line:
            address = _REGISTER.findall(line.split("[", 1)[1])
            found |= set().union(*(origins.get(register, {"unknown"}) for register in address[:1]))
            continue
        for register in registers[:1]:
            origins[register] = set().union(*(origins.get(other, set()) for other in registers[1:]))
    return found


def in_order(lines: list[str], wanted: tuple[str, ...]) -> bool:
    """Whether the instructions are there in this order, others between them."""
    rest = iter(lines)
    return all(any(part in line for line in rest) for part in wanted)


def check_early_start(kernel: Any) -> None:
    """``AssertionError`` if a kernel does not start before the one before it has ended, or touches what it must not.

    The rule is that of ``dependent_launch_triton``: one wait, of every thread and outside of loops; before it no store,
    no atomic and no copy, and loads from the memory of the parameters in ``READ_EARLY`` only.
    """
    lines = instructions(kernel.asm["ptx"])
    waits = [index for index, line in enumerate(lines) if WAIT in line]
    assert waits, f"{kernel.name} is not set up early"
    assert len(waits) == 1 and lines[waits[0]].startswith(WAIT), f"{kernel.name} has waits {waits}"
    before, after = lines[: waits[0]], lines[waits[0] :]
    early = [line for line in before if FORBIDDEN.search(line)]
    assert not early, f"{kernel.name} does {early} before it waits"
    labels = {line.rstrip(":") for line in before if line.startswith("$") and line.endswith(":")}
    jumps = {label for line in after if "bra" in line for label in re.findall(r"\$\w+", line)}
    assert not labels & jumps, f"{kernel.name} waits in a loop"
    assert not any("bra" in line for line in before), f"{kernel.name} may pass by its wait"
    sources = read_from(before, parameters(kernel))
    assert sources <= READ_EARLY.get(kernel.name, set()), f"{kernel.name} reads {sources} before it waits"


def check_joins(kernel: Any) -> None:
    """``AssertionError`` if the last program of a kernel in ``JOINING`` may not see the parts of all.

    The rule is the order of a counter that publishes memory (as in cooperative groups): all threads store, meet, one
    arrives with acquire and release, all meet, then parts are read past the first-level cache; none is read before.
    """
    lines = instructions(kernel.asm["ptx"])
    arrival = next(index for index, line in enumerate(lines) if JOIN[2] in line)
    assert in_order(lines, JOIN), f"{kernel.name} joins in another order"
    assert not any(JOIN[-1] in line for line in lines[:arrival]), f"{kernel.name} reads parts before it arrives"
    assert sum("atom" in line for line in lines) == 1


def has_atomics(kernel: Any) -> bool:
    """Whether the kernel's code has an atomic operation."""
    return any("atom" in line for line in instructions(kernel.asm["ptx"]))
