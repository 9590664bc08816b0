// How a warpgroup brings the rows of a selection into shared memory, in the form in which the tensor cores read them.
#pragma once
#include "../hopper.cuh"

constexpr int HEADS = 64, WIDTH = 576, VALUES = 512, KEYS = 64;
constexpr int PANELS = WIDTH / 64, PANEL_BYTES = KEYS * 128;
constexpr int WIDE_ROW = 2 * WIDTH, PACKED_ROW = VALUES + 16 + 2 * 64; // bytes of a row in bf16 and FP8

struct Step {
    u8 panels[PANELS][PANEL_BYTES];
};

struct Shared {
    alignas(1024) Step query, steps[2];
    float maxima[2][HEADS], sums[2][HEADS];
    alignas(8) u16 present[2][4]; // which of a step's rows are none of -1, for each warp that gathered them
    u64 query_full, full[2], scored[2], empty[2];
};

extern __shared__ u8 memory[];

__device__ inline u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Where in a panel a piece of 16 bytes of a row lies.
__device__ inline int place(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// --- gathering: 8 lanes to a row, 4 rows to a warp at once ---------------------------------------------------------

// Which rows of the steps of a split. Lane i < 16 of a warp knows the i-th of its 16 rows.
struct Numbers {
    const i64 *selected;
    int slots, split, splits;

    __device__ i64 of_step(int step) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        const int slot = (split + step * splits) * KEYS + warp * 16 + lane;
        return lane < 16 && slot < slots ? selected[slot] : -1;
    }
};

__device__ inline int row_of(int turn) { return threadIdx.x % 128 / 32 * 16 + turn * 4 + threadIdx.x % 32 / 8; }
__device__ inline i64 number_of(i64 numbers, int turn) {
    return __shfl_sync(~0u, numbers, turn * 4 + threadIdx.x % 32 / 8);
}

// A row in bf16; zeros, and nothing is read, where it is not there.
__device__ inline void gather_row(Step &step, int row, const u8 *from, bool there) {
    const int piece = threadIdx.x % 8;
    u8 *to = step.panels[0] + place(row, piece);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        copy_async(to + panel * PANEL_BYTES, from + panel * 128 + piece * 16, there ? 16 : 0);
}

__device__ inline void note_present(Shared &shared, int buffer, i64 numbers) {
    const u32 there = __ballot_sync(~0u, numbers >= 0);
    if (threadIdx.x % 32 == 0) shared.present[buffer][threadIdx.x % 128 / 32] = (u16)there;
}

__device__ inline void gather_wide(Shared &shared, const u8 *rows, Numbers selected, int steps) {
    i64 next = selected.of_step(0);
    for (int step = 0; step < steps; step++) {
        const int buffer = step % 2;
        const i64 numbers = next;
        next = selected.of_step(step + 1);
        wait(&shared.empty[buffer], step / 2 % 2 ^ 1);
#pragma unroll
        for (int turn = 0; turn < 4; turn++) {
            const i64 number = number_of(numbers, turn);
            gather_row(shared.steps[buffer], row_of(turn), rows + max(number, 0ll) * WIDE_ROW, number >= 0);
        }
        arrive_after_copies(&shared.full[buffer]);
        note_present(shared, buffer, numbers);
        if (threadIdx.x % 32 == 0) arrive(&shared.full[buffer]);
    }
}

// What a lane holds of a row in FP8: a piece of each group of 128 values, with the groups' scales, and of the rest.
struct Packed {
    uint4 values[4], rotary;
    float4 scales;

    __device__ void load(const u8 *rows, i64 number) {
        const u8 *row = rows + number * PACKED_ROW + threadIdx.x % 8 * 16;
        const uint4 zeros = {};
#pragma unroll
        for (int group = 0; group < 4; group++)
            values[group] = number >= 0 ? __ldg((const uint4 *)(row + group * 128)) : zeros;
        rotary = number >= 0 ? __ldg((const uint4 *)(row + VALUES + 16)) : zeros;
        scales = number >= 0 ? __ldg((const float4 *)(rows + number * PACKED_ROW + VALUES)) : float4{};
    }

    // Four e4m3 values times their scale, rounded once.
    static __device__ uint2 unpack(u32 four, float scale) {
        u32 halves[2];
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
            "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
            : "=r"(halves[0]), "=r"(halves[1])
            : "r"(four));
        float wide[4];
#pragma unroll
        for (int i = 0; i < 2; i++)
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(wide[2 * i]), "=f"(wide[2 * i + 1])
                : "r"(halves[i]));
        return {pack_bf16(wide[0] * scale, wide[1] * scale), pack_bf16(wide[2] * scale, wide[3] * scale)};
    }

    // 16 values are two pieces in bf16; lanes of either half begin with another one, so that no banks collide.
    __device__ void store(Step &step, int row) const {
        const int lane = threadIdx.x % 8, swapped = lane / 4, piece = lane % 4 * 2;
        const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int group = 0; group < 4; group++) {
            const uint2 a = unpack(values[group].x, scale[group]), b = unpack(values[group].y, scale[group]);
            const uint2 c = unpack(values[group].z, scale[group]), d = unpack(values[group].w, scale[group]);
            const uint4 low = {a.x, a.y, b.x, b.y}, high = {c.x, c.y, d.x, d.y};
            u8 *panel = step.panels[2 * group + lane / 4];
            *(uint4 *)(panel + place(row, piece + swapped)) = swapped ? high : low;
            *(uint4 *)(panel + place(row, piece + 1 - swapped)) = swapped ? low : high;
        }
        *(uint4 *)(step.panels[PANELS - 1] + place(row, lane)) = rotary;
    }
};

// Rows are under way to registers while those two turns before them are unpacked.
__device__ inline void gather_packed(Shared &shared, const u8 *rows, Numbers selected, int steps) {
    i64 numbers = selected.of_step(0);
    Packed under_way[2];
    under_way[0].load(rows, number_of(numbers, 0));
    under_way[1].load(rows, number_of(numbers, 1));
    for (int step = 0; step < steps; step++) {
        const int buffer = step % 2;
        const i64 next = selected.of_step(step + 1);
        wait(&shared.empty[buffer], step / 2 % 2 ^ 1);
#pragma unroll
        for (int turn = 0; turn < 4; turn++) {
            under_way[turn % 2].store(shared.steps[buffer], row_of(turn));
            under_way[turn % 2].load(rows, number_of(turn < 2 ? numbers : next, (turn + 2) % 4));
        }
        note_present(shared, buffer, numbers);
        fence_async();
        arrive(&shared.full[buffer]);
        numbers = next;
    }
}
