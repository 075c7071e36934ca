// Which rows, hidden units and sequences a block's warps and lanes have.
//
// A block finishes OWN_ROWS rows of y: OUTER for each of its UNITS hidden units. An item is one
// (unit, sequence) pair; the thread that has it does the cell's arithmetic for it.
//
// DIRECT: a warp multiplies the whole inner dimension of its rows, and these are dealt so that a
// lane ends up with all rows of a unit: its sums never leave the registers.
#pragma once
#include "numbers.cuh"

constexpr int OWNERS = GRID ? CLUSTER : 1;
constexpr int OWN_ROWS = OUTER * UNITS;
constexpr int ROWS = OWN_ROWS * OWNERS;
constexpr int BLOCK_ROWS = ROW_WARPS * ROW_TILES * 16;
constexpr int SEQUENCES = BATCH_TILES * 8;
constexpr int WARPS = ROW_WARPS * K_WARPS;
constexpr int THREADS = WARPS * 32;
// Batch tiles that are multiplied ABREAST: weights in shared memory are read once for all of them.
static_assert(BATCH_TILES % ABREAST == 0, "batch tiles would be left over");
static_assert(!GRID || AT_ONCE % ABREAST == 0, "what is multiplied together must arrive together");
// chains of dependent products: with few tiles one chain would wait for its own results
constexpr int CHAINS = ROW_TILES * ABREAST >= 4                          ? 1
                       : !GRID && ROW_TILES * ABREAST == 1 && CHUNKS > 1 ? 4
                                                                         : 2;
static_assert(UNITS % 8 == 0, "vectors would be split between blocks");

constexpr bool DIRECT = !GRID && K_WARPS == 1;
// rows of a tile that a unit takes where the sums stay in registers: a GRU's three gates take four
constexpr int UNIT_ROWS = OUTER == 1 ? 1 : 4;
constexpr int TILE_UNITS = 16 / UNIT_ROWS;
static_assert(DIRECT ? ROW_WARPS * ROW_TILES * TILE_UNITS >= UNITS : BLOCK_ROWS >= ROWS,
              "rows are not covered");
// Items of a thread; of a tile's four sums a lane has one item's or those of four.
constexpr int TILE_ITEMS = OUTER == 1 ? 4 : 1;
constexpr int ITEMS =
    DIRECT ? ROW_TILES * BATCH_TILES * TILE_ITEMS : (UNITS * SEQUENCES + THREADS - 1) / THREADS;

// Item i of a warp's 32 lanes: SPAN units lie together, then comes the next sequence. TOGETHER of
// them are copied or pushed at once.
constexpr int SPAN = DIRECT ? OUTER == 1 ? 8 : 4 : 32;
constexpr int TOGETHER = SPAN < VEC ? SPAN : VEC;

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

  // ---- a thread's items, counted from the block's first unit and the group's first sequence
  __device__ __forceinline__ int unit_of(int i) const {
    if (!DIRECT) return int(threadIdx.x + i * THREADS) % UNITS;
    return direct_unit(i) + (OUTER == 1 ? g : g % 4);
  }
  __device__ __forceinline__ int sequence_of(int i) const {
    if (!DIRECT) return int(threadIdx.x + i * THREADS) / UNITS;
    return warp_sequence(i) + 2 * q + (OUTER == 1 ? 0 : g / 4);
  }
  // The first sequence that any lane of the warp has as item i.
  __device__ __forceinline__ int warp_sequence(int i) const {
    if (!DIRECT) return (warp + i * WARPS) * 32 / UNITS;
    return i / TILE_ITEMS % BATCH_TILES * 8 + (OUTER == 1 ? i % 2 : 0);
  }
  // Whether item i is one: of a sequence that is there and one of the block's units below `end`.
  __device__ __forceinline__ bool has(int i, int end) const {
    return sequence_of(i) < sequences && unit_of(i) < below(end);
  }
  // Tiles may cover more units than the block has.
  __device__ __forceinline__ static int below(int end) {
    return !DIRECT || ROW_WARPS * ROW_TILES * TILE_UNITS == UNITS ? end : min(end, UNITS);
  }

  // ---- item i of all lanes of a warp, in the order of places: units first, then sequences
  __device__ __forceinline__ int place_of_lane() const {
    return !DIRECT ? lane : OUTER == 1 ? q * 8 + g : (2 * q + g / 4) * 4 + g % 4;
  }
  __device__ __forceinline__ int unit_at(int i, int place) const {
    if (!DIRECT) return ((warp + i * WARPS) * 32 + place) % UNITS;
    return direct_unit(i) + place % SPAN;
  }
  __device__ __forceinline__ int sequence_at(int i, int place) const {
    if (!DIRECT) return ((warp + i * WARPS) * 32 + place) / UNITS;
    return warp_sequence(i) + place / SPAN * (OUTER == 1 ? 2 : 1);
  }

 private:
  __device__ __forceinline__ int direct_unit(int i) const {
    const int tile = row_warp * ROW_TILES + i / TILE_ITEMS / BATCH_TILES;
    return tile * TILE_UNITS + (OUTER == 1 ? i % 4 / 2 * 8 : 0);
  }
};
