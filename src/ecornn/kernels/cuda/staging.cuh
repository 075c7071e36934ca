// A warp's weights pass through shared memory that nothing else uses yet, as many tiles at once as it
// has room for (STAGED_BYTES at least), and only their last part of the way is unrolled. Loads into
// registers are as few at a time as there are registers beside the weights, and each time the whole
// way to memory is waited for; and their code, which is thousands of instructions of a large layer, is
// run once by every launch.
#pragma once
#include "weights.cuh"

struct LoadedWeights : Weights {
  using Weights::Weights;

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
        if (first + i < IN_REGISTERS) into_registers(first + i, copied(i, 0), copied(i, 1));
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
};
