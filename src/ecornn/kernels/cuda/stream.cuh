// What every step reads from memory, copied to shared memory AHEAD steps before.
//
// A warp copies what its own lanes read, PARTS values for each item, and nobody else touches its
// places: it waits for itself alone. A lane copies the same COPIED neighbours of the same part at
// every step, so that all it does is to move on. Loads into registers would not do: of those under
// way a thread can only wait for all, and each lane would reckon PARTS addresses at every step.
#pragma once
#include "product.cuh"
#include "sequence.cuh"

struct Stream {
  static constexpr int GROUPS = 32 / COPIED, COPIES = PARTS * GROUPS;
  static constexpr int ROUNDS = (COPIES + 31) / 32;
  static_assert(ITEMS * ROUNDS <= 32, "`needed` has too few bits");

  const Product& product;
  bool by_vectors;  // all rows begin where vectors can be copied from
  const Element* from[ITEMS][ROUNDS];
  int step[ROUNDS];
  u32 needed;  // one bit for each of `from`

  // `rows(part)`: the first step's rows of a tensor.
  template <class Source>
  __device__ __forceinline__ Stream(const Product& product, bool by_vectors, Source rows)
      : product(product), by_vectors(by_vectors), needed(0) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (part != part_of(r)) continue;
        const Rows<const Element> own = rows(part);
        step[r] = own.step;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          const int unit = product.unit_at(i, first_of(r)), s = product.sequence_at(i, first_of(r));
          const bool inside = unit < product.below(product.hidden - product.unit0());
          from[i][r] = own.at(s, product.unit0() + unit);
          if (own.there && s < product.sequences && inside) needed |= 1u << (i * ROUNDS + r);
        }
      }
  }

  __device__ __forceinline__ int part_of(int r) const { return (r * 32 + product.lane) / GROUPS; }
  __device__ __forceinline__ int first_of(int r) const {
    return (r * 32 + product.lane) % GROUPS * COPIED;
  }
  __device__ __forceinline__ Element* place(int slot, int i, int part) const {
    return product.streams() + ((slot * ITEMS + i) * PARTS + part) * THREADS;
  }

  // Begin to copy the next step's values, those of the parts that are `wanted`, into a slot. All
  // lanes of a warp call it together, when they have read the slot.
  template <class Wanted>
  __device__ __forceinline__ void copy(int slot, Wanted wanted) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const bool now = wanted(part_of(r));
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (now && (needed & 1u << (i * ROUNDS + r)))
          copy_one(place(slot, i, part_of(r)) + first_of(r), from[i][r], i, r);
        from[i][r] += step[r];
      }
    }
    end_copies();
  }

  // Wait for the oldest step's values: `copy` was called once for each of AHEAD steps.
  __device__ __forceinline__ static void await() {
    await_copies<AHEAD - 1>();
    __syncwarp();
  }
  __device__ __forceinline__ Element read(int slot, int i, int part) const {
    return place(slot, i, part)[product.place_of_lane()];
  }

 private:
  __device__ __forceinline__ void copy_one(Element* to, const Element* source, int i, int r) const {
    // No cache hint: NVRTC 13.0 gets the instruction wrong that has one (decision 0041).
    if (by_vectors) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)),
                   "l"(source), "n"(COPIED * int(sizeof(Element)))
                   : "memory");
      return;
    }
    const int left = product.hidden - product.unit0() - product.unit_at(i, first_of(r));
#pragma unroll 1
    for (int e = 0; e < min(COPIED, left); ++e) to[e] = source[e];
  }
};

// Whether vectors can be copied from everywhere in a tensor whose rows are multiples of a vector.
__device__ __forceinline__ bool begins_a_vector(const void* tensor) {
  return reinterpret_cast<size_t>(tensor) % 16 == 0;
}
