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

  // ---- loading. A warp's tiles pass through shared memory, as many at once as it has room for:
  // loads into registers would be as few at a time as there are registers beside the weights, and
  // each time the whole way to memory would be waited for.
  //
  // A slot takes the first eight rows of a tile, lane by lane, and then the other eight. Its places
  // are the warp's own.
  int own_places;  // opaque: (tid + c) & ~31 would be reckoned for every slot
  __device__ __forceinline__ uint4* slot_at(int slot, int half) const {
    return weights() + (slot * 2 + half) * THREADS + own_places;
  }

  // VEC elements, of which the first `count` are there; zeros for the others. `whole`: all or none.
  __device__ __forceinline__ static void copy(uint4* to, const Element* from, int count,
                                              bool whole) {
    if (whole) {
      const int bytes = count > 0 ? 16 : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                   "l"(from), "r"(bytes)
                   : "memory");
      return;
    }
#pragma unroll 1
    for (int e = 0; e < VEC; ++e)
      reinterpret_cast<Element*>(to)[e] = e < count ? __ldg(from + e) : Element(0);
  }

#if BACKWARD
  // The matrix is read along its rows, which are W's columns: of a chunk and a tile's 16 units, a
  // row's vectors lie side by side, and the eight lanes of a q copy VEC rows of them.
  static constexpr int HALF_ROW = 8 / VEC;  // vectors of eight units
  __device__ __forceinline__ void copy_tile(const Element* matrix, int m, int c, int slot,
                                            bool whole) const {
    const Inner at = inner_at(k_of(c));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = (i * 8 + g) / (2 * HALF_ROW), vector = (i * 8 + g) % (2 * HALF_ROW);
      const int unit = (row_warp * ROW_TILES + m) * 16 + vector * VEC;
      const bool there = at.there && at.unit + e < hidden;
      const int count = there ? min(OWNERS * UNITS, hidden - first_unit()) - unit : 0;
      const u32 place = at.column + u32(e) * u32(hidden) + u32(first_unit() + unit);
      copy(slot_at(slot, vector / HALF_ROW) + (e * HALF_ROW + vector % HALF_ROW) * 4 + q,
           matrix + (count > 0 ? place : 0), count, whole);
    }
  }
  // A lane's unit of what the lanes of its q have copied.
  __device__ __forceinline__ uint4 copied(int slot, int half) const {
#if DTYPE <= 1
    // matrix j of four is rows 2j and 2j + 1 of every q
    const int row = lane % 8;
    const uint4* const at = slot_at(slot, half) + (lane / 8 * 2 + row % 2) * 4 + row / 2;
    uint4 found;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(shared_address(at))
                 : "memory");
    return found;
#endif
    union {
      uint4 all;
      Element each[VEC];
    } v;
#pragma unroll
    for (int e = 0; e < VEC; ++e)
      v.each[e] = reinterpret_cast<const Element*>(slot_at(slot, half) +
                                                   (e * HALF_ROW + g / VEC) * 4 + q)[g % VEC];
    return v.all;
  }
#else
  // For lane (g, q), VEC elements of W in row g of eight, from inner position q · VEC of the chunk
  // on.
  __device__ __forceinline__ void copy_tile(const Element* matrix, int m, int c, int slot,
                                            bool whole) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = row_at((row_warp * ROW_TILES + m) * 16 + half * 8 + g);
      const int count = has_row(row) ? hidden - k_of(c) : 0;
      const size_t place =
          (size_t(row.part) * hidden + first_unit() + row.unit) * hidden + k_of(c);
      copy(slot_at(slot, half) + lane, matrix + (count > 0 ? place : 0), count, whole);
    }
  }
  __device__ __forceinline__ uint4 copied(int slot, int half) const {
    return slot_at(slot, half)[lane];
  }
#endif

  // Tiles [first, first + count) of the warp's into slots from 0 on.
  __device__ __forceinline__ void copy_tiles(const Element* matrix, int first, int count) const {
    const bool whole = hidden % VEC == 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i)
      copy_tile(matrix, (first + i) / CHUNKS, (first + i) % CHUNKS, i, whole);
    end_copies();
    await_copies<0>();
    __syncwarp();
  }

  // The matrix begins where a vector can be copied from.
  __device__ __forceinline__ void load_weights(const Element* matrix) {
    own_places = warp * 32;
    asm("" : "+r"(own_places));
#pragma unroll
    for (int first = 0; first < IN_REGISTERS; first += SLOTS) {
      copy_tiles(matrix, first, min(SLOTS, IN_REGISTERS - first));
#pragma unroll
      for (int i = 0; i < SLOTS; ++i)
        if (first + i < IN_REGISTERS) into_registers(w[first + i], copied(i, 0), copied(i, 1));
      __syncwarp();  // before others are copied there
    }
    // the others stay in their slots
    constexpr int STAYING = ROW_TILES * CHUNKS - IN_REGISTERS;
    if (STAYING > 0) copy_tiles(matrix, IN_REGISTERS, STAYING);
#pragma unroll 1
    for (int slot = 0; slot < STAYING; ++slot) {
      uint4 low = copied(slot, 0), high = copied(slot, 1);
      __syncwarp();  // before others' are overwritten
      arrange(low, high);
      slot_at(slot, 0)[lane] = low, slot_at(slot, 1)[lane] = high;  // read by this thread alone
    }
    __syncthreads();  // before anything else stands where they passed through
  }

  __device__ __forceinline__ void into_registers(u32 (&to)[2][4], uint4 low, uint4 high) const {
    arrange(low, high);
    to[0][0] = low.x, to[0][1] = low.y, to[0][2] = low.z, to[0][3] = low.w;
    to[1][0] = high.x, to[1][1] = high.y, to[1][2] = high.z, to[1][3] = high.w;
  }
  // A tile's two rows of this lane, as they were copied; then its two products' left factors.
  __device__ __forceinline__ static void arrange(uint4& low, uint4& high) {
#if DTYPE == 2
    low = make_uint4(to_tf32(low.x), to_tf32(low.y), to_tf32(low.z), to_tf32(low.w));
    high = make_uint4(to_tf32(high.x), to_tf32(high.y), to_tf32(high.z), to_tf32(high.w));
#endif
    const uint4 first = make_uint4(low.x, high.x, low.y, high.y);
    high = make_uint4(low.z, high.z, low.w, high.w);
    low = first;
  }
};
