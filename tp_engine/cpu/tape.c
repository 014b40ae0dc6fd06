/* Make recorded calls again, one after the other. */

#include "tape.h"

int max_words(void) { return MAX_WORDS; }

/* Runs entries from *position on.  0 says that all have run, and *position is 0 again; any other status is that of
   entry *position, which has not run to its end. */
int run_tape(const TapeEntry *entries, int64_t num_entries, int64_t *position)
{
    for (; *position < num_entries; ++*position) {
        const int status = entries[*position].play(entries[*position].words);
        if (status)
            return status;
    }
    *position = 0;
    return 0;
}
