// Publishing values to other blocks and waiting for theirs, through L2, with no barrier.
//
// Every value that crosses between blocks has a place of its own in memory that is written once.
// Before the launch all places hold a mark that no result can be: a NaN with all bits set. A
// reader polls the value itself until the mark is gone. So there is no flag to order against the
// data, no buffer to reuse, and a reader waits for nothing it does not need.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;

// A wait that lasts longer than this many polls is given up: a block that does not run, or a fault.
// One poll takes about a microsecond.
constexpr u32 MOST_POLLS = 1u << 21;

__device__ __forceinline__ uint4 load_relaxed(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(void* address, u16 value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
}

// Whether one of the eight 16-bit values is still the mark.
__device__ __forceinline__ bool has_mark(uint4 v) {
  u32 found = __vcmpeq2(v.x, ~0u) | __vcmpeq2(v.y, ~0u) | __vcmpeq2(v.z, ~0u) | __vcmpeq2(v.w, ~0u);
  return found != 0;
}

// A result must not look like the mark: such a NaN is published as another NaN.
__device__ __forceinline__ u16 unmarked(u16 bits) { return bits == 0xffffu ? 0x7fffu : bits; }
