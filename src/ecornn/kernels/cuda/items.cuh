// Which rows, hidden units and sequences a block's warps and lanes have.
//
// A block finishes OWN_ROWS rows of y: OUTER for each of its UNITS hidden units. An item is one
// (unit, sequence) pair; the thread that has it does the cell's arithmetic for it.
//
// DIRECT: a warp multiplies the whole inner dimension of all rows of its own WARP_UNITS units, and
// does their cell's arithmetic too: their sums never leave the warp, and no barrier stands between.
#pragma once
#include "numbers.cuh"

constexpr int OWNERS = GRID ? CLUSTER : 1;
constexpr int OWN_ROWS = OUTER * UNITS;
constexpr int ROWS = OWN_ROWS * OWNERS;
constexpr int BLOCK_ROWS = ROW_WARPS * ROW_TILES * 16;
constexpr int SEQUENCES = BATCH_TILES * 8;
constexpr int WARPS = ROW_WARPS * K_WARPS;
constexpr int THREADS = WARPS * 32;
// chains of dependent products: with few row tiles one chain would wait for its own results
constexpr int CHAINS = ROW_TILES >= 4 ? 1 : !GRID && ROW_TILES == 1 && CHUNKS > 1 ? 4 : 2;
static_assert(UNITS % 8 == 0, "vectors would be split between blocks");

constexpr bool DIRECT = !GRID && K_WARPS == 1;
constexpr int WARP_UNITS = UNITS / ROW_WARPS, WARP_ROWS = ROW_TILES * 16;
static_assert(DIRECT ? UNITS % ROW_WARPS == 0 && WARP_ROWS >= OUTER * WARP_UNITS
                     : BLOCK_ROWS >= ROWS,
              "rows are not covered");
// Items of a thread.
constexpr int ITEMS =
    DIRECT ? (WARP_UNITS * SEQUENCES + 31) / 32 : (UNITS * SEQUENCES + THREADS - 1) / THREADS;
// So many neighbouring units are copied or pushed at once.
constexpr int TOGETHER = DIRECT && WARP_UNITS < VEC ? WARP_UNITS : VEC;
static_assert(!DIRECT || WARP_UNITS % TOGETHER == 0, "neighbours would be parted");

// Steps that values from memory are asked for before they are used: a short step is over before a
// load is. Even, so that what alternates between steps is known at compile time.
constexpr int AHEAD = 2;

struct Items {
  int warp, lane, g, q, row_warp, k_warp;
  int sequences;  // of this group

  __device__ __forceinline__ explicit Items(int sequences) : sequences(sequences) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    row_warp = warp / K_WARPS, k_warp = warp % K_WARPS;
  }

  // the block's first unit
  __device__ __forceinline__ static int unit0() { return blockIdx.x * UNITS; }

  // ---- item i of a warp's lanes: units first, then sequences; both counted from the block's
  // first. `place` is a lane, and may be that of another.
  __device__ __forceinline__ int unit_at(int i, int place) const {
    return DIRECT ? row_warp * WARP_UNITS + (i * 32 + place) % WARP_UNITS
                  : ((warp + i * WARPS) * 32 + place) % UNITS;
  }
  __device__ __forceinline__ int sequence_at(int i, int place) const {
    return DIRECT ? (i * 32 + place) / WARP_UNITS : ((warp + i * WARPS) * 32 + place) / UNITS;
  }
  __device__ __forceinline__ int unit_of(int i) const { return unit_at(i, lane); }
  __device__ __forceinline__ int sequence_of(int i) const { return sequence_at(i, lane); }
  // The first sequence that any lane of the warp has as item i.
  __device__ __forceinline__ int warp_sequence(int i) const { return sequence_at(i, 0); }
  // Whether item i is one: of a sequence that is there and one of the block's units below `end`.
  __device__ __forceinline__ bool has(int i, int end) const {
    return sequence_of(i) < sequences && unit_of(i) < end;
  }
};
