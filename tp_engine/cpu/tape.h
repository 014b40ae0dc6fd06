/* A recorded call: a player, which takes a function's arguments from words, and the words. */
#pragma once

#include <stdint.h>

enum { MAX_WORDS = 30 };

typedef union {
    void *pointer;
    int64_t integer;
    float number;
} Word;

typedef int (*Player)(const Word *words);

/* Before a function: prototypes.py writes a player of it, so that a tape can hold its calls. */
#define TAPED

/* Mirrored in tape.py, which asks for max_words. */
typedef struct {
    Player play;
    Word words[MAX_WORDS];
} TapeEntry;
