// What every step reads from memory, copied to shared memory AHEAD steps before.
//
// A warp copies what its own lanes read, PARTS values for each item, and nobody else touches its
// places: it waits for itself alone. A lane copies the same TOGETHER neighbours of the same part at
// every step, so that all it does is to move on. Loads into registers would not do: of those under
// way a thread can only wait for all, and each lane would reckon PARTS addresses at every step.
#pragma once
#include "product.cuh"
#include "sequence.cuh"

// What can be copied at once everywhere in tensors whose rows are multiples of `hidden`.
enum Grain { ALL_TOGETHER, WORDS, ELEMENTS };

template <class... Tensors>
__device__ __forceinline__ Grain grain_of(int hidden, Tensors... tensors) {
  const size_t places = (reinterpret_cast<size_t>(tensors) | ...);
  constexpr int WORD = 4 / int(sizeof(Element));
  if (hidden % TOGETHER == 0 && places % (TOGETHER * sizeof(Element)) == 0) return ALL_TOGETHER;
  return hidden % WORD == 0 && places % 4 == 0 ? WORDS : ELEMENTS;
}

struct Stream {
  static constexpr int GROUPS = 32 / TOGETHER, COPIES = PARTS * GROUPS;
  static constexpr int ROUNDS = (COPIES + 31) / 32;
  static_assert(ITEMS * ROUNDS <= 32, "`needed` has too few bits");

  const Product& product;
  Grain grain;  // what can be copied at once everywhere
  const Element* from[ITEMS][ROUNDS];
  int step[ROUNDS];
  u32 needed;  // one bit for each of `from`

  // `rows(part)`: the first step's rows of a tensor.
  template <class Source>
  __device__ __forceinline__ Stream(const Product& product, Grain grain, Source rows)
      : product(product), grain(grain), needed(0) {
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
          const bool inside = unit < product.hidden - product.unit0();
          from[i][r] = own.at(s, product.unit0() + unit);
          if (own.there && s < product.sequences && inside) needed |= 1u << (i * ROUNDS + r);
        }
      }
  }

  __device__ __forceinline__ int part_of(int r) const { return (r * 32 + product.lane) / GROUPS; }
  __device__ __forceinline__ int first_of(int r) const {
    return (r * 32 + product.lane) % GROUPS * TOGETHER;
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
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Wait for the oldest step's values: `copy` was called once for each of AHEAD steps.
  __device__ __forceinline__ static void await() {
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    __syncwarp();
  }
  __device__ __forceinline__ Element read(int slot, int i, int part) const {
    return place(slot, i, part)[product.lane];
  }

 private:
  __device__ __forceinline__ void copy_one(Element* to, const Element* source, int i, int r) const {
    if (grain == ALL_TOGETHER) {
      copy_async<TOGETHER* int(sizeof(Element))>(to, source);
      return;
    }
    const int left = product.hidden - product.unit0() - product.unit_at(i, first_of(r));
    constexpr int WORD = 4 / int(sizeof(Element));
    if (grain == WORDS) {
#pragma unroll
      for (int e = 0; e < TOGETHER; e += WORD)
        if (e < left) copy_async<4>(to + e, source + e);
      return;
    }
    Element values[TOGETHER];  // all loads before the first store, which waits for them
#pragma unroll
    for (int e = 0; e < TOGETHER; ++e) values[e] = e < left ? source[e] : Element(0);
#pragma unroll
    for (int e = 0; e < TOGETHER; ++e) to[e] = values[e];
  }
  template <int BYTES>
  __device__ __forceinline__ static void copy_async(Element* to, const Element* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(source),
                 "n"(BYTES)
                 : "memory");
  }
};
