// The best of many keys: exact, and the same however many passes it takes.
//
// A key holds an order of its score in the upper half and LAST - position in the lower, so that no two keys are equal
// and, among equal scores, the lowest position is the largest key.
#pragma once
#include "../hopper.cuh"

constexpr int LAST = 0x7FFFFFFF;
constexpr int BUCKETS = 1024;

__device__ inline float lowest_score() { return __int_as_float(0xFF800000); }

// Unsigned numbers in the order of the scores; -0 is 0 and NaN is -inf.
__device__ inline u32 ordered(float score) {
    int bits = __float_as_int(fmaxf(score, lowest_score()) + 0.0f);
    return (u32)(bits ^ ((bits >> 31) & LAST)) ^ 0x80000000u;
}

__device__ inline float score_of(u32 rank) {
    int bits = (int)(rank ^ 0x80000000u);
    return __int_as_float(bits ^ ((bits >> 31) & LAST));
}

__device__ inline u64 key_of(float score, int position) { return (u64)ordered(score) << 32 | (u32)(LAST - position); }
__device__ inline int position_of(u64 key) { return LAST - (int)(u32)key; }

struct Scratch {
    u32 histogram[BUCKETS];
    u32 sums[32];
    u32 lows[32], highs[32];
    u64 few[32], found;
    u32 bucket, above, inside, cursor;
};

__device__ inline int leading_zeros(u32 x) { return __clz(x) + 32; }
__device__ inline int leading_zeros(u64 x) { return __clzll(x); }

// The sum of what the threads before this one bring; every thread of the block calls it.
__device__ inline u32 block_scan(u32 own, u32 &total, Scratch &scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 upto = own;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const u32 other = __shfl_up_sync(~0u, upto, lanes);
        if (lane >= lanes) upto += other;
    }
    __syncthreads(); // the last sums have been read
    if (lane == 31) scratch.sums[warp] = upto;
    __syncthreads();
    const u32 sum = lane < blockDim.x / 32 ? scratch.sums[lane] : 0;
    total = __reduce_add_sync(~0u, sum);
    return upto - own + __reduce_add_sync(~0u, lane < warp ? sum : 0);
}

// The least and the greatest of what the threads of the block bring; every thread gets them.
__device__ inline void block_range(u32 &low, u32 &high, Scratch &scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    __syncthreads(); // the last ones have been read
    if (lane == 0) scratch.lows[warp] = low, scratch.highs[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(~0u, scratch.lows[lane % (blockDim.x / 32)]);
    high = __reduce_max_sync(~0u, scratch.highs[lane % (blockDim.x / 32)]);
}

// A number T such that at least `wanted` of the block's keys are T or more, and at most `slack` besides; where keys are
// equal there may be more. each(f) calls f(key) for this thread's keys, once a pass; all are from low to high. Every
// pass sorts the keys that may be the last chosen one into BUCKETS equal stretches of their range.
template <class Key, class Each>
__device__ Key threshold(const Each &each, Key low, Key high, u32 wanted, u32 slack, Scratch &scratch) {
    const int own_buckets = BUCKETS / blockDim.x; // the first thread has the largest
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    while (true) {
        const int bits = 64 - leading_zeros((Key)(high - low)), shift = bits > 10 ? bits - 10 : 0;
        for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x) scratch.histogram[i] = 0;
        if (threadIdx.x == 0) scratch.cursor = 0;
        __syncthreads();
        each([&](Key key) {
            if (key >= low && key <= high) atomicAdd(&scratch.histogram[(u32)((key - low) >> shift)], 1);
        });
        __syncthreads();
        const int largest = BUCKETS - 1 - threadIdx.x * own_buckets;
        u32 own = 0;
        for (int i = 0; i < own_buckets; i++) own += scratch.histogram[largest - i];
        u32 total;
        const u32 before = block_scan(own, total, scratch); // keys in larger buckets than this thread's
        if (before < wanted && before + own >= wanted) {
            u32 above = before;
            int bucket = largest;
            while (above + scratch.histogram[bucket] < wanted) above += scratch.histogram[bucket--];
            scratch.bucket = bucket, scratch.above = above, scratch.inside = scratch.histogram[bucket];
        }
        __syncthreads();
        wanted -= scratch.above;
        low += (Key)scratch.bucket << shift;
        high = min(high, (Key)(low + (((Key)1 << shift) - 1)));
        if (scratch.inside <= wanted + slack || shift == 0) return low;
        if (scratch.inside > 32) continue;
        // Few are left: a warp ranks them.
        each([&](Key key) {
            if (key >= low && key <= high) scratch.few[atomicAdd(&scratch.cursor, 1)] = key;
        });
        __syncthreads();
        if (warp == 0) {
            const int number = scratch.inside;
            const u64 key = scratch.few[lane];
            u32 greater = 0, equal = 0; // to itself too
#pragma unroll 8
            for (int other = 0; other < number; other++)
                greater += scratch.few[other] > key, equal += scratch.few[other] == key;
            if (lane < number && greater < wanted && greater + equal >= wanted) scratch.found = key;
        }
        __syncthreads();
        return (Key)scratch.found;
    }
}

// Where this thread's next chosen item goes; all threads of a warp call it together. The cursor begins at 0.
__device__ inline u32 place_of(bool chosen, Scratch &scratch) {
    const u32 warp = __ballot_sync(~0u, chosen);
    u32 at = 0;
    if (warp && threadIdx.x % 32 == 0) at = atomicAdd(&scratch.cursor, __popc(warp));
    return __shfl_sync(~0u, at, 0) + __popc(warp & ((1u << threadIdx.x % 32) - 1));
}

__device__ inline void in_order(int &smaller, int &larger, bool ascending) {
    const int low = min(smaller, larger), high = max(smaller, larger);
    smaller = ascending ? low : high, larger = ascending ? high : low;
}

// Sort `room` numbers in shared memory, a power of two: bitonic, a thread's 4 neighbours in its registers, those of its
// warp by exchange, and only what is further apart through the memory. Every thread calls it.
__device__ inline void sort_ascending(int *numbers, int room) {
    const int lane = threadIdx.x % 32;
    for (int size = 2; size <= room; size *= 2) {
        int distance = size / 2;
        for (; distance >= 128; distance /= 2) {
            for (int pair = threadIdx.x; pair < room / 2; pair += blockDim.x) {
                const int one = (pair & -distance) * 2 + (pair & (distance - 1));
                in_order(numbers[one], numbers[one + distance], (one & size) == 0);
            }
            __syncthreads();
        }
        for (int begin = 4 * (threadIdx.x - lane); begin < room; begin += 4 * blockDim.x) {
            int4 own = ((int4 *)(numbers + begin))[lane];
            const int at = begin + 4 * lane;
            int far = distance;
            for (; far >= 4; far /= 2) {
                const bool upper = lane & (far / 4), keep_low = ((at & size) == 0) != upper;
                const int4 other = {__shfl_xor_sync(~0u, own.x, far / 4), __shfl_xor_sync(~0u, own.y, far / 4),
                                    __shfl_xor_sync(~0u, own.z, far / 4), __shfl_xor_sync(~0u, own.w, far / 4)};
                own.x = keep_low ? min(own.x, other.x) : max(own.x, other.x);
                own.y = keep_low ? min(own.y, other.y) : max(own.y, other.y);
                own.z = keep_low ? min(own.z, other.z) : max(own.z, other.z);
                own.w = keep_low ? min(own.w, other.w) : max(own.w, other.w);
            }
            if (far == 2) {
                in_order(own.x, own.z, (at & size) == 0);
                in_order(own.y, own.w, (at & size) == 0);
            }
            in_order(own.x, own.y, (at & size) == 0);
            in_order(own.z, own.w, ((at + 2) & size) == 0);
            ((int4 *)(numbers + begin))[lane] = own;
        }
        __syncthreads();
    }
}
