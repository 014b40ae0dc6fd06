"""What requests generate while nobody reads it: kept on rank 0 until they end, so that one message carries it all."""

from collections import defaultdict

import msgspec
import numpy as np

from tp_engine.plan import TokenLogprobs
from tp_engine.requests.request import SequenceDelta, StepOutput


class _Held:
    """What one sequence has generated since its first token."""

    __slots__ = ("logprobs", "started", "token_ids")

    def __init__(self) -> None:
        self.started = False
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []


class HeldTokens:
    """The expected requests, by id, with their sequences that have begun; false if there are none.

    A sequence's first record goes on at once, because its time is that of the first token.
    """

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, _Held]] = {}
        self._num_left: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def expect(self, request_id: str, num_sequences: int) -> None:
        """Keep what the sequences of a request generate from now on."""
        self._requests[request_id] = defaultdict(_Held)
        self._num_left[request_id] = num_sequences

    def forget(self, request_id: str) -> None:
        """Keep nothing of a request; ignores unknown ones."""
        self._requests.pop(request_id, None)
        self._num_left.pop(request_id, None)

    def fold(self, output: StepOutput) -> StepOutput:
        """Return what of ``output`` is passed on: other requests' part, and first and last records."""
        requests = self._requests
        passed = StepOutput(weight_version=output.weight_version)
        for request_id, index, token_id in zip(output.request_ids, output.indices, output.token_ids, strict=True):
            sequences = requests.get(request_id)
            if sequences is None:
                passed.request_ids.append(request_id)
                passed.indices.append(index)
                passed.token_ids.append(token_id)
            else:
                sequences[index].token_ids.append(token_id)
        for delta in output.deltas:
            sequences = requests.get(delta.request_id)
            if sequences is None:
                passed.deltas.append(delta)
            elif delta.finish_reason is not None:
                passed.deltas.append(_whole(sequences.pop(delta.index, _Held()), delta))
                self._num_left[delta.request_id] -= 1
                if not self._num_left[delta.request_id]:
                    self.forget(delta.request_id)
            elif not (held := sequences[delta.index]).started:
                held.started = True
                passed.deltas.append(delta)
            else:
                held.token_ids += delta.new_token_ids
                if delta.logprobs is not None:
                    held.logprobs.append(delta.logprobs)
        return passed


def _whole(held: _Held, last: SequenceDelta) -> SequenceDelta:
    """``last`` with all that was held before it."""
    logprobs = last.logprobs
    if held.logprobs:
        logprobs = _joined([*held.logprobs, *([] if logprobs is None else [logprobs])])
    return msgspec.structs.replace(last, new_token_ids=held.token_ids + last.new_token_ids, logprobs=logprobs)


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )
