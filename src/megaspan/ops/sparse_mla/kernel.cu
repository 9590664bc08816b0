// Sparse latent attention on Hopper: 64 heads of a token to a block, rows of 512 + 64 columns in bf16 or FP8.
//
// One warpgroup gathers rows, 64 to a step, into two buffers of panels, 64 columns wide, as the tensor cores read them:
// rows are the right operand of query x row, and, read by columns, of probability x value. Two warpgroups take turns
// at scoring a step; each adds the values of every step to its half of the columns of the result. Thus while memory
// fills one buffer the tensor cores work on the other. Probabilities go where the step's last panel was: the rotary
// columns are no value. The order of all sums is given by the selection and the number of splits.
#include "gather.cuh"

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr float LOWEST = -1e30f; // of a maximum, where no score was seen

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- attention: a thread has rows `lane / 4` and 8 further of its warp's 16, columns 8 j + 2 (lane % 4) and the next ---

// Scores of a step, then its probabilities relative to the new maximum, which are stored, and their sums.
__device__ inline void score(Shared &shared, int buffer, u64 present, float scale, const float (&maximum)[2],
                             float (&added)[2]) {
    Step &step = shared.steps[buffer];
    float scores[32];
    products_fence();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
        product_bf16(scores, descriptor(shared.query.panels[k / 4]) + 2 * (k % 4),
                     descriptor(step.panels[k / 4]) + 2 * (k % 4), k > 0);
    products_commit();
    products_wait<0>();
    products_arrived(scores);
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    if (present != ~0ull) {
        const u64 own = present >> lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (!(own >> (i / 4 * 8 + i % 2) & 1)) scores[i] = -__int_as_float(0x7f800000);
    }
    float highest[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = scores[2 * half];
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 2 % 2 == half) most = fmaxf(most, scores[i]);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        highest[half] = fmaxf(maximum[half], most * scale);
        if (lane % 4 == 0) shared.maxima[buffer][row + 8 * half] = highest[half];
    }
    named_barrier<128>(1 + buffer); // all warps have read the last panel
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const int half = i / 2 % 2;
        const float low = exp2_of(fmaf(scores[i], scale, -highest[half]));
        const float high = exp2_of(fmaf(scores[i + 1], scale, -highest[half]));
        added[half] += low + high;
        *(u32 *)(step.panels[PANELS - 1] + place(row + 8 * half, i / 4) + lane % 4 * 4) = pack_bf16(low, high);
    }
    fence_async();
}

// Four octets of columns lie in the lanes of four, 2 columns in each: give each lane an octet.
__device__ inline uint4 whole_octet(u32 a, u32 b, u32 c, u32 d) {
    const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
    const u32 ab = __shfl_xor_sync(~0u, odd ? a : b, 1), cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
    a = odd ? ab : a, b = odd ? b : ab, c = odd ? cd : c, d = odd ? d : cd;
    const u32 first = __shfl_xor_sync(~0u, second ? a : c, 2), other = __shfl_xor_sync(~0u, second ? b : d, 2);
    return second ? uint4{first, other, c, d} : uint4{a, b, first, other};
}

// Results of a warpgroup's half of the columns of 64 heads, which begin at `head`: [H, VALUES].
__device__ inline void store_values(const float (&values)[128], const float (&inverse)[2], i64 head, u16 *output,
                                    float *partial) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const i64 at = (head + row) * VALUES + threadIdx.x / 128 * (VALUES / 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float factor = inverse[half];
        if (partial) {
            float *to = partial + at + half * 8 * VALUES + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 32; j++)
                *(float2 *)(to + 8 * j) = {values[4 * j + 2 * half] * factor, values[4 * j + 2 * half + 1] * factor};
        } else {
            u16 *to = output + at + half * 8 * VALUES + lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    pairs[i] = pack_bf16(values[4 * (j + i) + 2 * half] * factor,
                                         values[4 * (j + i) + 2 * half + 1] * factor);
                *(uint4 *)(to + 8 * j) = whole_octet(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
}

// Attend to the steps of a split, and store the results of 64 heads that begin at `head`.
__device__ inline void attend(Shared &shared, int steps, float scale, i64 head, u16 *output, float *partial,
                              float *lse) {
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float values[128] = {}, sum[2] = {}, maximum[2] = {LOWEST, LOWEST};
    wait(&shared.query_full, 0);
    for (int i = 0; i < steps; i++) {
        const int buffer = i % 2, parity = i / 2 % 2;
        wait(&shared.full[buffer], parity);
        fence_async();
        const u64 present = *(const u64 *)shared.present[buffer];
        float added[2] = {};
        if (buffer == warpgroup) {
            if (present) score(shared, buffer, present, scale, maximum, added);
            __syncwarp();
            if (lane == 0) arrive(&shared.scored[buffer]);
        }
        wait(&shared.scored[buffer], parity);
        if (present) {
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float highest = shared.maxima[buffer][row + 8 * half];
                factor[half] = exp2_of(maximum[half] - highest), maximum[half] = highest;
                sum[half] = fmaf(sum[half], factor[half], added[half]);
            }
            if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1))
#pragma unroll
                for (int j = 0; j < 128; j++) values[j] *= factor[j / 2 % 2];
            const Step &step = shared.steps[buffer];
            const u64 left = descriptor(step.panels[PANELS - 1]);
            const u64 right = descriptor_of_columns(step.panels[4 * warpgroup], PANEL_BYTES);
            products_fence();
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) add_product_bf16(values, left + 2 * k, right + 128 * k);
            products_commit();
            products_wait<0>();
            products_arrived(values);
        }
        __syncwarp();
        if (lane == 0) arrive(&shared.empty[buffer]);
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
        sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        if (lane % 4 == 0) shared.sums[warpgroup][row + 8 * half] = sum[half];
    }
    named_barrier<CONSUMERS>(1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float total = shared.sums[0][row + 8 * half] + shared.sums[1][row + 8 * half];
        inverse[half] = total == 0 ? 0 : 1 / total;
        if (warpgroup == 0 && lane % 4 == 0) // log(0) is -inf: nothing was selected
            lse[head + row + 8 * half] = total == 0 ? logf(0.0f) : maximum[half] * 0.6931471806f + logf(total);
    }
    store_values(values, inverse, head, output, partial);
}

// A block: 64 heads of a token, and every splits-th step of its selection. The results of a split are normalised.
template <bool PACKED>
__device__ inline void attention(const u8 *query, const u8 *rows, const i64 *selected, u16 *output, float *partial,
                                 float *lse, int slots, int groups, float scale) {
    Shared &shared = *(Shared *)(memory + (-shared_address(memory) & 1023));
    const i64 token = blockIdx.x / groups;
    const int group = blockIdx.x % groups, split = blockIdx.y, splits = gridDim.y;
    const int all_steps = (slots + KEYS - 1) / KEYS, steps = max(all_steps - split + splits - 1, 0) / splits;
    if (threadIdx.x == 0) {
        barrier_init(&shared.query_full, 128);
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(&shared.full[buffer], PACKED ? 128 : 128 + 4);
            barrier_init(&shared.scored[buffer], 4);
            barrier_init(&shared.empty[buffer], 8);
        }
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers<PACKED ? 104 : 72>();
        const u8 *from = query + ((token * groups + group) * HEADS) * WIDE_ROW;
        for (int turn = 0; turn < 4; turn++)
            gather_row(shared.query, row_of(turn), from + row_of(turn) * WIDE_ROW, true);
        arrive_after_copies(&shared.query_full);
        const Numbers numbers = {selected + token * slots, slots, split, splits};
        if (PACKED)
            gather_packed(shared, rows, numbers, steps);
        else
            gather_wide(shared, rows, numbers, steps);
    } else {
        more_registers<PACKED ? 200 : 216>();
        attend(shared, steps, scale, ((token * splits + split) * groups + group) * HEADS, output, partial, lse);
    }
}

#define KERNEL(NAME, PACKED)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        NAME(const u8 *query, const u8 *rows, const i64 *selected, u16 *output, float *partial, float *lse, int slots, \
             int groups, float scale) {                                                                                \
        attention<PACKED>(query, rows, selected, output, partial, lse, slots, groups, scale);                          \
    }
KERNEL(attend_wide, false)
KERNEL(attend_packed, true)

// The splits' results, [T, splits, H, VALUES] and [T, splits, H], into one. A block is a head of a token.
template <int AT_ONCE>
__device__ inline void combine(const float *partial, const float *partial_lse, u16 *output, float *lse, int heads,
                               int splits) {
    const i64 token = blockIdx.x / heads;
    const int head = blockIdx.x % heads, lane = threadIdx.x % 32;
    const i64 first = token * splits * heads + head;
    const float infinity = __int_as_float(0x7f800000);
    const float own = lane < splits ? partial_lse[first + (i64)lane * heads] : -infinity;
    float most = own;
    for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    const float weight = own == -infinity ? 0 : exp2_of((own - most) * 1.4426950409f);
    float total = weight;
    for (int lanes = 16; lanes; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
    const float4 *from = (const float4 *)(partial + first * VALUES) + threadIdx.x;
    float4 sum = {};
    for (int begin = 0; begin < splits; begin += AT_ONCE) {
        float4 parts[AT_ONCE]; // beyond the last split it is read again, with weight 0
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            parts[i] = __ldcg(from + (i64)min(begin + i, splits - 1) * heads * (VALUES / 4));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float factor = __shfl_sync(~0u, weight, begin + i);
            sum.x = fmaf(parts[i].x, factor, sum.x), sum.y = fmaf(parts[i].y, factor, sum.y);
            sum.z = fmaf(parts[i].z, factor, sum.z), sum.w = fmaf(parts[i].w, factor, sum.w);
        }
    }
    const float inverse = total == 0 ? 0 : 1 / total;
    const i64 row = token * heads + head;
    const u32 low = pack_bf16(sum.x * inverse, sum.y * inverse), high = pack_bf16(sum.z * inverse, sum.w * inverse);
    *(uint2 *)(output + row * VALUES + threadIdx.x * 4) = {low, high};
    if (threadIdx.x == 0) lse[row] = total == 0 ? -infinity : most + logf(total);
}

#define COMBINE(NAME, AT_ONCE)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 1)                                                                \
        NAME(const float *partial, const float *partial_lse, u16 *output, float *lse, int heads, int splits) {         \
        combine<AT_ONCE>(partial, partial_lse, output, lse, heads, splits);                                            \
    }
COMBINE(combine_few, 4)
COMBINE(combine_many, 16)
