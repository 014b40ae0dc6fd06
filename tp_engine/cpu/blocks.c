/* Copies of whole KV blocks between two pieces of memory, such as a pool and the host tier. */

#include <stdint.h>
#include <string.h>

/* What one thread copies at a time, so that a few large blocks still keep all threads busy. */
enum { PIECE_BYTES = 1 << 18 };

/* Bytes below which other threads would cost more than they save. */
enum { MIN_PARALLEL_BYTES = 1 << 21 };

/* Blocks of `block_bytes` lie side by side in `from` and in `to`, which do not overlap; `pairs` (num_pairs, 2) are a
   source and a target each, all targets different. */
void copy_blocks(const char *from, char *to, const int32_t *pairs, int64_t num_pairs, int64_t block_bytes,
                 int64_t num_threads)
{
    const int64_t pieces = (block_bytes + PIECE_BYTES - 1) / PIECE_BYTES, count = num_pairs * pieces;
    const int is_large = num_pairs * block_bytes >= MIN_PARALLEL_BYTES;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_large && num_threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = i % pieces * PIECE_BYTES, left = block_bytes - begin;
        const int32_t *pair = pairs + i / pieces * 2;
        memcpy(to + pair[1] * block_bytes + begin, from + pair[0] * block_bytes + begin,
               left < PIECE_BYTES ? left : PIECE_BYTES);
    }
}
