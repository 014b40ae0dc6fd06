/* KV blocks in 8 bits, encoded and decoded while they are copied.  kernels/kv_cache/block_codes.py has the format. */

#include "simd.h"

/* Bytes of a vector that attention.c keeps in columns, at most: 256 float32. */
enum { MAX_VECTOR_BYTES = 1024 };

/* Bytes of blocks below which other threads would cost more than they save. */
enum { MIN_PARALLEL_BYTES = 1 << 18 };

#define SMALLEST_SCALE 0x1p-126f

/* What a block consists of.  Mirrored in layout.py. */
typedef struct {
    int64_t num_parts, part_vectors, head_dim;
    int64_t lanes; /* keys are columns, so many tokens side by side; 0: they are rows */
    int64_t dtype, codes;
    int64_t num_threads;
} BlockForm;

INLINE int64_t head_bytes(const BlockForm *form) { return form->head_dim * item_bytes((int)form->dtype); }

INLINE int64_t part_bytes(const BlockForm *form) { return form->part_vectors * head_bytes(form); }

/* A scale as bfloat16, rounded up: 0 below the smallest normal number, NaN if not finite. */
INLINE uint16_t rounded_up(float scale)
{
    uint32_t bits;
    if (!(scale < INFINITY))
        return 0x7fc0;
    if (scale < SMALLEST_SCALE)
        return 0;
    memcpy(&bits, &scale, 4);
    return (uint16_t)((bits + 0xffff) >> 16);
}

INLINE float from_bfloat16(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void encode_vector(const char *x, uint8_t *to, char *scale, int64_t width, const int dtype, const int codes)
{
    const uint16_t half = rounded_up(peak_of(x, width, dtype) / largest_code(codes));
    memcpy(scale, &half, 2);
    convert_scaled(to, codes, x, dtype, width, half ? 1.0f / from_bfloat16(half) : 0.0f);
}

INLINE void decode_vector(const uint8_t *from, const char *scale, char *out, int64_t width, const int dtype,
                          const int codes)
{
    uint16_t half;
    memcpy(&half, scale, 2);
    convert_scaled(out, dtype, from, codes, width, from_bfloat16(half));
}

/* A group of keys between columns, `from` (items of 4 bytes, lanes), and vectors (lanes, items): one becomes the other
   if `count` and `lanes` are exchanged. */
static void turn(const char *from, char *to, int64_t count, int64_t lanes)
{
    if (count % VW == 0 && lanes % VW == 0) {
        for (int64_t u = 0; u < count; u += VW)
            for (int64_t v = 0; v < lanes; v += VW) {
                vf rows[VW];
                for (int i = 0; i < VW; i++)
                    rows[i] = load_vector((const float *)from + (u + i) * lanes + v);
                transpose(rows);
                for (int i = 0; i < VW; i++)
                    store_vector((float *)to + (v + i) * count + u, rows[i]);
            }
        return;
    }
    for (int64_t u = 0; u < count; u++)
        for (int64_t v = 0; v < lanes; v++)
            memcpy(to + (v * count + u) * 4, from + (u * lanes + v) * 4, 4);
}

#define FOR_CODES(statement)                                                  \
    if (form->codes == INT8_CODES) { enum { CODES = INT8_CODES }; statement; } \
    else { enum { CODES = E4M3_CODES }; statement; }

#define FOR_TYPES(statement) { const int dtype = (int)form->dtype; FOR_DTYPE(FOR_CODES(statement)) }

/* `count` vectors that lie side by side. */
static void encode_vectors(const BlockForm *form, const char *from, uint8_t *codes, char *scales, int64_t count)
{
    FOR_TYPES(for (int64_t v = 0; v < count; v++)
                  encode_vector(from + v * head_bytes(form), codes + v * form->head_dim, scales + v * 2, form->head_dim,
                                TYPE, CODES))
}

static void decode_vectors(const BlockForm *form, const uint8_t *codes, const char *scales, char *to, int64_t count)
{
    FOR_TYPES(for (int64_t v = 0; v < count; v++) decode_vector(codes + v * form->head_dim, scales + v * 2,
                                                                to + v * head_bytes(form), form->head_dim, TYPE, CODES))
}

/* One part of a block and of its blob. */
typedef struct {
    char *block;
    uint8_t *codes;
    char *scales;
    int64_t step; /* vectors of a group; all of the part where they are rows */
    int turns;    /* the groups are columns */
} Part;

INLINE Part part_of(const BlockForm *form, char *block, char *blob, int64_t part)
{
    const int64_t first = part * form->part_vectors;
    char *scales = blob + form->num_parts * form->part_vectors * form->head_dim;
    const int turns = form->lanes > 1 && part % 2 == 0;
    return (Part){
        .block = block + part * part_bytes(form),
        .codes = (uint8_t *)blob + first * form->head_dim,
        .scales = scales + first * 2,
        .step = turns ? form->lanes : form->part_vectors,
        .turns = turns,
    };
}

INLINE int64_t blob_bytes(const BlockForm *form) { return form->num_parts * form->part_vectors * (form->head_dim + 2); }

/* `pairs` (num_pairs, 2): a block of `pool` and its place in `blobs`. */
void encode_blocks(const BlockForm *form, char *pool, char *blobs, const int32_t *pairs, int64_t num_pairs)
{
    const int64_t count = num_pairs * form->num_parts, items = head_bytes(form) / 4;
    const int is_large = count * part_bytes(form) >= MIN_PARALLEL_BYTES;
#pragma omp parallel for schedule(static) num_threads((int)form->num_threads) if (is_large && form->num_threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const int32_t *pair = pairs + i / form->num_parts * 2;
        const Part part = part_of(form, pool + pair[0] * form->num_parts * part_bytes(form),
                                  blobs + pair[1] * blob_bytes(form), i % form->num_parts);
        for (int64_t v = 0; v < form->part_vectors; v += part.step) {
            char group[VW * MAX_VECTOR_BYTES];
            const char *vectors = part.block + v * head_bytes(form);
            if (part.turns) {
                turn(vectors, group, items, form->lanes);
                vectors = group;
            }
            encode_vectors(form, vectors, part.codes + v * form->head_dim, part.scales + v * 2, part.step);
        }
    }
}

/* `pairs` (num_pairs, 2): a place in `blobs` and a block of `pool`. */
void decode_blocks(const BlockForm *form, char *blobs, char *pool, const int32_t *pairs, int64_t num_pairs)
{
    const int64_t count = num_pairs * form->num_parts, items = head_bytes(form) / 4;
    const int is_large = count * part_bytes(form) >= MIN_PARALLEL_BYTES;
#pragma omp parallel for schedule(static) num_threads((int)form->num_threads) if (is_large && form->num_threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const int32_t *pair = pairs + i / form->num_parts * 2;
        const Part part = part_of(form, pool + pair[1] * form->num_parts * part_bytes(form),
                                  blobs + pair[0] * blob_bytes(form), i % form->num_parts);
        for (int64_t v = 0; v < form->part_vectors; v += part.step) {
            char group[VW * MAX_VECTOR_BYTES], *vectors = part.block + v * head_bytes(form);
            decode_vectors(form, part.codes + v * form->head_dim, part.scales + v * 2, part.turns ? group : vectors,
                           part.step);
            if (part.turns)
                turn(group, vectors, form->lanes, items);
        }
    }
}
