/* Keys and values of latent attention's heads, made of cached rows, in a cache of their own (attention_types.h): its
   blocks have all heads, whose keys are columns and whose values are rows as far apart as keys. */

#include "simd.h"

/* Elements of keys and values below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_ITEMS = 1 << 14 };

/* `bytes` of up to VW rows, `stride` bytes apart, as columns of items of 4 bytes. */
INLINE void store_columns(const char *from, int64_t stride, int64_t count, int64_t bytes, float *to)
{
    const int64_t items = bytes / 4;
    for (int64_t u = 0; u < items; u += VW) {
        vf rows[VW];
        for (int i = 0; i < VW; i++)
            rows[i] = load_some(from + smaller(i, count - 1) * stride, u, items, FLOAT32);
        transpose(rows);
        for (int i = 0; i < smaller(VW, items - u); i++)
            store_vector(to + (u + i) * VW, rows[i]);
    }
}

/* made (tokens, heads, nope + value_dim) contiguous; turned: `rope` elements of each token, `turned_stride` elements
   apart.  They become the tokens from `first` on, a multiple of VW, of heads `first_head` on.  keys, values (blocks,
   all_heads, block_size, nope + rope), where value_dim is at most that size. */
int store_expanded(const char *made, const char *turned, int64_t turned_stride, char *keys, char *values,
                   int64_t first, int64_t num_tokens, int64_t first_head, int64_t num_heads, int64_t all_heads,
                   int64_t block_size, int64_t nope, int64_t rope, int64_t value_dim, int64_t dtype,
                   int64_t num_threads)
{
    const int64_t size = item_bytes((int)dtype), head_bytes = (nope + rope) * size, stride = turned_stride * size;
    const int64_t own_bytes = (nope + value_dim) * size, token_bytes = num_heads * own_bytes;
    const int64_t num_groups = (num_tokens + VW - 1) / VW, work = num_tokens * num_heads * (nope + rope + value_dim);
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (work >= MIN_PARALLEL_ITEMS)
    for (int64_t task = 0; task < num_groups * num_heads; task++) {
        const int64_t token = task / num_heads * VW, head = task % num_heads, count = smaller(VW, num_tokens - token);
        const int64_t block = (first + token) / block_size, offset = (first + token) % block_size;
        const int64_t place = ((block * all_heads + first_head + head) * block_size + offset) * head_bytes;
        const char *own = made + token * token_bytes + head * own_bytes;
        store_columns(own, token_bytes, count, nope * size, (float *)(keys + place));
        store_columns(turned + token * stride, stride, count, rope * size, (float *)(keys + place + nope * size * VW));
        for (int64_t i = 0; i < count; i++)
            memcpy(values + place + i * head_bytes, own + i * token_bytes + nope * size, value_dim * size);
    }
    return 0;
}
