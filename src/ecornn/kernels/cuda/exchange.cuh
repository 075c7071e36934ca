// Publishing values to other blocks and waiting for theirs, with no grid-wide barrier.
//
// Through L2 (GRID): every value that crosses between blocks has a place of its own in memory that
// is written once. Before the launch all places hold a mark that no result can be: a NaN with all
// bits set. A reader polls the value itself until the mark is gone. So there is no flag to order
// against the data, no buffer to reuse, and a reader waits for nothing it does not need.
//
// Through distributed shared memory (a cluster): values are pushed into the readers' shared memory,
// and each push counts down a barrier there.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

// What blocks exchange and tensor cores multiply, which may be narrower than a tensor's elements: see
// numbers.cuh.
#define HALVES (DTYPE <= 1 || DTYPE == 5)
#if HALVES
using Exchanged = u16;
#else
using Exchanged = u32;
#endif

template <int COUNT>
struct Bytes;
template <>
struct Bytes<8> {
  using Type = uint2;
};
template <>
struct Bytes<16> {
  using Type = uint4;
};

// A wait that lasts longer than this many cycles, about two seconds, is given up: a block that does
// not run, or a fault.
constexpr long long MOST_CYCLES = 1ll << 32;

// How long a wait has lasted, counted from the first poll that found nothing.
struct Patience {
  long long since = 0;
  __device__ __forceinline__ bool ended() {
    const long long now = clock64();
    if (since == 0) since = now;
    return now - since > MOST_CYCLES;
  }
};

__device__ __forceinline__ uint4 load_relaxed(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(u16* address, u16 value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(u32* address, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// A NaN may have no bits but those that a product as TF32 does not take: then it is an infinity.
__device__ __forceinline__ u32 quiet(u32 bits) {
  return (bits & ~0u >> 1) > 0x7f800000u ? 0x7fc00000u : bits;
}

// A result must not look like the mark: such a NaN is published as another NaN.
__device__ __forceinline__ u16 unmarked(u16 bits) {
  return GRID && bits == 0xffffu ? 0x7fffu : bits;
}
// As one that a number can be added to: see `factor`. What is exchanged as float16 is not this.
__device__ __forceinline__ u32 unmarked(u32 bits) {
  return GRID && DTYPE != 5 ? quiet(bits) : bits;
}

#if CLUSTER > 1
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The same shared-memory address in another block of the cluster.
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void push(u32 address, u32 barrier, uint4 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void push(u32 address, u32 barrier, uint2 v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, "
      "[%3];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void push(u32 address, u32 barrier, float v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(__float_as_uint(v)), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// The barrier's next phase ends once this many bytes were pushed.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// For the block alone: what was pushed lies in its own shared memory. To acquire for the cluster
// would throw away the L1 cache as well.
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 phase) {
  u32 passed;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(passed)
      : "r"(barrier), "r"(phase)
      : "memory");
  return passed;
}
#endif
