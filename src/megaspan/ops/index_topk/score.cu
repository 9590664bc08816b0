// The scores of few queries: all of them, and the maxima of groups of keys.
#include "maxima.cuh"

constexpr int SCORE_STAGES = 5;
constexpr int MOST_GROUPS = 256;

template <int QUERIES> struct ScoreShared {
    alignas(1024) u8 query[QUERIES * HEADS * WIDTH];
    Pipeline<SCORE_STAGES> pipeline;
    int ends[MOST_GROUPS], seen[MOST_GROUPS];
};

// Score all keys. Every block gets an equal share of all groups' pages, 4 at a time, however long each context is.
template <int QUERIES>
__device__ void score_keys(const TensorMap *map, const u8 *storage, const u16 *query, const float *weights,
                           const i64 *starts, int pages, Groups groups, int group_count,
                           const i64 *sequence_ids, const i64 *visible,
                           float *scores, // [G, QUERIES, length]
                           int length,
                           float *maxima,     // [G, QUERIES, RANKED]
                           float *run_maxima, // [G, QUERIES, length / 16]
                           int topk) {
    auto &shared = *(ScoreShared<QUERIES> *)aligned_memory();
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) shared.pipeline.init(4);
    if (threadIdx.x >= 128) {
        int total = 0;
        for (int begin = 0; begin < group_count; begin += 32) {
            const int group = begin + lane;
            int seen = 0;
            if (group < group_count)
                for (int member = 0; member < groups.members(group); member++)
                    seen = max(seen, (int)visible[groups.first(group) + member]);
            if (seen <= topk) seen = 0; // all are selected, and nothing is scored
            int end = (seen + 4 * PAGE - 1) / (4 * PAGE);
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int other = __shfl_up_sync(~0u, end, lanes);
                if (lane >= lanes) end += other;
            }
            if (group < group_count) shared.ends[group] = total + end, shared.seen[group] = seen;
            total += __shfl_sync(~0u, end, 31);
        }
    }
    __syncthreads();
    const int total = shared.ends[group_count - 1], each = (total + gridDim.x - 1) / gridDim.x;
    const int stop = min((int)(blockIdx.x + 1) * each, total);
    int turn = 0;
    for (int share = blockIdx.x * each, group = 0; share < stop;) {
        while (shared.ends[group] <= share) group++;
        const int begin = group ? shared.ends[group - 1] : 0, end = min(stop, shared.ends[group]);
        const int longest = shared.seen[group];
        const int first = (share - begin) * 4, last = min((end - begin) * 4, (longest + PAGE - 1) / PAGE);
        const i64 token = groups.first(group);
        const int members = groups.members(group);
        if (threadIdx.x >= 128) {
            const i64 *row = starts + sequence_ids[token] * pages;
            i64 next = first + lane < last ? row[first + lane] : 0;
            for (int begin = first; begin < last; begin += 32) {
                const i64 start = next;
                next = begin + 32 + lane < last ? row[begin + 32 + lane] : 0;
                for (int i = 0; i < min(32, last - begin); i++) {
                    const i64 page = __shfl_sync(~0u, start, i) / PAGE;
                    if (lane == 0) shared.pipeline.fetch(turn + begin - first + i, map, storage, page);
                }
            }
            turn += last - first;
        } else {
            named_barrier<1, 128>(); // the last group's queries have been read
            if (threadIdx.x < QUERIES * HEADS) {
                const int column = threadIdx.x;
                const int member = QUERIES == 4 ? min(column / 2 % 4, members - 1) : 0;
                const int head = QUERIES == 4 ? column / 8 * 2 + column % 2 : column;
                store_query_row(shared.query, column, query + ((token + member) * HEADS + head) * WIDTH);
            }
            fence_async();
            named_barrier<1, 128>();
            const int member = QUERIES == 4 ? lane % 4 : 0;
            const bool real = member < members && (QUERIES == 4 || lane % 4 == 0);
            const int seen = member < members ? (int)visible[token + member] : 0;
            alignas(16) float head_weights[QUERIES == 4 ? HEADS : HEADS / 4];
            for (int i = 0; i < (QUERIES == 4 ? HEADS : HEADS / 4); i++) {
                const int head = QUERIES == 4 ? i : i / 2 * 8 + lane % 4 * 2 + i % 2;
                head_weights[i] = member < members ? 0.5f * weights[(token + member) * HEADS + head] : 0.0f;
            }
            const i64 slot = group * QUERIES + member;
            const int warp = threadIdx.x / 32, row = warp * 16 + lane / 4;
            const int together = pages_of_maximum(longest);
            float highest = lowest_score();
            for (int tile = first; tile < last; tile++, turn++) {
                const int stage = turn % SCORE_STAGES;
                wait(&shared.pipeline.full[stage], turn / SCORE_STAGES % 2);
                float products[QUERIES * HEADS / 2], found[2];
                begin_products(products, shared.pipeline.keys[stage], shared.query);
                products_wait<0>();
                products_arrived(products);
                page_scores(products, head_weights, shared.pipeline.scales[stage], &shared.pipeline.empty[stage],
                            found);
                float most = lowest_score();
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int position = tile * PAGE + row + 8 * half;
                    const float score = position < seen ? fmaxf(found[half], lowest_score()) : lowest_score();
                    if (real) scores[slot * length + position] = score;
                    most = fmaxf(most, score);
                }
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
                highest = tile & together - 1 ? fmaxf(highest, most) : most;
                if (real && lane < 4) {
                    maxima[slot * RANKED + (together == 4 ? tile & ~3 : 4 * tile) + warp] = highest;
                    if (together == 4) run_maxima[slot * (length / 16) + 4 * tile + warp] = most;
                }
            }
        }
        share = end;
    }
}

#define SCORE_KERNEL(NAME, QUERIES, BLOCKS)                                                                            \
    extern "C" __global__ void __launch_bounds__(160, BLOCKS)                                                          \
        NAME(const __grid_constant__ TensorMap map, const u8 *storage, const u16 *query, const float *weights,         \
             const i64 *starts, int pages, Groups groups, int group_count, const i64 *sequence_ids,                    \
             const i64 *visible, float *scores, int length, float *maxima, float *run_maxima, int topk) {              \
        score_keys<QUERIES>(&map, storage, query, weights, starts, pages, groups, group_count, sequence_ids, visible,  \
                            scores, length, maxima, run_maxima, topk);                                                 \
    }
SCORE_KERNEL(score_keys_1, 1, 4)
SCORE_KERNEL(score_keys_4, 4, 3)
