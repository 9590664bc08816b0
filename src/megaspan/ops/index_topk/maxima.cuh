// How the scores of few queries are kept, for one kernel to write and another to look through.
#pragma once
#include "scores.cuh"

constexpr int RANKED = 16384; // maxima of a query

// A group of keys, whose maximum is kept, is 16 rows of a page, or the same rows of 4 pages of a longer context.
__device__ inline int pages_of_maximum(int seen) { return seen > 16 * RANKED ? 4 : 1; }
