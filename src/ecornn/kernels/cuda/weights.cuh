// A warp's weights, from the layer's matrix to registers and shared memory, once for all steps.
//
// The inner dimension is permuted within each CHUNK, in W and v alike, so that the elements a lane
// needs for two products lie side by side: one 16-byte load feeds both.
//
// The matrix is the layer's own, (gates · hidden, hidden): forwards W's row is one of its rows,
// backwards one of its columns.
#pragma once
#include "memory.cuh"

struct Weights : Memory {
  int hidden, padded;  // padded: a section's length in v
  int rank;            // in the cluster
  u32 w[IN_REGISTERS][2][4];

  __device__ __forceinline__ Weights(int hidden, int sequences)
      : Memory(sequences), hidden(hidden) {
    padded = (hidden + VEC - 1) / VEC * VEC;
#if CLUSTER > 1
    rank = cluster_rank();
#else
    rank = 0;
#endif
  }

  // ---- the inner dimension: where chunk c of this warp begins, and this lane's part of it
  __device__ __forceinline__ int chunk_at(int c) const {
    return (((GRID ? rank * K_WARPS : 0) + k_warp) * CHUNKS + c) * CHUNK;
  }
  __device__ __forceinline__ int k_of(int c) const { return chunk_at(c) + q * VEC; }

  // ---- rows. Row r of the block's tiles: which unit's, counted from `first_unit`, and which of
  // its rows.
  struct Row {
    int unit, part;
  };
  __device__ __forceinline__ static Row row_at(int r) {
    if (DIRECT && !DEALT && OUTER > 1) return {r / 32 * 8 + r % 8, r % 32 / 8};
    if (DIRECT) return {r / 16 * TILE_UNITS + r % TILE_UNITS, r % 16 / TILE_UNITS};
    return {r / OWN_ROWS * UNITS + r % OWN_ROWS / OUTER, r % OUTER};
  }
  __device__ __forceinline__ int first_unit() const {
    return (blockIdx.x - (GRID ? rank : 0)) * UNITS;
  }
  __device__ __forceinline__ bool has_row(Row row) const {
    return row.unit < OWNERS * UNITS && row.part < OUTER && first_unit() + row.unit < hidden;
  }

#if BACKWARD
  // ---- columns. Inner position k is that of a gate's unit, or none.
  struct Inner {
    bool there;
    int unit;
    u32 column;  // of the matrix: what fits on the chip has fewer than 2^32 elements
  };
  __device__ __forceinline__ Inner inner_at(int k) const {
    int section = 0;  // counted: a division takes as long as all of these
#pragma unroll
    for (int i = 1; i <= INNER; ++i) section += k >= i * padded;
    const int unit = k - section * padded;
    const int gate = CELL == 1 ? (section + 2) % 3 : section;  // a GRU's stand as (n, r, z)
    return {section < INNER, unit, u32(gate * hidden + unit) * u32(hidden)};
  }
#endif

  // ---- loading
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
  __device__ __forceinline__ uint4 weights_at(const Element* matrix, int first_row, int c) const {
    const Row row = row_at(first_row + g);
    const int unit = first_unit() + row.unit;
    const Element* const from = matrix + (size_t(row.part) * hidden + unit) * hidden + k_of(c);
    const int left = has_row(row) ? hidden - k_of(c) : 0;
    if (WHOLE)
      return left > 0 ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
    union {
      uint4 all;
      Element each[VEC];
    } v;
#pragma unroll
    for (int e = 0; e < VEC; ++e) v.each[e] = e < left ? __ldg(from + e) : Element(0);
    return v.all;
  }

  __device__ __forceinline__ void load_weights(const Element* matrix) {
    const bool whole = hidden % VEC == 0;
    // So many chunks are loaded before the first is waited for. The branch inside the loops keeps
    // the compiler from loading all of them at once, for which there are no registers.
    constexpr int MOST = IN_REGISTERS >= 16 ? 2 : 4;
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
                                            int c0) const {
#pragma unroll
    for (int i = 0; i < COUNT * 2; ++i)
      if (c0 + i / 2 < CHUNKS)
        rows[i / 2][i % 2] =
            weights_at<WHOLE>(matrix, (row_warp * ROW_TILES + m) * 16 + i % 2 * 8, c0 + i / 2);
  }
#endif

  __device__ __forceinline__ void put_weights(int m, int c, uint4 low, uint4 high) {
#if DTYPE == 2
    low = make_uint4(to_tf32(low.x), to_tf32(low.y), to_tf32(low.z), to_tf32(low.w));
    high = make_uint4(to_tf32(high.x), to_tf32(high.y), to_tf32(high.z), to_tf32(high.w));
#endif
    const uint4 a = make_uint4(low.x, high.x, low.y, high.y);
    const uint4 b = make_uint4(low.z, high.z, low.w, high.w);
    const int i = m * CHUNKS + c;
    if (i < IN_REGISTERS) {
      u32(&to)[2][4] = w[i % IN_REGISTERS];
      to[0][0] = a.x, to[0][1] = a.y, to[0][2] = a.z, to[0][3] = a.w;
      to[1][0] = b.x, to[1][1] = b.y, to[1][2] = b.z, to[1][3] = b.w;
    } else {
      uint4* const to = weights() + (i - IN_REGISTERS) * 2 * THREADS + threadIdx.x;
      to[0] = a, to[THREADS] = b;  // read by this thread alone
    }
  }
};
