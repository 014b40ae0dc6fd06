"""Log-probabilities of prompt tokens, a bounded number of positions at a time.

Logits are the widest tensors of a step, and a prompt may have as many positions as a step has tokens.  The number of
positions scored at once is therefore fixed at the start, and the largest step (``trial_steps``) scores as many.
"""

from __future__ import annotations

import torch

from tp_engine.models.causal_lm import CausalLM
from tp_engine.sampling.logprobs import LogprobTensors, logprobs_of

_LEAST_POSITIONS = 16  # with fewer, most of the time goes into reading the output head's weight


def positions_at_once(max_num_seqs: int) -> int:
    """Positions whose logits exist at once: as many as a step samples, at least 16."""
    return max(max_num_seqs, _LEAST_POSITIONS)


def score_prompt(
    model: CausalLM, hidden: torch.Tensor, following: torch.Tensor, k: int, max_positions: int
) -> LogprobTensors | None:
    """Score ``following`` (n,) int32, the tokens after the outputs ``hidden`` (n, hidden), and the ``k`` likeliest.

    n is at least 1.  Rank 0 gets the result, the others None.  A collective for every ``max_positions`` positions.
    """
    parts: list[LogprobTensors] = []
    for start in range(0, len(hidden), max_positions):
        logits = model.compute_logits(hidden[start : start + max_positions])
        if logits is not None:
            parts.append(logprobs_of(logits, following[start : start + max_positions], k))
        del logits  # before the next ones are made
    return LogprobTensors.joined(parts) if parts else None


def score_largest(model: CausalLM, logits: torch.Tensor, following: torch.Tensor, k: int) -> None:
    """Use as much memory as ``score_prompt`` at once, beside local ``logits`` (n, width) of that many positions.

    Scores only a few positions, because sampling has scored as many as a step samples.  A collective.
    """
    gathered = model.lm_head.gather(logits)
    if gathered is not None:
        logprobs_of(gathered[:_LEAST_POSITIONS], following[:_LEAST_POSITIONS], k)


def empty_scores(num_positions: int, vocab_size: int, k: int, device: torch.device) -> LogprobTensors:
    """Tensors as large as the result of ``score_prompt`` for ``num_positions`` positions."""
    shape = (num_positions, 1 + min(k, vocab_size))
    return LogprobTensors(
        token_ids=torch.zeros(shape, dtype=torch.int32, device=device),
        logprobs=torch.zeros(shape, device=device),
        ranks=torch.zeros(num_positions, dtype=torch.int32, device=device),
    )
