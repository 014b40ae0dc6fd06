"""How the grouped products of experts are cut into tiles, by the number of pairs of an expert, and no Triton.

The code's own choice is a line of a table, the same for all models and GPUs; a device may have others
(``candidates``).  Weights that are widened in registers have tables of their own: where 4 warps of such a tile had
128 outputs, 255 registers were not enough, and each step of its sums went through memory.
"""

from typing import NamedTuple


class Tiles(NamedTuple):
    """How a grouped product is cut: rows, outputs and columns of a program's tile, its warps and stages.

    Columns for quantised weights follow from their groups instead.  ``by_compiler``: Triton's ``dot_scaled`` widens the
    values of MXFP4.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    by_compiler: bool = False

    @property
    def name(self) -> str:
        """The tiles as a part of a candidate's name."""
        return f"{self.block_m}x{self.block_n}-w{self.num_warps}-s{self.num_stages}"


# The most pairs per expert, on average, and the tiles.  ``scripts/bench_kernels.py --tiles experts`` times them.
DENSE_TILES = (
    (8, Tiles(16, 64, 64, 4, 4)),
    (32, Tiles(32, 64, 64, 4, 4)),
    (128, Tiles(64, 128, 64, 4, 3)),
    (1 << 30, Tiles(128, 128, 64, 8, 3)),
)
QUANTISED_TILES = (
    *DENSE_TILES[:2],
    (128, Tiles(64, 128, 64, 8, 3)),
    (1 << 30, Tiles(128, 64, 64, 8, 3)),
)


# Pairs per expert, on average, from which PyTorch's grouped products take over, on GPUs that have them.  In bfloat16,
# at 32,768 tokens, VeOmni measured 242 to 215 TFLOP/s for 128 experts, and 181 to 71 for 512.
GROUPED_MM_FROM = 512


def tiles_for(num_pairs: int, num_experts: int, *, is_quantised: bool) -> Tiles:
    """The code's own choice of tiles for ``num_pairs``."""
    table = QUANTISED_TILES if is_quantised else DENSE_TILES
    return next(tiles for most, tiles in table if num_pairs <= most * num_experts)
