/* Tasks of products with quantised weights in panels; quantised.c has them. */

#pragma once

#include "linear_rows.h"
#include "quantised.h"

/* As run_task: `p` has the panels as its weight, and rows that are prepared. */
void run_quantised_task(const Linear *p, const Quantised *q, int64_t task, int64_t num_groups, int64_t dtype,
                        int64_t kind);

/* Writes a row of x in the form that products read, prepared_bytes long. */
void prepare_row(const Quantised *q, char *to, const char *from, int64_t dtype);
