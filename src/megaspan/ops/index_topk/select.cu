// The selection among the stored scores of few queries.
#include "maxima.cuh"

constexpr int SELECT_THREADS = 1024;
constexpr int OWN = RANKED / SELECT_THREADS;
constexpr int RUNS = 8192;   // of 16 scores, or of 4 in a short context, that a part of a query's scores lists
constexpr int LISTED = 8192; // candidates of a query. Where there are more of either, all the scores are sorted out

struct Query {
    i64 token;
    int seen, longest; // by the query itself, and by the one of its group that sees most
    bool real;

    __device__ Query(const Groups &groups, int queries, i64 slot, const i64 *visible) {
        const int member = slot % queries, members = groups.members(slot / queries);
        const i64 first = groups.first(slot / queries);
        real = member < members;
        token = first + member, seen = longest = 0;
        for (int i = 0; i < members; i++) longest = max(longest, (int)visible[first + i]);
        if (real) seen = (int)visible[token];
    }
};

struct ListShared {
    int runs[RUNS];
    Scratch scratch;
};

// List, in order, the keys among a part of a query's scores that reach the topk-th largest maximum of all its groups of
// keys. Groups are 4 scores, or, in a longer context, the rows of a quarter page in one page or in four in a row.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    list_keys(Groups groups, int queries, const i64 *visible, const float *scores, int length, const float *maxima,
              const float *run_maxima,
              u64 *lists,  // [G, queries, parts, LISTED]
              u32 *listed, // [G, queries, parts], more than LISTED where there is no room
              int topk) {
    ListShared &shared = *(ListShared *)memory;
    Scratch &scratch = shared.scratch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 slot = blockIdx.x;
    const int part = blockIdx.y, parts = gridDim.y;
    const Query query(groups, queries, slot, visible);
    const int seen = query.seen;
    if (seen <= topk) return;
    scores += slot * length, maxima += slot * RANKED, run_maxima += slot * (length / 16);
    lists += (slot * parts + part) * LISTED, listed += slot * parts + part;

    // Four groups at a time; what is beyond the last score is -inf.
    const bool stored = seen > 4 * RANKED;
    const int together = pages_of_maximum(query.longest), pages = (seen + PAGE - 1) / PAGE;
    const int count = stored ? (pages + together - 1) / together * 4 : (seen + 3) / 4;
    const auto maxima_of = [&](int four) -> float4 {
        if (stored) return ((const float4 *)maxima)[four];
        float most[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool real = four * 4 + j < count;
            const float none = lowest_score();
            const float4 found = real ? ((const float4 *)scores)[four * 4 + j] : float4{none, none, none, none};
            most[j] = fmaxf(fmaxf(found.x, found.y), fmaxf(found.z, found.w));
        }
        return {most[0], most[1], most[2], most[3]};
    };
    const int fours = (count + 3) / 4;
    u32 ranks[OWN], low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < OWN / 4; i++) {
        const int four = i * SELECT_THREADS + threadIdx.x;
        const float none = lowest_score();
        const float4 found = four < fours ? maxima_of(four) : float4{none, none, none, none};
        const float each[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool real = four * 4 + j < count;
            ranks[4 * i + j] = real ? ordered(each[j]) : 0;
            if (real) low = min(low, ranks[4 * i + j]), high = max(high, ranks[4 * i + j]);
        }
    }
    u32 least = 1;
    if (count > topk) {
        block_range(low, high, scratch);
        const auto each = [&](const auto &use) {
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (ranks[i]) use(ranks[i]);
        };
        least = threshold(each, low, high, topk, topk / 4, scratch);
    }

    // The part's runs of scores that reach it, in order: a thread marks those of a few groups that lie together.
    const int each_part = (fours + parts - 1) / parts, end_four = min((part + 1) * each_part, fours);
    const int own_fours = (each_part + SELECT_THREADS - 1) / SELECT_THREADS;
    const int first_four = part * each_part + threadIdx.x * own_fours;
    u32 marks[OWN / 4], passing = 0, runs;
#pragma unroll
    for (int i = 0; i < OWN / 4; i++) {
        marks[i] = 0;
        const int four = first_four + i;
        if (i >= own_fours || four >= end_four) continue;
        const float4 found = maxima_of(four);
        if (ordered(fmaxf(fmaxf(found.x, found.y), fmaxf(found.z, found.w))) < least) continue;
        for (int p = 0; p < (stored ? together : 1); p++) {
            const int page = four * together + p;
            const float4 run = stored && together > 1 && page < pages ? ((const float4 *)run_maxima)[page] : found;
            const u32 mark = (ordered(run.x) >= least) | (ordered(run.y) >= least) << 1 |
                             (ordered(run.z) >= least) << 2 | (ordered(run.w) >= least) << 3;
            if (page < pages || !stored) marks[i] |= mark << 4 * p;
        }
        passing += __popc(marks[i]);
    }
    u32 at = block_scan(passing, runs, scratch);
    if (runs > RUNS) {
        if (threadIdx.x == 0) *listed = LISTED + 1;
        return;
    }
    const int runs_of_four = stored ? 4 * together : 4;
#pragma unroll
    for (int i = 0; i < OWN / 4; i++)
        for (u32 left = marks[i]; left; left &= left - 1)
            shared.runs[at++] = (first_four + i) * runs_of_four + __ffs(left) - 1;
    __syncthreads();

    // The keys of the runs that reach it. Neighbouring lanes have a run's pieces of four scores.
    const int pieces = stored ? 2 : 0, items = runs << pieces;
    const int rounds = (items + SELECT_THREADS - 1) / SELECT_THREADS, begin = warp * rounds * 32 + lane;
    const float limit = score_of(max(least, 0x007FFFFFu)); // the order of -inf
    u32 before = 0; // keys of the warps before, then of the rounds before
    for (int writing = 0; writing < 2; writing++) {
        u32 own_keys = 0;
#pragma unroll 4
        for (int round = 0; round < rounds; round++) {
            const int item = begin + round * 32;
            const bool real = item < items;
            const int position = real ? ((shared.runs[item >> pieces] << pieces) + (item & (1 << pieces) - 1)) * 4 : 0;
            const float none = lowest_score();
            const float4 found = real ? *(const float4 *)(scores + position) : float4{none, none, none, none};
            const int left = real ? seen - position : 0;
            const u32 mark = (found.x >= limit && left > 0) | (found.y >= limit && left > 1) << 1 |
                             (found.z >= limit && left > 2) << 2 | (found.w >= limit && left > 3) << 3;
            if (!writing) {
                own_keys += __popc(mark);
                continue;
            }
            u32 lower = 0, all = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 marks = __ballot_sync(~0u, mark >> j & 1);
                lower += __popc(marks & ((1u << lane) - 1));
                all += __popc(marks);
            }
            u32 to = before + lower;
            if (mark & 1) lists[to++] = key_of(found.x, position);
            if (mark & 2) lists[to++] = key_of(found.y, position + 1);
            if (mark & 4) lists[to++] = key_of(found.z, position + 2);
            if (mark & 8) lists[to++] = key_of(found.w, position + 3);
            before += all;
        }
        if (writing) break;
        u32 total;
        before = __shfl_sync(~0u, block_scan(own_keys, total, scratch), 0);
        if (threadIdx.x == 0) *listed = total;
        if (total > LISTED) break;
    }
}

struct ChooseShared {
    u64 keys[LISTED];
    Scratch scratch;
    alignas(16) int positions[4]; // and more
};

// The topk best of all the scores of a query, in any order: for scores among which no threshold is a good one.
__device__ void choose_among_all(const float *scores, int seen, int topk, int *positions, Scratch &scratch) {
    const auto each = [&](const auto &use) {
        for (int i = threadIdx.x; i < seen; i += blockDim.x) use(key_of(scores[i], i));
    };
    const u64 least = threshold(each, 0ull, ~0ull, topk, 0, scratch);
    __syncthreads();
    if (threadIdx.x == 0) scratch.cursor = 0;
    __syncthreads();
    for (int begin = 0; begin < seen; begin += blockDim.x) {
        const int i = begin + threadIdx.x;
        const u64 key = i < seen ? key_of(scores[i], i) : 0;
        const u32 at = place_of(key >= least, scratch);
        if (key >= least) positions[at] = i;
    }
}

// Choose the topk best of a query's listed keys, which are in the order of positions and stay so.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    choose_keys(Groups groups, int queries, const i64 *visible, const float *scores, int length, const u64 *lists,
                const u32 *listed, int parts, int *selected, int topk, int room) {
    ChooseShared &shared = *(ChooseShared *)memory;
    Scratch &scratch = shared.scratch;
    const i64 slot = blockIdx.x;
    const Query query(groups, queries, slot, visible);
    if (!query.real) return;
    const int seen = query.seen;
    selected += query.token * topk;
    if (seen <= topk) {
        for (int i = threadIdx.x; i < topk; i += blockDim.x) selected[i] = i < seen ? i : -1;
        return;
    }
    scores += slot * length, lists += slot * parts * LISTED, listed += slot * parts;
    // A warp brings a part's keys to where they belong.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 numbers = lane < parts ? min(listed[lane], LISTED + 1u) : 0; // there are no more than 32 parts
    const u32 candidates = __reduce_add_sync(~0u, numbers);
    u32 low = ~0u, high = 0;
    if (candidates <= LISTED && warp < parts) {
        const u32 number = __shfl_sync(~0u, numbers, warp);
        u64 *to = shared.keys + __reduce_add_sync(~0u, lane < warp ? numbers : 0);
#pragma unroll 4
        for (int i = lane; i < number; i += 32) {
            const u64 key = lists[warp * LISTED + i];
            to[i] = key, low = min(low, (u32)(key >> 32)), high = max(high, (u32)(key >> 32));
        }
    }
    if (candidates > LISTED) {
        for (int i = threadIdx.x; i < room; i += blockDim.x) shared.positions[i] = LAST;
        choose_among_all(scores, seen, topk, shared.positions, scratch);
        __syncthreads();
        sort_ascending(shared.positions, room);
        for (int i = threadIdx.x; i < topk; i += blockDim.x) selected[i] = shared.positions[i];
        return;
    }
    block_range(low, high, scratch); // all candidates are there
    const auto each = [&](const auto &use) {
        for (int i = threadIdx.x; i < candidates; i += blockDim.x) use(shared.keys[i]);
    };
    const u64 best = threshold(each, (u64)low << 32, (u64)high << 32 | ~0u, topk, 0, scratch);
    const int own = (candidates + SELECT_THREADS - 1) / SELECT_THREADS;
    const int first = threadIdx.x * own, last = min(first + own, (int)candidates);
    u32 kept = 0, all;
    for (int i = first; i < last; i++) kept += shared.keys[i] >= best;
    u32 at = block_scan(kept, all, scratch);
    for (int i = first; i < last; i++)
        if (shared.keys[i] >= best) selected[at++] = position_of(shared.keys[i]);
}
