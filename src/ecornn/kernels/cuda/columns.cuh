// Products in IEEE float32, on the ordinary units: DTYPE 4.
//
// Factors stand in the lanes as tensor cores have them: lane (g, q) has elements of rows g and
// g + 8 of the weights, and the same inner elements of column g of v. It multiplies its own with
// those of all WIDTH columns, which the lanes 4 · column + q have, and keeps the sums over its inner
// elements to itself until a step's last product. Only then the four lanes of a row add them up,
// and each takes what a tensor core would have given it: two rows of columns 2q and 2q + 1. Shuffles
// take four times as long as additions, and so there are twelve for a tile and step, not for a
// product.
#pragma once
#include "memory.cuh"

#if DTYPE == 4
struct Columns {
  float of[WIDTH][4];

  __device__ __forceinline__ void gather(uint4 v, int q) {
    const u32 own[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < WIDTH * 4; ++i) {
      const int column = i / 4, e = i % 4;
      // of one column every lane has its part
      const u32 bits = WIDTH == 1 ? own[e] : __shfl_sync(~0u, own[e], column * 4 + q);
      of[column][e] = __uint_as_float(bits);
    }
  }
};

// A lane's sums for a tile: those of row g, then those of row g + 8.
constexpr int LANE_SUMS = 2 * WIDTH;

__device__ __forceinline__ void accumulate(float (&sums)[LANE_SUMS], const u32 (&a)[2][4],
                                           const Columns& columns) {
#pragma unroll
  for (int e = 0; e < 4; ++e)
#pragma unroll
    for (int i = 0; i < LANE_SUMS; ++i)
      sums[i] = fmaf(__uint_as_float(a[e / 2][e % 2 * 2 + i / WIDTH]), columns.of[i % WIDTH][e],
                     sums[i]);
}

// The sums of lanes that differ in one bit of q, added up. Where there are more columns than a lane
// ends up with, the one whose bit is set has the second half of them, and the other the first.
template <int MASK, int BEFORE, int AFTER>
__device__ __forceinline__ void fold(float (&to)[2 * AFTER], const float (&from)[2 * BEFORE],
                                     int q) {
  const bool second = q & MASK;
#pragma unroll
  for (int i = 0; i < 2 * AFTER; ++i) {
    const int low = i / AFTER * BEFORE + i % AFTER, high = low + BEFORE - AFTER;
    const float kept = second ? from[high] : from[low], other = second ? from[low] : from[high];
    to[i] = kept + __shfl_xor_sync(~0u, other, MASK);
  }
}

// What a tensor core would have made of a tile. Where there are fewer columns than eight, lanes
// repeat them.
__device__ __forceinline__ void total_of(float (&total)[4], const float (&sums)[LANE_SUMS], int q) {
  constexpr int HALF = WIDTH == 8 ? 4 : WIDTH, OWN = WIDTH >= 2 ? 2 : 1;
  float half[2 * HALF], own[2 * OWN];
  fold<2, WIDTH, HALF>(half, sums, q);
  fold<1, HALF, OWN>(own, half, q);
#pragma unroll
  for (int i = 0; i < 4; ++i) total[i] = own[i / 2 * OWN + i % OWN];
}
#else
constexpr int LANE_SUMS = 4;
#endif
