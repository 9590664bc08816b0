// What the CUDA kernels share of Hopper's own instructions: barriers in shared memory, bulk copies, matrix products.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ inline u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// --- barriers ---------------------------------------------------------------------------------------------

__device__ inline void barrier_init(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ inline void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void arrive_expecting(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ inline void wait(u64 *barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Ordinary stores to shared memory become visible to the copy engine and to wgmma.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int ID, int THREADS> __device__ inline void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// A baton between two warpgroups.
__device__ inline void hand_over(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }
__device__ inline void take_over(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }

template <int THREADS> __device__ inline void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// --- copies from global to shared memory, which complete on a barrier -------------------------------------------

__device__ inline void bulk_copy(void *to, const void *from, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ inline void bulk_copy_box(void *to, const TensorMap *map, int x, int y, int z, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
                 : "memory");
}

// 16 bytes, or zeros where `bytes` is 0: then nothing is read.
__device__ inline void copy_async(void *to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Arrives, as one that the barrier counts, when the copies that this thread began are done.
__device__ inline void arrive_after_copies(u64 *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// --- registers of a warpgroup, of those that the block has -----------------------------------------------------------

template <int COUNT> __device__ inline void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- matrix products of a warpgroup -----------------------------------------------------------------------------

// An operand in shared memory whose rows of 128 bytes lie one after the other, 8 rows to a swizzled block of 1 KiB.
__device__ inline u64 descriptor(const void *operand) {
    return (u64)((shared_address(operand) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// The right operand of a product [K, N] whose rows lie like that, 64 columns (128 bytes) of them in a panel, and the
// next 64 columns a panel further.
__device__ inline u64 descriptor_of_columns(const void *operand, u32 panel_bytes) {
    return (u64)((shared_address(operand) & 0x3FFFF) >> 4) | ((u64)(panel_bytes >> 4) << 16) | (64ull << 32) |
           (1ull << 62);
}

__device__ inline void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Results are there from here on: no read of them may move in front of the wait.
template <int COUNT> __device__ inline void products_arrived(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}

#define R4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define R16(c, i) R4(c, i), R4(c, i + 4), R4(c, i + 8), R4(c, i + 12)
#define R64(c, i) R16(c, i), R16(c, i + 16), R16(c, i + 32), R16(c, i + 48)

// c [64, 32] (+)= a [64, 32] b [32, 32] transposed, e4m3.
__device__ inline void product_e4m3(float (&c)[16], u64 a, u64 b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1;\n}"
                 : R16(c, 0)
                 : "l"(a), "l"(b), "r"(accumulate));
}

// c [64, 128] (+)= a [64, 32] b [128, 32] transposed, e4m3.
__device__ inline void product_e4m3(float (&c)[64], u64 a, u64 b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1;\n}"
                 : R64(c, 0)
                 : "l"(a), "l"(b), "r"(accumulate));
}

// c [64, 64] (+)= a [64, 16] b [64, 16] transposed, bf16.
__device__ inline void product_bf16(float (&c)[32], u64 a, u64 b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, 0, 0;\n}"
                 : R16(c, 0), R16(c, 16)
                 : "l"(a), "l"(b), "r"(accumulate));
}

// c [64, 256] += a [64, 16] b [16, 256], bf16; b is a descriptor_of_columns.
__device__ inline void add_product_bf16(float (&c)[128], u64 a, u64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, p, 1, 1, 0, 1;\n}"
                 : R64(c, 0), R64(c, 64)
                 : "l"(a), "l"(b));
}
