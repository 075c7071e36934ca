// The part of y = W · v that a warp has: the products of its weights with v as v arrives.
#pragma once
#include "columns.cuh"
#if STAGED_BYTES
#include "staging.cuh"
#else
#include "loading.cuh"
#endif

#if DTYPE == 2
// Rounding to TF32 is adding half of the last bit that a product takes; the instruction looks for
// NaNs as well, which for every value that arrives is one comparison too many. Through L2 values
// arrive as they are stored, after `unmarked`; within a cluster they are rounded once, before they
// are pushed. Backwards, where the bare addition makes the assembler spill, they are rounded once
// as well, before they are stored (ROUNDED): none but products and the biases' sums read them.
// Forwards what is stored is the output.
__device__ __forceinline__ u32 factor(u32 published) {
  return !GRID || ROUNDED ? published : BACKWARD ? to_tf32(published) : published + 0x1000u;
}
#endif

#if DTYPE != 5
// VEC elements of a row of `count`, zero beyond its end, as if they had been published.
__device__ __forceinline__ uint4 gathered(const Element* row, int k, int count) {
  union {
    uint4 all;
    Element each[VEC];
  } v;
  if (count % VEC == 0) {
    v.all = k < count ? __ldg(reinterpret_cast<const uint4*>(row + k)) : make_uint4(0, 0, 0, 0);
  } else {
#pragma unroll
    for (int e = 0; e < VEC; ++e) v.each[e] = k + e < count ? row[k + e] : Element(0);
  }
  if (DTYPE == 2)
#pragma unroll
    for (int e = 0; e < VEC; ++e) v.each[e] = unmarked(v.each[e]);
  return v.all;
}
#endif

// How a lane learns that its part of v has come through L2 (POLLING).
enum Polling {
  FIRST,       // polls its first vector alone where it needs many, and then loads the others
  ALL,         // loads all, and again those that still show the mark
  ALL_DELAYED  // the same, some time after its block's own publication
};

// One time step's v as other blocks publish it: rows of sequences, `stride` elements apart.
struct Published {
  const Exchanged* rows;
  int stride;
};

struct Multiplier : LoadedWeights {
  bool given_up;
  int* failed;
  u32 published_at, delay;                    // in cycles, where ALL_DELAYED
  float finished[BATCH_TILES][ROW_TILES][4];  // where DIRECT
#if DTYPE == 5
  Scaling given;       // of states from memory
  float published_by;  // a GRU's states; others' are by STATES_BY
  float to_sums;       // what the next product's sums are multiplied by
#endif

  __device__ __forceinline__ Multiplier(int hidden, int sequences, int* failed)
      : LoadedWeights(hidden, sequences), given_up(false), failed(failed), delay(0) {
    note_publication();
#if DTYPE == 5
    published_by = STATES_BY;
#endif
  }

  // ---- a result as it is published through L2, or pushed within a cluster
#if DTYPE == 5
  // a NaN becomes one that is not the mark
  __device__ __forceinline__ Exchanged stored(Element bits) const {
    float y = __uint_as_float(bits) * (CELL == 1 ? published_by : STATES_BY);
    if (CELL == 1 && is_beyond(y, bits)) y = copysignf(MOST, y);
    return Exchanged(two_halves(y, 0.0f));
  }
  __device__ __forceinline__ Exchanged pushed(Element bits) const { return stored(bits); }
#elif DTYPE == 2
  __device__ __forceinline__ static Element stored(Element bits) {
    return ROUNDED ? to_tf32(bits) : bits;
  }
  __device__ __forceinline__ static Element pushed(Element bits) {
    return GRID ? bits : to_tf32(bits);
  }
#else
  __device__ __forceinline__ static Element stored(Element bits) { return bits; }
  __device__ __forceinline__ static Element pushed(Element bits) { return bits; }
#endif

  // ---- v from memory, of any size, or as it is published; see scaled.cuh
#if DTYPE == 5
  __device__ __forceinline__ void begin_given() {
    given.begin(STATES_BY, LEAST_STATES_BY), expect_given();
  }
  // Whether it must be gathered again.
  __device__ __forceinline__ bool given_again() {
    const bool again = CELL == 1 ? given.again_by_block() : given.again_by_warp();
    expect_given();
    return again;
  }
  __device__ __forceinline__ void expect_given() {
    to_sums = inverse(weights_scaling.by) * inverse(given.by);
    if (CELL == 1) published_by = fminf(published_by, given.by);
  }
  __device__ __forceinline__ void expect_published() {
    to_sums = inverse(weights_scaling.by) * inverse(CELL == 1 ? published_by : STATES_BY);
  }
  __device__ __forceinline__ uint4 gather(const Element* row, int k) {
    return given.read(row + k, hidden - k, hidden % VEC == 0);
  }
#else
  __device__ __forceinline__ void begin_given() {}
  __device__ __forceinline__ bool given_again() { return false; }
  __device__ __forceinline__ void expect_given() {}
  __device__ __forceinline__ void expect_published() {}
  __device__ __forceinline__ uint4 gather(const Element* row, int k) const {
    return gathered(row, k, hidden);
  }
#endif

  // ---- multiplying
  __device__ __forceinline__ bool give_up(Patience& patience) {
    if (!given_up && patience.ended()) given_up = true, *failed = 1;
    return given_up;
  }

  // Of the batch tiles that are multiplied abreast.
  struct Sums {
    float of[ABREAST][ROW_TILES][CHAINS][LANE_SUMS];
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int i = 0; i < ABREAST * ROW_TILES * CHAINS * LANE_SUMS; ++i)
        (&of[0][0][0][0])[i] = 0.0f;
    }
  };

  // One chunk of v, of each of them, against all row tiles.
  __device__ __forceinline__ void add(Sums& sums, int c, const uint4 (&v)[ABREAST]) const {
#if DTYPE == 4
    Columns columns[ABREAST];
#pragma unroll
    for (int n = 0; n < ABREAST; ++n) columns[n].gather(v[n], q);
#endif
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      u32 a[2][4];
      const int t = m * CHUNKS + c;
      if (t < IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = w[t % IN_REGISTERS][i / 4][i % 4];
      } else {
        const uint4* const at = weights() + (t - IN_REGISTERS) * 2 * THREADS + threadIdx.x;
        const uint4 x = at[0], y = at[THREADS];
        a[0][0] = x.x, a[0][1] = x.y, a[0][2] = x.z, a[0][3] = x.w;
        a[1][0] = y.x, a[1][1] = y.y, a[1][2] = y.z, a[1][3] = y.w;
      }
      const int chain = CHAINS == 4 ? c % 2 * 2 : 0;
#pragma unroll
      for (int n = 0; n < ABREAST; ++n)
#if DTYPE == 4
        accumulate(sums.of[n][m][chain], a, columns[n]);
#else
        accumulate(sums.of[n][m][chain], sums.of[n][m][CHAINS == 1 ? 0 : chain + 1], a, v[n]);
#endif
    }
  }

  // The sequence of a batch tile that this lane has v of; fewer than eight are repeated.
  __device__ __forceinline__ int column_of(int n) const {
    return WIDTH < 8 ? g % WIDTH : n * 8 + g;
  }

  // The sums over this warp's part of the inner dimension, for the batch tiles from n0 on.
  __device__ __forceinline__ void leave(const Sums& sums, float* partial, int n0) {
#pragma unroll
    for (int n = 0; n < ABREAST; ++n) leave(sums.of[n], partial, n0 + n);
  }
  __device__ __forceinline__ void leave(const float (&sums)[ROW_TILES][CHAINS][LANE_SUMS],
                                        float* partial, int n) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      float total[4];
#if DTYPE == 4
      total_of(total, sums[m][0], q);
#else
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[i] = sums[m][0][i];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) total[i] += sums[m][chain][i];
      }
#endif
#if DTYPE == 5
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] *= to_sums;
#endif
      if (DEALT) deal(finished[n][m], total);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (DIRECT && !DEALT) finished[n][m][i] = total[i];
        if (DIRECT) continue;
        const int s = n * 8 + q * 2 + i % 2;
        const int r = (row_warp * ROW_TILES + m) * 16 + i / 2 * 8 + g;
        if (s < sequences) partial[(k_warp * SEQUENCES + s) * PARTIAL_ROW + r] = total[i];
      }
    }
  }
  // Of a unit with four rows in one tile, a lane has two for two sequences, and the lane 16 further
  // the other two: each takes all four for one of them.
  __device__ __forceinline__ void deal(float (&to)[4], const float (&total)[4]) const {
    const bool low = g < 4;
    const float first = __shfl_xor_sync(~0u, low ? total[1] : total[0], 16);
    const float second = __shfl_xor_sync(~0u, low ? total[3] : total[2], 16);
    to[0] = low ? total[0] : first, to[1] = low ? first : total[1];
    to[2] = low ? total[2] : second, to[3] = low ? second : total[3];
  }

  // v from shared memory, or however fetch(c, n) gives the lane's part of it
  template <class Fetch>
  __device__ __forceinline__ void multiply(float* partial, Fetch fetch) {
#pragma unroll
    for (int n0 = 0; n0 < BATCH_TILES; n0 += ABREAST) {
      if (n0 * 8 >= sequences) break;
      Sums sums;
      sums.clear();
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        uint4 v[ABREAST];
#pragma unroll
        for (int n = 0; n < ABREAST; ++n) v[n] = fetch(c, n0 + n);
        add(sums, c, v);
      }
      leave(sums, partial, n0);
    }
  }

  // v through L2, as it arrives: AT_ONCE vectors are loaded together, the next ones while these are
  // multiplied. Vector f is chunk chunk_of(f) of batch tile tile_of(f).
  static constexpr int VECTORS = CHUNKS * BATCH_TILES;
  static constexpr int PIECES = (VECTORS + AT_ONCE - 1) / AT_ONCE;
  __device__ __forceinline__ static constexpr int chunk_of(int f) { return f / ABREAST % CHUNKS; }
  __device__ __forceinline__ static constexpr int tile_of(int f) {
    return f / (CHUNKS * ABREAST) * ABREAST + f % ABREAST;
  }

  // Where the lane's part of vector f lies. Of a sequence that is not there, the last one's: nobody
  // reads the sums of that column. Beyond the inner dimension's end, its last part: see `await`.
  __device__ __forceinline__ const Exchanged* place_of(Published from, int f) const {
    const int c = chunk_of(f);
    return row_of(from, tile_of(f)) +
           (RAGGED ? min(c * CHUNK, INNER * padded - VEC - k_of(0)) : c * CHUNK);
  }
  __device__ __forceinline__ const Exchanged* row_of(Published from, int tile) const {
    return from.rows + u32(min(tile * 8 + g, sequences - 1) * from.stride + k_of(0));
  }
  // A piece's vectors, whether they have arrived or not. No load is predicated: the compiler may
  // load into other registers and choose between those and zero, and then each load is waited for
  // before the next. The first `kept` of them are there.
  __device__ __forceinline__ void request(uint4 (&v)[AT_ONCE], Published from, int piece,
                                          int kept = 0) const {
    const Exchanged* rows[ABREAST];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int f = piece * AT_ONCE + j;
      if (j >= kept) v[j] = make_uint4(0, 0, 0, 0);
      if (f >= VECTORS) continue;
      if (RAGGED) {
        if (j >= kept) v[j] = load_relaxed(place_of(from, f));
        continue;
      }
      const Exchanged*& row = rows[f % ABREAST];
      if (j < ABREAST || chunk_of(f) == 0) {
        row = row_of(from, tile_of(f));
        asm("" : "+l"(row));  // otherwise each load would reckon an address of its own
      }
      if (j >= kept) v[j] = load_relaxed(row + chunk_of(f) * CHUNK);
    }
  }
  __device__ __forceinline__ static bool arrived(const uint4 (&v)[AT_ONCE]) {
    Marks marks;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) marks.look(v[j]);
    return !marks.any();
  }
  // Those again that have not.
  __device__ __forceinline__ void renew(uint4 (&v)[AT_ONCE], Published from, int piece) const {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (has_mark(v[j])) v[j] = load_relaxed(place_of(from, piece * AT_ONCE + j));
  }
  __device__ __forceinline__ void await(uint4 (&v)[AT_ONCE], Published from, int piece) {
    await(v, from, piece, [] {});
  }
  // `again` is called whenever the piece is asked for once more.
  template <class Again>
  __device__ __forceinline__ void await(uint4 (&v)[AT_ONCE], Published from, int piece,
                                        Again again) {
    Patience patience;
    // all lanes together, since they multiply together
    while (!__all_sync(~0u, arrived(v))) {
      if (__any_sync(~0u, given_up || give_up(patience))) break;
      renew(v, from, piece);
      again();
    }
    if (!RAGGED) return;
    // the weights are zeros there, but zero times infinity is not
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (k_of(chunk_of(piece * AT_ONCE + j)) >= INNER * padded) v[j] = make_uint4(0, 0, 0, 0);
  }
  // ---- when to ask first (ALL_DELAYED). A request that comes too early is made a second time, all
  // the way to L2 and back, which takes several hundred cycles; one that comes too late costs as
  // much as it is late. So the delay is such that one step of 17 asks too early.
  static constexpr u32 LATER = 64, SOONER = 4, MOST_DELAY = 4096;
  __device__ __forceinline__ void note_publication() {
    if (POLLING == ALL_DELAYED) published_at = u32(clock64());
  }
  __device__ __forceinline__ void hold_back() const {
    while (u32(clock64()) - published_at < delay) {
    }
  }
  __device__ __forceinline__ void adapt_delay(bool too_early) {
    delay = too_early ? min(delay + LATER, MOST_DELAY) : delay - min(delay, SOONER);
  }

  __device__ __forceinline__ void poll_first(uint4& v, Published from) {
    // many loads that find nothing would stand in the way of the stores they wait for
    Patience patience;
    while (has_mark(v = load_relaxed(place_of(from, 0))) && !give_up(patience)) {
    }
  }
  // take(piece, its vectors) for each piece, in order, once it has arrived; the next one is asked for
  // before.
  template <class Take>
  __device__ __forceinline__ void each_published(Published from, Take take) {
    uint4 v[2][AT_ONCE];
    constexpr bool FIRST_ALONE = POLLING == FIRST && PIECES > 1;
    bool too_early = false;
    if (POLLING == ALL_DELAYED) hold_back();
    if (FIRST_ALONE) poll_first(v[0][0], from);
    __syncwarp();
    request(v[0], from, 0, FIRST_ALONE ? 1 : 0);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      uint4(&next)[AT_ONCE] = v[(piece + 1) & 1];
      if (piece + 1 < PIECES) request(next, from, piece + 1);
      await(v[piece & 1], from, piece, [&] {
        too_early = true;
        // with the next piece, which was asked for as early
        if (POLLING >= ALL && piece + 1 < PIECES) renew(next, from, piece + 1);
      });
      take(piece, v[piece & 1]);
    }
    if (POLLING == ALL_DELAYED) adapt_delay(too_early);
  }
  __device__ __forceinline__ void multiply_published(float* partial, Published from) {
    Sums sums;
    each_published(from, [&](int piece, const uint4(&v)[AT_ONCE]) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; j += ABREAST) {
        const int f = piece * AT_ONCE + j, c = chunk_of(f), n0 = tile_of(f);
        if (f >= VECTORS || n0 * 8 >= sequences) break;
        if (c == 0) sums.clear();
        uint4 each[ABREAST];
#pragma unroll
        for (int n = 0; n < ABREAST; ++n) each[n] = v[j + n];
        add(sums, c, each);
        if (c == CHUNKS - 1) leave(sums, partial, n0);
      }
    });
  }

#if DTYPE != 4
  __device__ __forceinline__ static void accumulate(float (&even)[4], float (&odd)[4],
                                                    const u32 (&a)[2][4], uint4 v) {
#if HALVES
    mma(even, a[0], v.x, v.y);
    mma(odd, a[1], v.z, v.w);
#elif DTYPE == 2
    mma(even, a[0], factor(v.x), factor(v.y));
    mma(odd, a[1], factor(v.z), factor(v.w));
#else
    // (a + a')(v + v') without a'v', which is below float32's last bit
    u32 high[2][4], rest[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      high[i / 4][i % 4] = to_tf32(a[i / 4][i % 4]),
                      rest[i / 4][i % 4] = tf32_rest(a[i / 4][i % 4]);
    mma(even, rest[0], to_tf32(v.x), to_tf32(v.y));
    mma(odd, rest[1], to_tf32(v.z), to_tf32(v.w));
    mma(even, high[0], tf32_rest(v.x), tf32_rest(v.y));
    mma(odd, high[1], tf32_rest(v.z), tf32_rest(v.w));
    mma(even, high[0], to_tf32(v.x), to_tf32(v.y));
    mma(odd, high[1], to_tf32(v.z), to_tf32(v.w));
#endif
  }
#endif

  // ---- v in shared memory
  __device__ __forceinline__ uint4 from_shared(int slot, int c, int n) const {
    return *reinterpret_cast<const uint4*>(vectors(slot) + column_of(n) * VECTOR_ROW +
                                           k_of(c) * int(sizeof(Exchanged)));
  }
  // The lane's part of one batch tile.
  __device__ __forceinline__ void load_vectors(uint4 (&v)[CHUNKS], int slot) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) v[c] = from_shared(slot, c, 0);
    __syncwarp();  // the assembler would put the loads off until they are used
  }
  __device__ __forceinline__ Exchanged* place(int slot, int s, int section, int unit) const {
    return reinterpret_cast<Exchanged*>(vectors(slot) + s * VECTOR_ROW) + section * padded + unit;
  }
  // Both slots zero: what is never written must not disturb a sum.
  __device__ __forceinline__ void clear_vectors() const {
    for (int i = threadIdx.x; i < 2 * VECTOR_BYTES / 16; i += THREADS)
      reinterpret_cast<uint4*>(vectors(0))[i] = make_uint4(0, 0, 0, 0);
  }
  // v from memory, where a NaN may be any: unpadded rows of `hidden` (only where INNER is 1)
#if DTYPE == 5
  __device__ __forceinline__ void fill_vectors(int slot, const Element* rows) {
    given.begin(STATES_BY, LEAST_STATES_BY);
    do {
      for (int i = threadIdx.x; i < sequences * hidden; i += THREADS)
        *place(slot, i / hidden, 0, i % hidden) = given.one(rows[i]);
    } while (given.again_by_block());
  }
#else
  __device__ __forceinline__ void fill_vectors(int slot, const Element* rows) const {
    for (int i = threadIdx.x; i < sequences * hidden; i += THREADS)
      *place(slot, i / hidden, 0, i % hidden) = pushed(DTYPE == 2 ? quiet(rows[i]) : rows[i]);
  }
#endif
};
