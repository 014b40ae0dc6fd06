/* What layers whose state is a matrix per value head have in common (delta.c, mamba2.c): where the matrices are, and
   the recurrence of a block of tokens.  Each tile of a matrix' columns goes through all tokens of the block while it is
   in the first-level cache. */
#pragma once

#include "recurrent.h"

#include <stdlib.h>
#include <string.h>

/* The largest key_dim and value_dim, the vectors of a matrix' rows that are worked on together, the tokens of a
   block. */
enum { MAX_DIM = 256, TILE = 4, BLOCK = 32, MIN_PARALLEL = 1 << 14 };

/* `items` of slot 0: a slot has (value_heads, key_dim, value_dim). */
typedef struct {
    float *items;
    int64_t stride, key_heads, value_heads, key_dim, value_dim;
} Matrices;

/* What a block's tokens have in common, for one value head: `step` is how much of a value, or of its change, a token
   adds, and `skip` how much of it goes straight to the output. */
typedef struct {
    const float *queries, *keys; /* (tokens, rows) */
    float *values;               /* (tokens, width): they become the outputs */
    float *states[BLOCK + 1];    /* (rows, width): before the block, then behind each token */
    float decay[BLOCK], step[BLOCK], skip;
    float *decays, *sights; /* (tokens, rows), where rows decay on their own, or NULL: what of a row stays, and keys of
                               what stays */
    int64_t tokens, rows, width;
} Block;

/* A layer's own: a block's tokens go into `n` vectors of a matrix' rows, from column `first` on. */
INLINE void run_tile(const Block *b, int64_t first, const int n);

/* The same of a single column. */
static void run_column(const Block *b, int64_t first);

static void run_block(const Block *b)
{
    int64_t i = 0;
    for (; i + TILE * VW <= b->width; i += TILE * VW)
        run_tile(b, i, TILE);
    for (; i + VW <= b->width; i += VW)
        run_tile(b, i, 1);
    for (; i < b->width; i++)
        run_column(b, i);
}

/* The matrices of value heads `first` to `first + count - 1` before a run, which go on with it: those in its slot, or
   if it has none, others that `end_matrices` frees.  NULL if there is no memory for these. */
INLINE float *begin_matrices(const Matrices *m, const Run *run, int64_t first, int64_t count)
{
    const int64_t matrix = m->key_dim * m->value_dim;
    if (run->slot < 0)
        return calloc(count * matrix, sizeof(float));
    float *const found = m->items + run->slot * m->stride + first * matrix;
    if (run->is_fresh)
        memset(found, 0, count * matrix * sizeof *found);
    return found;
}

INLINE void end_matrices(const Run *run, float *begun)
{
    if (run->slot < 0)
        free(begun);
}

/* A block of a run's tokens, from `begin` on, goes through the matrix of value head `head`: from `begun`, the one
   before the run, to the same place, or with `slots` to that of each token. */
INLINE void place_states(const Matrices *m, Block *b, const Run *run, int64_t begin, int64_t head, float *begun)
{
    for (int64_t token = -1; token < b->tokens; token++)
        b->states[token + 1] = run->slots && begin + token >= 0
            ? m->items + slot_behind(run, begin + token) * m->stride + head * m->key_dim * m->value_dim
            : begun;
}
