// Memory that a launch reads or writes once.
#pragma once
#include "numbers.cuh"

// What a forward pass reads or writes once must not take the place in L2 of what blocks exchange:
// it is the first to go. With the gates of 512 × 64 so, 64 MiB, a layer took a tenth less. Backwards
// some took longer for it, and none less.
constexpr bool PASSING = GRID && !BACKWARD;
__device__ __forceinline__ unsigned long long first_to_go() {
  unsigned long long policy;  // a constant, to the assembler
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void store_passing(u16* address, u16 value) {
  if (!PASSING)
    *address = value;
  else
    asm volatile("st.global.L2::cache_hint.u16 [%0], %1, %2;" ::"l"(address), "h"(value),
                 "l"(first_to_go())
                 : "memory");
}
__device__ __forceinline__ void store_passing(u32* address, u32 value) {
  if (!PASSING)
    *address = value;
  else
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(address), "r"(value),
                 "l"(first_to_go())
                 : "memory");
}
