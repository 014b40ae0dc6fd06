/* Collectives of ranks that share memory; ipc/rank_slots.py describes the protocol, and why it is right.

   A call that waits for another rank returns that rank's number + 1 when its time is up.  The caller calls it again
   with the same arguments, and it continues where it was.  0 says that it has ended. */

#define _GNU_SOURCE /* clockid_t */
#include <sched.h>
#include <semaphore.h>
#include <time.h>

#include "simd.h"

enum { MAX_RANKS = 64, SEMAPHORE_BYTES = 64, ITEMS_PER_TASK = 1 << 14, TRIES_PER_LOOK = 16 };
enum { WRITE = 0, MEET = 1, MEET_AGAIN = 2 };

struct exchange {
    char *slots, *results, *semaphores;
    /* The C library's functions, as Python has found them: under the names that they have in a new one, no older one
       would load this library.  sem_clockwait, from glibc 2.30 on, may be NULL. */
    int (*sem_post)(sem_t *), (*sem_trywait)(sem_t *);
    int (*sem_timedwait)(sem_t *, const struct timespec *);
    int (*sem_clockwait)(sem_t *, clockid_t, const struct timespec *);
    int64_t rank, num_ranks, slot_bytes;
    int64_t two_shot_bytes; /* pieces of more than this are added up in two shots */
    int64_t spin_ns, block_ns;
    int64_t num_pieces;         /* done so far, over all collectives */
    int64_t offset, stage, peer; /* of the collective under way */
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

INLINE void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static sem_t *semaphore(const struct exchange *x, int64_t from, int64_t to)
{
    return (sem_t *)(x->semaphores + (from * x->num_ranks + to) * SEMAPHORE_BYTES);
}

static char *slot(const struct exchange *x, int64_t rank)
{
    return x->slots + (2 * rank + x->num_pieces % 2) * x->slot_bytes;
}

/* Waits for block_ns at most.  The wall clock, which may be set back, only where there is nothing else. */
static int block(const struct exchange *x, sem_t *from)
{
    struct timespec until;
    clock_gettime(x->sem_clockwait ? CLOCK_MONOTONIC : CLOCK_REALTIME, &until);
    const int64_t nanoseconds = until.tv_nsec + x->block_ns;
    until.tv_sec += nanoseconds / 1000000000L;
    until.tv_nsec = nanoseconds % 1000000000L;
    return (x->sem_clockwait ? x->sem_clockwait(from, CLOCK_MONOTONIC, &until) : x->sem_timedwait(from, &until)) == 0;
}

/* Takes one from a semaphore: now, while spinning, or, if `blocks`, before block_ns have passed or a signal has come.
   Returns whether it did.  The spin yields, because on a busy machine the other rank may be waiting for this core. */
static int take(const struct exchange *x, sem_t *from, int blocks)
{
    if (x->sem_trywait(from) == 0)
        return 1;
    if (x->spin_ns)
        for (const int64_t until = now_ns() + x->spin_ns; now_ns() < until; sched_yield())
            for (int i = 0; i < TRIES_PER_LOOK; i++) {
                relax();
                if (x->sem_trywait(from) == 0)
                    return 1;
            }
    return blocks && block(x, from);
}

static void announce(const struct exchange *x)
{
    for (int64_t other = 0; other < x->num_ranks; other++)
        if (other != x->rank)
            x->sem_post(semaphore(x, x->rank, other));
}

/* 0, or the number + 1 of a rank that is late. */
static int meet(struct exchange *x, int blocks)
{
    for (; x->peer < x->num_ranks; x->peer++)
        if (x->peer != x->rank && !take(x, semaphore(x, x->peer, x->rank), blocks))
            return (int)x->peer + 1;
    x->peer = 0;
    return 0;
}

static void next_piece(struct exchange *x, int64_t offset)
{
    x->num_pieces++;
    x->offset = offset;
    x->stage = WRITE;
}

/* Adds up ranks as a balanced tree, ((0 + 1) + (2 + 3)) + ...; a rank without a partner waits for the next level. */
INLINE vf tree_of(vf *parts, const int64_t num_ranks)
{
    for (int64_t step = 1; step < num_ranks; step *= 2)
        for (int64_t rank = 0; rank + step < num_ranks; rank += 2 * step)
            parts[rank] += parts[rank + step];
    return parts[0];
}

/* out of `out_dtype` = the sum of `from`, in float32, rounded once; items `begin` to `end`. */
INLINE void sum_items(const char *const *from, const int64_t num_ranks, char *out, int64_t begin, int64_t end,
                      const int dtype, const int out_dtype)
{
    vf parts[MAX_RANKS];
    int64_t i = begin;
    for (; i + VW <= end; i += VW) {
        for (int64_t rank = 0; rank < num_ranks; rank++)
            parts[rank] = load_items(from[rank], i, dtype);
        store_items(out, i, tree_of(parts, num_ranks), out_dtype);
    }
    if (i < end) {
        for (int64_t rank = 0; rank < num_ranks; rank++)
            parts[rank] = load_tail(from[rank], i, end - i, dtype);
        store_tail(out, i, end - i, tree_of(parts, num_ranks), out_dtype);
    }
}

/* Parts of `dtype` become a sum of it. */
INLINE void sum_alike(const char *const *from, const int64_t num_ranks, char *out, int64_t begin, int64_t end,
                      int dtype)
{
    FOR_DTYPE(sum_items(from, num_ranks, out, begin, end, TYPE, TYPE))
}

/* Parts of float32 become a sum of `dtype`. */
INLINE void sum_float32(const char *const *from, const int64_t num_ranks, char *out, int64_t begin, int64_t end,
                        int dtype)
{
    FOR_DTYPE(sum_items(from, num_ranks, out, begin, end, FLOAT32, TYPE))
}

INLINE void sum_task(const char *const *from, const int64_t num_ranks, char *out, int64_t begin, int64_t end, int dtype,
                     int out_dtype)
{
    if (dtype == out_dtype)
        sum_alike(from, num_ranks, out, begin, end, dtype);
    else
        sum_float32(from, num_ranks, out, begin, end, out_dtype);
}

static void sum_parts(const struct exchange *x, const char *mine, char *out, int64_t begin, int64_t end, int dtype,
                      int out_dtype, int64_t num_threads)
{
    const char *from[MAX_RANKS];
    for (int64_t rank = 0; rank < x->num_ranks; rank++)
        from[rank] = rank == x->rank ? mine : slot(x, rank);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && end - begin > ITEMS_PER_TASK)
    for (int64_t at = begin; at < end; at += ITEMS_PER_TASK) {
        const int64_t stop = at + ITEMS_PER_TASK < end ? at + ITEMS_PER_TASK : end;
        if (x->num_ranks == 2) /* known when this is compiled, the parts stay in registers */
            sum_task(from, 2, out, at, stop, dtype, out_dtype);
        else
            sum_task(from, x->num_ranks, out, at, stop, dtype, out_dtype);
    }
}

/* This rank's share of the sum, for all to read; shares end at multiples of VW items. */
static void sum_share(const struct exchange *x, const char *mine, int64_t count, int dtype, int out_dtype,
                      int64_t num_threads)
{
    const int64_t share = (count / x->num_ranks / VW + 1) * VW;
    const int64_t begin = share * x->rank < count ? share * x->rank : count;
    const int64_t end = begin + share < count ? begin + share : count;
    sum_parts(x, mine, x->results, begin, end, dtype, out_dtype, num_threads);
}

/* out (count,) of `out_dtype` = the sum of data (count,) of `dtype` over ranks.  out may be data; out_dtype is dtype,
   or dtype is FLOAT32. */
int shared_all_reduce(struct exchange *x, const char *data, char *out, int64_t count, int64_t dtype, int64_t out_dtype,
                      int64_t num_threads, int64_t blocks)
{
    const int64_t item = item_bytes((int)dtype), out_item = item_bytes((int)out_dtype), num_bytes = count * item;
    while (x->offset < num_bytes) {
        const int64_t left = num_bytes - x->offset, bytes = left < x->slot_bytes ? left : x->slot_bytes;
        const int64_t piece = bytes / item;
        const char *const mine = data + x->offset;
        char *const to = out + x->offset / item * out_item;
        int late = 0;
        if (x->stage == WRITE) {
            memcpy(slot(x, x->rank), mine, bytes);
            announce(x);
            x->stage = MEET;
        }
        if (x->stage == MEET) {
            if ((late = meet(x, (int)blocks)))
                return late;
            if (bytes <= x->two_shot_bytes) {
                sum_parts(x, mine, to, 0, piece, (int)dtype, (int)out_dtype, num_threads);
                next_piece(x, x->offset + bytes);
                continue;
            }
            sum_share(x, mine, piece, (int)dtype, (int)out_dtype, num_threads);
            announce(x);
            x->stage = MEET_AGAIN;
        }
        if ((late = meet(x, (int)blocks)))
            return late;
        memcpy(to, x->results, piece * out_item);
        next_piece(x, x->offset + bytes);
    }
    x->offset = 0;
    return 0;
}

/* data (rows, row_bytes) of each rank -> out (rows, num_ranks * row_bytes); all of `data` fits into a slot. */
int shared_all_gather(struct exchange *x, const char *data, char *out, int64_t rows, int64_t row_bytes, int64_t blocks)
{
    if (x->stage == WRITE) {
        memcpy(slot(x, x->rank), data, rows * row_bytes);
        announce(x);
        x->stage = MEET;
    }
    const int late = meet(x, (int)blocks);
    if (late)
        return late;
    for (int64_t rank = 0; rank < x->num_ranks; rank++) {
        const char *const from = rank == x->rank ? data : slot(x, rank);
        for (int64_t row = 0; row < rows; row++)
            memcpy(out + (row * x->num_ranks + rank) * row_bytes, from + row * row_bytes, row_bytes);
    }
    next_piece(x, 0);
    return 0;
}
