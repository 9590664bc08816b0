// The lightning indexer's scores on Hopper: keys in FP8 pages of 64, 32 heads of 128 dimensions.
//
// A page, 64 keys of 128 bytes and their 64 scales, is one copy of the copy engine and the left operand of one product,
// whose columns are the heads of 1 or 4 queries. A thread of the product's result holds columns 8 j + 2 (lane % 4) and
// the one after it, for rows lane / 4 and 8 further: with 4 queries these are all the heads of one of them.
#pragma once
#include "threshold.cuh"

constexpr int HEADS = 32, WIDTH = 128, PAGE = 64;
constexpr int KEY_BYTES = PAGE * WIDTH, PAGE_BYTES = KEY_BYTES + PAGE * 4;

extern __shared__ u8 memory[];

__device__ inline u8 *aligned_memory() { return memory + (-shared_address(memory) & 1023); }

// A group is some queries in a row of one sequence: listed as (first, number), or all of one size.
struct Groups {
    const int *listed;
    int size;
    __device__ int first(int group) const { return listed ? listed[2 * group] : group * size; }
    __device__ int members(int group) const { return listed ? listed[2 * group + 1] : size; }
};

template <int STAGES> struct Pipeline {
    alignas(1024) u8 keys[STAGES][KEY_BYTES];
    float scales[STAGES][PAGE];
    u64 full[STAGES], empty[STAGES];

    __device__ void init(u32 consumer_warps) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], consumer_warps);
        }
        barriers_ready();
    }

    // One lane: bring page `page` of the storage as the turn-th one.
    __device__ void fetch(int turn, const TensorMap *map, const u8 *storage, i64 page) {
        const int stage = turn % STAGES;
        if (page >> 31) __trap(); // a page that nobody assigned
        wait(&empty[stage], turn / STAGES % 2 ^ 1);
        arrive_expecting(&full[stage], PAGE_BYTES);
        bulk_copy_box(keys[stage], map, 0, 0, (int)page, &full[stage]);
        bulk_copy(scales[stage], storage + page * PAGE_BYTES + KEY_BYTES, PAGE * 4, &full[stage]);
    }
};

// Twice ReLU(x), and NaN of NaN, at four times the speed of a maximum that keeps NaN. x is no infinity: e4m3 has none.
__device__ inline float twice_relu(float x) { return x + fabsf(x); }

__device__ inline float from_bf16(u16 x) { return __int_as_float((int)x << 16); }

// A row of 128 bf16 numbers, which e4m3 holds exactly, as a row of a swizzled operand.
__device__ inline void store_query_row(u8 *operand, int row, const u16 *query) {
    for (int chunk = 0; chunk < 8; chunk++) {
        alignas(16) u16 values[16], packed[8];
        ((uint4 *)values)[0] = ((const uint4 *)query)[chunk * 2];
        ((uint4 *)values)[1] = ((const uint4 *)query)[chunk * 2 + 1];
        for (int i = 0; i < 8; i++)
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(packed[i])
                : "f"(from_bf16(values[2 * i + 1])), "f"(from_bf16(values[2 * i])));
        *(uint4 *)(operand + row * WIDTH + (chunk ^ row % 8) * 16) = *(uint4 *)packed;
    }
}

// Begin the product of a page's keys with the heads of some queries.
template <int COUNT> __device__ inline void begin_products(float (&products)[COUNT], const u8 *keys, const u8 *query) {
    const u64 left = descriptor(keys), right = descriptor(query);
    products_fence();
    for (int k = 0; k < WIDTH / 32; k++) product_e4m3(products, left + 2 * k, right + 2 * k, k > 0);
    products_commit();
}

// Scores of rows lane / 4 and lane / 4 + 8 of each warp's 16, of query lane % 4 or of the one, from products that have
// arrived. weights: half of each head's. The sums have one order either way: four sums over the heads that a lane has of one query, then these.
template <int COUNT>
__device__ inline void page_scores(const float (&products)[COUNT], const float *weights, const float *scales,
                                   u64 *empty, float (&scores)[2]) {
    constexpr int QUERIES = 2 * COUNT / HEADS, PARTS = QUERIES == 4 ? 4 : 1;
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float scale[2] = {scales[row], scales[row + 8]};
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sums[4] = {};
#pragma unroll
        for (int j = 0; j < COUNT / 4; j++)
#pragma unroll
            for (int b = 0; b < 2; b++)
                sums[j % PARTS] = fmaf(twice_relu(products[4 * j + 2 * half + b]), weights[2 * j + b], sums[j % PARTS]);
        if (QUERIES == 4) {
            scores[half] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        } else {
            const float sum = sums[0] + __shfl_xor_sync(~0u, sums[0], 1);
            scores[half] = sum + __shfl_xor_sync(~0u, sum, 2);
        }
        scores[half] *= scale[half];
    }
}
