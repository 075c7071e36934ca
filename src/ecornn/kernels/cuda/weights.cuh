// A warp's weights: which part of the layer's matrix they are, and where they are kept for all steps.
//
// The inner dimension is permuted within each CHUNK, in W and v alike, so that the elements a lane
// needs for two products lie side by side: one 16-byte load feeds both.
//
// The matrix is the layer's own, (gates · hidden, hidden): forwards W's row is one of its rows,
// backwards one of its columns.
#pragma once
#include "memory.cuh"
#include "scaled.cuh"

struct Weights : Memory {
  int hidden, padded;  // padded: a section's length in v
  int rank;            // in the cluster
  u32 w[IN_REGISTERS][2][4];
#if DTYPE == 5
  Scaling weights_scaling;
#endif

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

  // ---- a tile's two rows of this lane, as they stand in the matrix; then its two products' left
  // factors.
  __device__ __forceinline__ static void arrange(uint4& low, uint4& high) {
#if DTYPE == 2
    low = make_uint4(to_tf32(low.x), to_tf32(low.y), to_tf32(low.z), to_tf32(low.w));
    high = make_uint4(to_tf32(high.x), to_tf32(high.y), to_tf32(high.z), to_tf32(high.w));
#endif
    const uint4 first = make_uint4(low.x, high.x, low.y, high.y);
    high = make_uint4(low.z, high.z, low.w, high.w);
    low = first;
  }
  // Tile i of the warp, one of those in registers.
  __device__ __forceinline__ void into_registers(int i, uint4 low, uint4 high) {
    arrange(low, high);
    u32(&to)[2][4] = w[i % IN_REGISTERS];
    to[0][0] = low.x, to[0][1] = low.y, to[0][2] = low.z, to[0][3] = low.w;
    to[1][0] = high.x, to[1][1] = high.y, to[1][2] = high.z, to[1][3] = high.w;
  }
};
