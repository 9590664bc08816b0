// The selection of many queries, whose scores are never stored: see gpu_prefill.py for the way it goes.
#include "scores.cuh"

constexpr int WARPGROUPS = 3, GROUP = 4 * WARPGROUPS; // queries of a block: 4 for each of its warpgroups
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int FILTER_STAGES = 9;
constexpr int SLACK = 512; // kept besides the best, because the last bit of a threshold costs most

struct FilterShared {
    alignas(1024) u8 query[WARPGROUPS][4 * HEADS * WIDTH];
    Pipeline<FILTER_STAGES> pipeline;
    int counts[GROUP];
};

// Append to each query's list the keys of this phase that beat its threshold. The phase's tiles are offset + j * stride;
// the blocks of a column of the grid share a group's, each in steps, as good keys often lie together.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    filter_keys(const __grid_constant__ TensorMap map, const u8 *storage, const u16 *query, const float *weights,
                const i64 *starts, int pages, Groups groups, const i64 *sequence_ids, const i64 *visible,
                const u64 *thresholds, // [G, GROUP], 0 where there is none yet
                u64 *lists,            // [G, GROUP, splits, capacity]
                int *counts,           // [G, GROUP, splits]
                int capacity, int topk, int offset, int stride) {
    FilterShared &shared = *(FilterShared *)aligned_memory();
    const int group = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const i64 token = groups.first(group);
    const int members = groups.members(group);
    const i64 sequence = sequence_ids[token];
    int longest = 0, shortest = LAST; // of those that choose: the others select all that they see
    for (int member = 0; member < members; member++) {
        const int seen = (int)visible[token + member];
        if (seen > topk) longest = max(longest, seen), shortest = min(shortest, seen);
    }
    const int phase = max((longest + PAGE - 1) / PAGE - offset + stride - 1, 0) / stride;
    const int turns = max(phase - split + splits - 1, 0) / splits;

    if (threadIdx.x == 0) shared.pipeline.init(CONSUMERS / 32);
    if (threadIdx.x < GROUP) shared.counts[threadIdx.x] = 0;
    if (threadIdx.x < CONSUMERS) {
        const int column = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
        const int member = min(warpgroup * 4 + column / 2 % 4, members - 1), head = column / 8 * 2 + column % 2;
        const i64 row = (token + member) * HEADS + head;
        store_query_row(shared.query[warpgroup], column, query + row * WIDTH);
    }
    fence_async();
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        const int lane = threadIdx.x % 32;
        const i64 *row = starts + sequence * pages + offset + (i64)split * stride;
        const i64 step = (i64)splits * stride;
        i64 next = lane < turns ? row[lane * step] : 0;
        for (int begin = 0; begin < turns; begin += 32) {
            const i64 start = next;
            next = begin + 32 + lane < turns ? row[(begin + 32 + lane) * step] : 0;
            for (int i = 0; i < min(32, turns - begin); i++) {
                const i64 page = __shfl_sync(~0u, start, i) / PAGE;
                if (lane == 0) shared.pipeline.fetch(begin + i, &map, storage, page);
            }
        }
    } else {
        const int warpgroup = threadIdx.x / 128, member = warpgroup * 4 + threadIdx.x % 4;
        const int seen = member < members ? (int)visible[token + member] : 0;
        const u64 least = seen > topk ? thresholds[group * GROUP + member] : ~0ull;
        const float threshold = seen <= topk ? -lowest_score() : least ? score_of(least >> 32) : lowest_score();
        const int threshold_low = seen <= topk ? LAST : least ? (int)(u32)least : -1;
        u64 *list = lists + ((i64)(group * GROUP + member) * splits + split) * capacity;
        alignas(16) float head_weights[HEADS];
        for (int head = 0; head < HEADS; head++)
            head_weights[head] = member < members ? 0.5f * weights[(token + member) * HEADS + head] : 0.0f;
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        // The warpgroups take turns with the tensor cores, or they would all wait for these at once and then all compute.
        const int next = (warpgroup + 1) % WARPGROUPS;
        if (warpgroup == WARPGROUPS - 1) hand_over(1);
        for (int turn = 0; turn < turns; turn++) {
            const int stage = turn % FILTER_STAGES, tile = offset + (split + turn * splits) * stride;
            float products[4 * HEADS / 2];
            wait(&shared.pipeline.full[stage], turn / FILTER_STAGES % 2);
            take_over(1 + warpgroup);
            begin_products(products, shared.pipeline.keys[stage], shared.query[warpgroup]);
            hand_over(1 + next);
            products_wait<0>();
            products_arrived(products);
            float scores[2];
            page_scores(products, head_weights, shared.pipeline.scales[stage], &shared.pipeline.empty[stage], scores);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float score = fmaxf(scores[half], lowest_score());
                const int position = tile * PAGE + row + 8 * half;
                if (score >= threshold && position < seen &&
                    (score > threshold || LAST - position > threshold_low)) {
                    const int at = atomicAdd(&shared.counts[member], 1);
                    if (at < capacity) list[at] = key_of(score, position);
                }
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < GROUP) counts[(group * GROUP + threadIdx.x) * splits + split] = shared.counts[threadIdx.x];
}

// Keep the best topk of a query's old best and its lists, and up to SLACK more; the least of them is the new threshold.
// After the last phase (`selected` is there) write the positions of exactly topk instead.
extern "C" __global__ void __launch_bounds__(512)
    merge_best(const u64 *best, u64 *merged, int *best_counts, const u64 *lists, const int *counts, u64 *thresholds,
               int *overflow, int splits, int capacity, int topk, Groups groups, const i64 *visible,
               int *selected, int room) {
    __shared__ Scratch scratch;
    u64 *keys = (u64 *)memory;
    const i64 slot = blockIdx.x;
    const int member = slot % GROUP;
    if (member >= groups.members(slot / GROUP)) return;
    const i64 token = groups.first(slot / GROUP) + member;
    const int seen = (int)visible[token];
    if (seen <= topk) {
        if (selected)
            for (int i = threadIdx.x; i < topk; i += blockDim.x) selected[token * topk + i] = i < seen ? i : -1;
        return;
    }
    best += slot * (topk + SLACK), merged += slot * (topk + SLACK), lists += slot * splits * capacity;
    int total = best_counts[slot];
    u32 low = ~0u, high = 0; // of the scores' orders
    const auto bring = [&](const u64 *from, int count) {
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const u64 key = from[i];
            keys[total + i] = key, low = min(low, (u32)(key >> 32)), high = max(high, (u32)(key >> 32));
        }
    };
    const int old = total;
    total = 0;
    bring(best, old);
    total = old;
    for (int split = 0; split < splits; split++) {
        const int count = counts[slot * splits + split];
        if (count > capacity && threadIdx.x == 0) overflow[token] = 1;
        bring(lists + split * capacity, min(count, capacity));
        total += min(count, capacity);
    }
    block_range(low, high, scratch); // all threads have brought theirs
    const auto each = [&](const auto &use) {
        for (int i = threadIdx.x; i < total; i += blockDim.x) use(keys[i]);
    };
    u64 least = 0;
    if (total >= topk)
        least = threshold(each, (u64)low << 32, (u64)high << 32 | ~0u, topk, selected ? 0 : SLACK, scratch);
    int *positions = (int *)(keys + (topk + 1) / 2 * 2 + SLACK + splits * capacity);
    if (threadIdx.x == 0) scratch.cursor = 0;
    if (selected)
        for (int i = threadIdx.x; i < room; i += blockDim.x) positions[i] = LAST;
    __syncthreads();
    for (int begin = 0; begin < total; begin += blockDim.x) {
        const int i = begin + threadIdx.x;
        const bool chosen = i < total && keys[i] >= least;
        const u32 at = place_of(chosen, scratch);
        if (chosen && selected) positions[at] = position_of(keys[i]);
        if (chosen && !selected) merged[at] = keys[i];
    }
    __syncthreads();
    if (selected) {
        sort_ascending(positions, room);
        for (int i = threadIdx.x; i < topk; i += blockDim.x)
            selected[token * topk + i] = positions[i] < LAST ? positions[i] : -1;
    } else if (threadIdx.x == 0) {
        thresholds[slot] = least;
        best_counts[slot] = scratch.cursor;
    }
}
