"""The step plan: rank 0's message to every rank about one step.

A plan carries changes, not state.  Every rank keeps, for each *row* of the persistent batch, its block table, number of
computed tokens, sampling parameters and token ids; applying the plans in order keeps all ranks equal.  A rank applies a
plan in this order::

    what features do before -> released -> admitted -> new blocks -> what features do, in their order
         -> copies -> state copies -> forward pass over decodes, then prefills -> sample

Batch order of a step: all ``decode_rows`` (one token each, all sampled), then all ``prefill_rows`` (``prefill_tokens``
each; those with ``prefill_samples`` reach the end of their known tokens in this step and are sampled too).

``rows_epoch`` numbers the sets of decode rows: plans of an equal epoch above 0 have equal ``decode_rows``, so that a
reader may keep what it made of them.  Epoch 0 says nothing about the rows.

The last of ``decode_rows`` may be *spare rows*, rows after those of the batch, of which a feature says in a section
of its own for which row each stands, at a later position of the same step.  Such a plan has no epoch.

New blocks: ``block_rows`` (n,) names the row that grows by a *logical block*, ``block_size`` tokens, which is one block
of the pool in each of the model's G groups of layers (``kv_layout``).  All groups grow at once, so ``block_ids`` is
(n * G,), logical block by logical block::

    G = 3                  group 0   1   2
    block_rows | 4 |  block_ids | 17 | 8 | 30 |     the next of row 4 is block 17 in group 0, 8 in 1, 30 in 2
               | 4 |            | 18 | 9 | 31 |
               | 7 |            | 19 | 3 | 32 |

The blocks of one row stand together, in the order of its tables.  A model whose layers are all alike has G = 1.  Tables
are never cut: the entries of blocks that a group's window has left behind stay in the table unread, and the blocks may
belong to other rows.

A copy is a pair of blocks of the pool, source and target, of any group.  All copies of a plan are made at once: each
source is read as it was before any of them.

Where layers have a recurrent state, each row has a slot with its number for it.  A state copy is a pair of such slots,
source and target, and all of a plan are made at once too.  A row that begins with its first token needs none: its state
before that is zero.

Images: ``images`` (n, 5) has the images of the rows that are admitted, each with its row, its first place in the
prompt, the number of its places, and its rows and columns of embeddings.  ``encodes`` (n, 12) are images that the ranks
encode before the forward pass, each on one rank, for all: its first row in the encoder cache, its rows and columns, the
rank, how many of the tower's layers have run before and have run then, and where its pixels are (``ImageInput``):
process, file, the offset's low and high 31 bits, height and width.  With the last layer its rows are in the cache;
until then every plan that has a result has the image again, or its rank forgets what has run.  ``image_rows`` (n, 3)
are the images that chunks of this plan touch: row, place in the prompt, and first row in the encoder cache.  A rank
that has applied a plan keeps nothing else of it but the cache's rows and ``images``.

``extensions`` are the sections of features, by name: arrays and numbers that the core passes on.

An *order* asks all ranks for something that is no step, such as new weights.  It travels alone: its plan has no rows,
is sent when nothing is in flight, and has no result.
"""

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

PAD_SLOT = -1
_MOST_SHOWN = 8  # of a kind, in a plan's repr
MASK_TOKENS = 32  # token ids in a word of a mask
FIRST_STEP_ID = 1
POOLS_NONE, POOLS_LAST, POOLS_ALL = range(3)  # which outputs of a row are read in place of a token
NO_IDS: IntArray = np.empty(0, dtype=np.int32)
NO_FLOATS: FloatArray = np.empty(0, dtype=np.float32)
NO_FLAGS: BoolArray = np.empty(0, dtype=np.bool_)
NO_PAIRS: IntArray = np.empty((0, 2), dtype=np.int32)
NO_IMAGES: IntArray = np.empty((0, 5), dtype=np.int32)
NO_ENCODES: IntArray = np.empty((0, 12), dtype=np.int32)
NO_IMAGE_ROWS: IntArray = np.empty((0, 3), dtype=np.int32)


class Control(enum.IntFlag):
    """What a rank does instead of going on with the next plan."""

    NONE = 0
    STOP = 1


class Order(msgspec.Struct, frozen=True):
    """What all ranks are to do together; ``kind`` is a name in ``worker/orders.py``, the arguments are JSON's types."""

    kind: str
    arguments: dict[str, Any]


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the sampler needs to know of one row.  Defaults are greedy decoding without any processor.

    ``seed`` is always set: rank 0 draws one where the user gave none.  ``logprobs`` and ``prompt_logprobs`` are the
    number of alternatives per token, -1 for none at all.  ``min_tokens`` generated tokens must precede any of
    ``stop_token_ids`` (which include the EOS ids unless they are ignored).  ``allowed_token_ids`` empty means all.

    A row that ``pools`` (``POOLS_LAST``) returns, beside its first token, the hidden state that the token comes from,
    after the final norm, or what a classifier's head makes of it; or, with ``pooled_token_ids``, only the logits of
    these.  With ``POOLS_ALL`` it returns what the head makes of each token of its prompt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    min_tokens: int = 0
    pools: int = POOLS_NONE
    stop_token_ids: IntArray = NO_IDS
    bias_token_ids: IntArray = NO_IDS
    bias_values: FloatArray = NO_FLOATS
    allowed_token_ids: IntArray = NO_IDS
    pooled_token_ids: IntArray = NO_IDS


class Admission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request enters the batch at ``row``.

    ``token_ids`` (int32) are all tokens known so far: the ``num_prompt_tokens`` of the prompt, then those generated
    before a preemption.  ``block_ids`` (int32) are the row's tables so far, logical block by logical block as in a
    plan: (K * G,).  The first ``num_computed_tokens`` tokens already hold K/V, except those that a group's window has
    left behind: the entries of their blocks are 0 and never read.
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: IntArray
    sampling: RowSampling


def _counted(items: list[Any], what: str = "") -> str:
    """``2 rows (0, 5)``; of many the first ones."""
    more = ", ..." if len(items) > _MOST_SHOWN else ""
    of_what = f" {what}{'' if len(items) == 1 else 's'}" if what else ""
    return f"{len(items)}{of_what} ({', '.join(map(str, items[:_MOST_SHOWN]))}{more})"


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step.  All arrays are int32 unless said otherwise; see the module's text for the order of application.  Every
    rank makes one per step.  It and its parts are msgspec structs, which take a tenth of a frozen dataclass's time."""

    step_id: int
    control: Control = Control.NONE
    rows_epoch: int = 0
    released: IntArray = NO_IDS
    admitted: tuple[Admission, ...] = ()
    block_rows: IntArray = NO_IDS
    block_ids: IntArray = NO_IDS
    copies: IntArray = NO_PAIRS
    state_copies: IntArray = NO_PAIRS
    decode_rows: IntArray = NO_IDS
    prefill_rows: IntArray = NO_IDS
    prefill_tokens: IntArray = NO_IDS
    prefill_samples: BoolArray = NO_FLAGS
    order: bytes = b""  # an ``Order`` as JSON
    images: IntArray = NO_IMAGES
    encodes: IntArray = NO_ENCODES
    image_rows: IntArray = NO_IMAGE_ROWS
    extensions: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Return a line: what the step does, row by row as far as there is room, and how large the other parts are."""
        said = [f"step {self.step_id}"]
        if self.control:
            said.append(str(self.control.name))
        if len(self.decode_rows):
            said.append(f"decodes {_counted(self.decode_rows.tolist(), 'row')}")
        if len(self.prefill_rows):
            columns = (self.prefill_rows, self.prefill_tokens, self.prefill_samples)
            chunks = zip(*(column.tolist() for column in columns), strict=False)  # also of a plan that is malformed
            told = [f"{row}: {num}{'' if ends else '...'}" for row, num, ends in chunks]
            said.append(f"prompt tokens of {_counted(told, 'row')}")
        if self.admitted:
            said.append(f"admits {_counted([one.row for one in self.admitted], 'row')}")
        if len(self.released):
            said.append(f"releases {_counted(self.released.tolist(), 'row')}")
        sizes = {
            "new blocks": len(self.block_rows),
            "copies": len(self.copies),
            "state copies": len(self.state_copies),
            "images": len(self.images),
            "encodes": len(self.encodes),
            "image rows": len(self.image_rows),
            "bytes of an order": len(self.order),
        }
        said += [f"{count} {name}" for name, count in sizes.items() if count]
        if self.extensions:
            said.append(f"sections {_counted(list(self.extensions))}")
        return f"<StepPlan {'; '.join(said)}>"

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled in this step, over all rows."""
        return len(self.decode_rows) + (int(self.prefill_tokens.sum()) if len(self.prefill_tokens) else 0)

    def extended(self, sections: dict[str, Any]) -> "StepPlan":
        """Return the plan with these sections of features, too."""
        return msgspec.structs.replace(self, extensions={**self.extensions, **sections})

    @property
    def sampled_rows(self) -> IntArray:
        """Rows that receive a new token in this step, in batch order."""
        return np.concatenate((self.decode_rows, self.prefill_rows[self.prefill_samples]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of a run of positions, before penalties and temperature.  ``token_ids`` (n, 1 + k) int32 and
    ``logprobs`` (n, 1 + k) float32: column 0 is the chosen token (for a prompt: the actual next token), the others the
    k likeliest in order.  ``ranks`` (n,) int32: 1-based rank of column 0."""

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0's device returned for one step: one new token per sampled row, in ``StepPlan.sampled_rows`` order.

    ``logprobs`` (n rows, in the same order, as many alternatives as the greediest row asked for) is None when no row
    asked.  ``prompt_logprobs`` maps a row to the log-probabilities of the prompt positions that this step computed:
    entry i scores the token that follows computed position ``first + i`` of the chunk.  ``pooled`` maps the rows that
    pool to their hidden states (hidden,) or scores (labels,), to those of the chunk's tokens (n, size), or to logits,
    one for each of their ``pooled_token_ids``.  ``drafts`` maps rows to what the draft head made after the row's last
    token that counts, as many tokens as the plan asked for.
    """

    step_id: int
    token_ids: IntArray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    pooled: dict[int, FloatArray] = {}
    drafts: dict[int, IntArray] = {}
