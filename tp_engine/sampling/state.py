"""What the sampler knows of each row: parameters on the host, penalty counts on the device.

Decisions about a step (which rows are greedy, which need edits) read only the host arrays, so no step waits for the
device.  What a step needs on the device is uploaded when the set of sampled rows changes, not in every step.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.job.topology import RankInfo
from tp_engine.kernels.ops import has_triton
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.layers.embedding import VocabSlice
from tp_engine.layers.upload import upload_all
from tp_engine.plan import IntArray, RowSampling, StepPlan
from tp_engine.sampling.processors import GrammarBitmasks, PenaltyCounts

ALONE = RankInfo()
GREEDY_BELOW = 1e-5  # lower temperatures are greedy: dividing by them would only overflow


class SamplingState:
    """Sampling parameters of ``max_num_seqs`` rows; a released row samples greedily without edits.

    ``version`` changes with every admission and release: what is derived from the parameters is valid for one version.
    ``vocab`` is this rank's slice of the vocabulary; counts and masks cover that slice.  ``tables`` are the parameters
    for kernels, by default kept on CUDA if Triton is installed.  ``masks`` are those of the next step.
    ``scores_processed``: log-probabilities come from processed logits.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        info: RankInfo = ALONE,
        has_tables: bool | None = None,
        scores_processed: bool = False,
    ) -> None:
        self.scores_processed = scores_processed
        self.vocab_size = vocab_size
        self.vocab = VocabSlice.of_rank(vocab_size, info)
        self.device = device
        self.version = 0
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)  # vocab_size: all tokens
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.log_min_p = np.full(max_num_seqs, -np.inf, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.seed: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.is_penalised = np.zeros(max_num_seqs, dtype=np.bool_)
        self.has_lists = np.zeros(max_num_seqs, dtype=np.bool_)  # logit_bias or allowed_token_ids
        self.is_edited = np.zeros(max_num_seqs, dtype=np.bool_)  # these or penalties
        self.is_plain = np.ones(max_num_seqs, dtype=np.bool_)  # greedy, no edits, no log-probabilities
        self._columns = [one for one in vars(self).values() if isinstance(one, np.ndarray)]
        self._empty = [column[0] for column in self._columns]
        self._mirrored = (-1, b"", b"")  # the version, the draft rows and their rows
        self.token_lists: dict[int, RowSampling] = {}  # rows with bias, allowed or stop ids
        self.penalties = PenaltyCounts(max_num_seqs, self.vocab, device)
        self.masks = GrammarBitmasks(max_num_seqs, self.vocab, device)
        if has_tables is None:
            has_tables = device.type == "cuda" and has_triton()
        self.tables = SamplingTables.empty(max_num_seqs, device) if has_tables else None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, with the counts of penalties, which are allocated when the first row needs them."""
        return self.penalties.num_bytes + (0 if self.tables is None else self.tables.num_bytes)

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's changes, in its order: released rows, then admissions."""
        if len(plan.released):
            self.release(plan.released)
        for one in plan.admitted:
            self.admit(one.row, one.sampling, one.token_ids, one.num_prompt_tokens)

    def admit(self, row: int, sampling: RowSampling, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Set a row.  ``token_ids`` (int32) are its prompt and, for a resumed request, the tokens generated so far."""
        self.version += 1
        greedy = sampling.temperature < GREEDY_BELOW
        self.temperature[row] = 0.0 if greedy else sampling.temperature
        self.top_k[row] = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        self.top_p[row] = sampling.top_p
        self.log_min_p[row] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
        self.seed[row] = int(sampling.seed) & (2**64 - 1)
        self.num_logprobs[row] = min(sampling.logprobs, self.vocab_size)
        self.min_tokens[row] = sampling.min_tokens if len(sampling.stop_token_ids) else 0
        self.num_prompt_tokens[row] = num_prompt_tokens
        self._admit_token_lists(row, sampling)
        self._admit_penalties(row, sampling, token_ids, num_prompt_tokens)
        self.has_lists[row] = len(sampling.bias_token_ids) or len(sampling.allowed_token_ids)
        self.is_edited[row] = self.is_penalised[row] or self.has_lists[row]
        self.is_plain[row] = (
            greedy and not self.is_edited[row] and self.num_logprobs[row] < 0 and self.min_tokens[row] == 0
        )
        self._push(row)

    def keep(self, rows: IntArray, tokens: IntArray) -> None:
        """Count ``tokens`` (n,), accepted draft tokens, as generated by ``rows`` (n,), grouped."""
        if (counted := self.is_penalised[rows]).any():
            on_device = upload_all([rows[counted].astype(np.int64), tokens[counted].astype(np.int64)], self.device)
            self.penalties.record(*on_device)

    def mirror(self, draft_rows: IntArray, rows: IntArray, tokens: IntArray) -> None:
        """Let ``draft_rows`` (n,), rows that nothing is admitted to, sample as ``rows`` (n,) do after draft ``tokens``
        (n,): a draft row's own, and those of the same row's draft rows before it."""
        self._mirror_parameters(draft_rows, rows)
        if (counted := self.is_penalised[rows]).any():
            self.penalties.mirror(draft_rows[counted], rows[counted], tokens[counted])

    def _mirror_parameters(self, draft_rows: IntArray, rows: IntArray) -> None:
        asked = (self.version, draft_rows.tobytes(), rows.tobytes())
        if asked == self._mirrored:
            return
        self.version += 1
        self._mirrored = (self.version, *asked[1:])
        for column in self._columns:
            column[draft_rows] = column[rows]
        for draft_row, row in zip(draft_rows.tolist(), rows.tolist(), strict=True):
            self.token_lists.pop(draft_row, None)
            if row in self.token_lists:
                self.token_lists[draft_row] = self.token_lists[row]
            self._push(draft_row)

    def _push(self, row: int) -> None:
        """Copy a row's parameters into the tables."""
        if self.tables is None:
            return
        filters = (self.temperature, self.top_p, self.log_min_p)
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        numbers = np.array([column[row] for column in (*filters, *penalties)], dtype=np.float32)
        top_k, seed = self.top_k[row : row + 1].copy(), self.seed[row : row + 1].view(np.int64).copy()
        floats_of_row, *others = upload_all((numbers, top_k, seed), self.device)
        self.tables.floats[row] = floats_of_row
        self.tables.top_k[row : row + 1], self.tables.seeds[row : row + 1] = others

    def _admit_token_lists(self, row: int, sampling: RowSampling) -> None:
        self.token_lists.pop(row, None)
        lists = (sampling.stop_token_ids, sampling.bias_token_ids, sampling.allowed_token_ids)
        assert all(ids.min() >= 0 and ids.max() < self.vocab_size for ids in lists if len(ids)), "unchecked token ids"
        if any(len(ids) for ids in lists):
            self.token_lists[row] = sampling

    def _admit_penalties(self, row: int, sampling: RowSampling, token_ids: IntArray, num_prompt_tokens: int) -> None:
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.is_penalised[row] = (
            sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0
        )
        if self.is_penalised[row]:
            self.penalties.admit(row, token_ids, num_prompt_tokens)

    def masked(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """``logits`` (n, width) of ``rows`` (n,) after the masks; a copy if log-probabilities need the raw ones."""
        if not self.masks.any_of(rows):
            return logits
        in_place = self.scores_processed or bool((self.num_logprobs[rows] < 0).all())
        return self.masks.apply(logits, rows, in_place=in_place)

    def release(self, rows: IntArray) -> None:
        """Forget ``rows``: until they are admitted again they are greedy and have no edits."""
        self.version += 1
        for column, empty in zip(self._columns, self._empty, strict=True):
            column[rows] = empty
        for row in rows.tolist():
            self.token_lists.pop(row, None)
