// Which rows, hidden units and sequences a block's warps and lanes have.
//
// A block finishes OWN_ROWS rows of y: OUTER for each of its UNITS hidden units. An item is one
// (unit, sequence) pair; the thread that has it does the cell's arithmetic for it.
//
// DIRECT: a warp multiplies the whole inner dimension of its rows, and these stand so that a lane
// ends up with all rows of a unit: its sums never leave the registers. By sheets, or DEALT.
//
// A sheet is 8 units × the 8 columns of a product, of which lane (g, q) has unit g in columns 2q
// and 2q + 1: half of a tile where a unit has one row, two tiles where it has four.
//
// WIDTH: sequences of a batch tile. Where they are fewer than its 8 columns, columns repeat them:
// then all lanes have the same sums, and each takes another unit or sequence. Otherwise most lanes
// would go through a cell's arithmetic, which is most of a short step, for columns of nobody.
#pragma once
#include "numbers.cuh"

constexpr int OWNERS = GRID ? CLUSTER : 1;
constexpr int OWN_ROWS = OUTER * UNITS;
constexpr int ROWS = OWN_ROWS * OWNERS;
constexpr int BLOCK_ROWS = ROW_WARPS * ROW_TILES * 16;
constexpr int SEQUENCES = BATCH_TILES * WIDTH;
constexpr int WARPS = ROW_WARPS * K_WARPS;
constexpr int THREADS = WARPS * 32;
// Of a warp's ROW_TILES × CHUNKS, counted chunk by chunk.
constexpr int IN_REGISTERS = REGISTER_TILES * CHUNKS + REGISTER_CHUNKS;
static_assert(IN_REGISTERS > 0 && IN_REGISTERS <= ROW_TILES * CHUNKS, "more than there are");
// Batch tiles that are multiplied ABREAST: weights in shared memory are read once for all of them.
static_assert(BATCH_TILES % ABREAST == 0, "batch tiles would be left over");
static_assert(!GRID || AT_ONCE % ABREAST == 0, "what is multiplied together must arrive together");
// chains of dependent products: with few tiles one chain would wait for its own results
constexpr int CHAINS = DTYPE == 4 || ROW_TILES * ABREAST >= 4            ? 1
                       : !GRID && ROW_TILES * ABREAST == 1 && CHUNKS > 1 ? 4
                                                                         : 2;
static_assert(UNITS % 8 == 0, "vectors would be split between blocks");
static_assert(GRID || !MARKS_AHEAD, "there are no marks");

constexpr bool DIRECT = !GRID && K_WARPS == 1;
constexpr bool DEALT = DIRECT && OUTER > 1 && ROW_TILES % 2 != 0;
// rows of a tile that a unit takes where the sums stay in registers: a GRU's three gates take four
constexpr int UNIT_ROWS = OUTER == 1 ? 1 : 4;
constexpr int TILE_UNITS = 16 / UNIT_ROWS;
constexpr int SHEETS = ROW_TILES * TILE_UNITS / 8;  // of a warp, where there are
static_assert(DIRECT ? ROW_WARPS * ROW_TILES * TILE_UNITS >= UNITS : BLOCK_ROWS >= ROWS,
              "rows are not covered");
// On the ordinary units each column takes its own instructions: where sums meet in shared memory, a
// tile of few sequences has no more columns than these, and repeats none.
constexpr bool REPEATED = WIDTH < 8 && DIRECT;
static_assert(WIDTH == 8 || (BATCH_TILES == 1 && (DIRECT || DTYPE == 4)),
              "columns would be left out");
static_assert(!REPEATED || (WIDTH <= 2 && !DEALT && SHEETS % 2 == 0),
              "two sheets and at most two sequences are shared by the lanes of a row");
constexpr int ITEMS = !DIRECT    ? (UNITS * SEQUENCES + THREADS - 1) / THREADS
                      : DEALT    ? ROW_TILES * BATCH_TILES
                      : REPEATED ? SHEETS / 2
                                 : SHEETS * BATCH_TILES * 2;

// Item i of a warp's 32 lanes: SPAN units lie together, then comes the next sequence. TOGETHER of
// them are pushed at once, and COPIED copied.
constexpr int SPAN = !DIRECT ? 32 : DEALT ? 4 : REPEATED ? 16 : 8;
constexpr int TOGETHER = SPAN < VEC ? SPAN : VEC, COPIED = SPAN < ELEMENTS ? SPAN : ELEMENTS;

// A block that exchanges nothing. Of a product it waits for its own warps alone, so that all that a
// step does besides, by the one warp that a scheduler has, makes it longer: where there are
// registers for it, that waits until the next product is under way (TRAILING).
constexpr bool ALONE = !GRID && CLUSTER == 1;
constexpr bool TRAILING = ALONE && DIRECT && BATCH_TILES == 1 && ITEMS <= 2;
// A product in TF32 is twice as many instructions, which the rest of a step can follow while they
// run: 4 to 8 % shorter steps than the other way round. In 16 bits they were 0 to 5 % longer.
constexpr bool PRODUCT_FIRST = TRAILING && DTYPE == 2;

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
    return DIRECT ? unit_at(i, place_of_lane()) : int(threadIdx.x + i * THREADS) % UNITS;
  }
  __device__ __forceinline__ int sequence_of(int i) const {
    return DIRECT ? sequence_at(i, place_of_lane()) : int(threadIdx.x + i * THREADS) / UNITS;
  }
  // The first sequence that any lane of the warp has as item i.
  __device__ __forceinline__ int warp_sequence(int i) const {
    if (!DIRECT) return (warp + i * WARPS) * 32 / UNITS;
    if (REPEATED) return 0;
    return DEALT ? i % BATCH_TILES * 8 : i / 2 % BATCH_TILES * 8 + i % 2;
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
    return !DIRECT ? lane : DEALT ? (2 * q + g / 4) * 4 + g % 4 : q * 8 + g;
  }
  __device__ __forceinline__ int unit_at(int i, int place) const {
    if (!DIRECT) return ((warp + i * WARPS) * 32 + place) % UNITS;
    const int before = DEALT      ? i / BATCH_TILES * 4
                       : REPEATED ? i * 16
                                  : i / 2 / BATCH_TILES * 8;  // of the warp's units
    return row_warp * ROW_TILES * TILE_UNITS + before + place % SPAN;
  }
  __device__ __forceinline__ int sequence_at(int i, int place) const {
    if (!DIRECT) return ((warp + i * WARPS) * 32 + place) / UNITS;
    return warp_sequence(i) + place / SPAN * (DEALT || REPEATED ? 1 : 2);
  }
};
