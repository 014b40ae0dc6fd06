/* A recorded call: a player, which takes a function's arguments from words, and the words. */
#pragma once

#include <stdint.h>

enum { MAX_WORDS = 24 };

typedef union {
    void *pointer;
    int64_t integer;
    float number;
} Word;

typedef int (*Player)(const Word *words);

/* Mirrored in tape.py, which asks for max_words. */
typedef struct {
    Player play;
    Word words[MAX_WORDS];
} TapeEntry;
