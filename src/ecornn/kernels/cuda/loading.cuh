// A warp's weights are loaded into registers, and stored from there where they stay in shared memory.
// `staging.cuh` is the other way.
#pragma once
#include "weights.cuh"

struct LoadedWeights : Weights {
  using Weights::Weights;

#if BACKWARD
  // VEC elements of W in a row, from inner position k on, zero beyond the end.
  __device__ __forceinline__ uint4 weights_at(const Element* matrix, Row row, int k) const {
    union {
      uint4 all;
      Element each[VEC];
    } v;
    const Inner at = inner_at(k);
    const u32 column = at.column + first_unit() + row.unit;
#pragma unroll
    for (int e = 0; e < VEC; ++e)
      v.each[e] = at.there && at.unit + e < hidden ? __ldg(matrix + (column + e * u32(hidden)))
                                                   : Element(0);
    return v.all;
  }

  __device__ __forceinline__ void load_weights(const Element* matrix) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        uint4 rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Row row = row_at((row_warp * ROW_TILES + m) * 16 + half * 8 + g);
          rows[half] = make_uint4(0, 0, 0, 0);
          if (has_row(row)) rows[half] = weights_at(matrix, row, k_of(c));
        }
        put_weights(m, c, rows[0], rows[1]);
      }
  }
#else
  // For lane (g, q), VEC elements of W in row g of eight, from inner position q · VEC of chunk c
  // on, zero beyond the end. `first_row` is the first of the eight in the block's tiles. WHOLE:
  // rows of the matrix are whole vectors.
  template <bool WHOLE>
  __device__ __forceinline__ uint4 weights_at(const Element* matrix, int first_row, int c) {
    const Row row = row_at(first_row + g);
    const int unit = first_unit() + row.unit;
    const Element* const from = matrix + (size_t(row.part) * hidden + unit) * hidden + k_of(c);
    const int left = has_row(row) ? hidden - k_of(c) : 0;
#if DTYPE == 5
    return weights_scaling.read(from, left, WHOLE);
#else
    if (WHOLE)
      return left > 0 ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
    union {
      uint4 all;
      Element each[VEC];
    } v;
#pragma unroll
    for (int e = 0; e < VEC; ++e) v.each[e] = e < left ? __ldg(from + e) : Element(0);
    return v.all;
#endif
  }

  __device__ __forceinline__ void load_weights(const Element* matrix) {
#if DTYPE == 5
    weights_scaling.begin(WEIGHTS_BY, LEAST_WEIGHTS_BY);
    do {
      load_all(matrix);
    } while (weights_scaling.again_by_warp());
#else
    load_all(matrix);
#endif
  }
  __device__ __forceinline__ void load_all(const Element* matrix) {
    const bool whole = hidden % VEC == 0;
    // So many chunks are loaded before the first is waited for, half of them where they are twice as
    // wide in memory. The branch inside the loops keeps the compiler from loading all of them at once,
    // for which there are no registers.
    constexpr int MOST =
        (IN_REGISTERS >= 16 ? 2 : 4) * int(sizeof(Exchanged)) / int(sizeof(Element));
    constexpr int FLYING = CHUNKS < MOST ? CHUNKS : MOST;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int c0 = 0; c0 < CHUNKS; c0 += FLYING) {
        uint4 rows[FLYING][2];
        if (whole)
          load_rows<true>(rows, matrix, m, c0);
        else
          load_rows<false>(rows, matrix, m, c0);
#pragma unroll
        for (int i = 0; i < FLYING; ++i)
          if (c0 + i < CHUNKS) put_weights(m, c0 + i, rows[i][0], rows[i][1]);
      }
  }
  template <bool WHOLE, int COUNT>
  __device__ __forceinline__ void load_rows(uint4 (&rows)[COUNT][2], const Element* matrix, int m,
                                            int c0) {
#pragma unroll
    for (int i = 0; i < COUNT * 2; ++i)
      if (c0 + i / 2 < CHUNKS)
        rows[i / 2][i % 2] =
            weights_at<WHOLE>(matrix, (row_warp * ROW_TILES + m) * 16 + i % 2 * 8, c0 + i / 2);
  }
#endif

  __device__ __forceinline__ void put_weights(int m, int c, uint4 low, uint4 high) {
    const int i = m * CHUNKS + c;
    if (i < IN_REGISTERS) {
      into_registers(i, low, high);
    } else {
      arrange(low, high);
      uint4* const to = weights() + (i - IN_REGISTERS) * 2 * THREADS + threadIdx.x;
      to[0] = low, to[THREADS] = high;  // read by this thread alone
    }
  }
};
