// y = W · v at every step, W on chip for all of them, v exchanged between blocks.
//
// v has INNER sections of `hidden` values, each padded to a multiple of VEC. Forwards a unit has
// one row of y for each gate and v is h; backwards a unit has one row, and v holds the gradients of
// all gates.
//
// Warps share the rows (ROW_WARPS) and the inner dimension (K_WARPS); the partial sums of the
// latter meet in shared memory. A warp holds ROW_TILES × CHUNKS tiles of weights, the first
// REGISTER_TILES rows of tiles in registers, the others in shared memory.
//
// GRID 1: all blocks of the launch exchange v through L2; a cluster shares the inner dimension
//         further, each block of it multiplying the rows of all (OWNERS), and partial sums go to
//         the block that owns the row.
// GRID 0: only the blocks of one cluster exchange v, through distributed shared memory.
//
// The inner dimension is permuted within each CHUNK, in W and v alike, so that the elements a lane
// needs for two products lie side by side: one 16-byte load feeds both.
#pragma once
#include "items.cuh"

// Shared memory, in this order; the host computes the same sum (see SHARED_BYTES below).
constexpr int WEIGHT_BYTES = (ROW_TILES - REGISTER_TILES) * CHUNKS * 2 * THREADS * 16;
// a row of v; rows start 64 bytes apart modulo 128, so that the 16-byte loads of 8 lanes do not
// meet
constexpr int INNER_BYTES = K_WARPS * CHUNKS * 64;
constexpr int VECTOR_ROW = INNER_BYTES + (INNER_BYTES % 128 == 0 ? 64 : 0);
constexpr int VECTOR_BYTES = GRID ? 0 : SEQUENCES * VECTOR_ROW;
// rows of partial sums: 4 apart modulo 16, so that neither the products' writes nor the reads meet
constexpr int PARTIAL_ROW = BLOCK_ROWS + 4;
constexpr int PARTIAL_BYTES = DIRECT ? 0 : K_WARPS * SEQUENCES * PARTIAL_ROW * 4;
constexpr int RECEIVED_BYTES = OWNERS > 1 ? OWNERS * SEQUENCES * OWN_ROWS * 4 : 0;
constexpr int STAGE_BYTES = !GRID && CLUSTER > 1 ? WARPS * INNER * 32 * int(sizeof(Element)) : 0;
// what a step reads from memory; see stream.cuh
constexpr int STREAM_BYTES = AHEAD * ITEMS * PARTS * THREADS * int(sizeof(Element));
static_assert(SHARED_BYTES == WEIGHT_BYTES + 2 * VECTOR_BYTES + PARTIAL_BUFFERS * PARTIAL_BYTES +
                                  2 * RECEIVED_BYTES + STREAM_BYTES + STAGE_BYTES + 16,
              "the host reckons another size of shared memory");

extern __shared__ __align__(16) u8 shared[];

__device__ __forceinline__ u32 shared_address(const void* p) {
  return u32(__cvta_generic_to_shared(p));
}

// VEC elements of a row of `count`, zero beyond its end.
__device__ __forceinline__ uint4 gather(const Element* row, int k, int count) {
  if (count % VEC == 0) {
    return k < count ? __ldg(reinterpret_cast<const uint4*>(row + k)) : make_uint4(0, 0, 0, 0);
  }
  union {
    uint4 all;
    Element each[VEC];
  } v;
#pragma unroll
  for (int e = 0; e < VEC; ++e) v.each[e] = k + e < count ? row[k + e] : Element(0);
  return v.all;
}

// One time step's v as other blocks publish it: rows of sequences, `stride` elements apart.
struct Published {
  const Element* rows;
  int stride;
};

// What is pushed at once: so many elements of a row of v.
template <int COUNT>
using Pushed = typename Bytes<COUNT* int(sizeof(Element))>::Type;

struct Product : Items {
  int hidden, padded;  // padded: a section's length in v
  int rank;            // in the cluster
  bool given_up;
  int* failed;
  u32 w[REGISTER_TILES][CHUNKS][2][4];
  float finished[BATCH_TILES][ROW_TILES][4];  // where DIRECT: the sums of this lane's items

  __device__ __forceinline__ Product(int hidden, int sequences, int* failed)
      : Items(sequences), hidden(hidden), given_up(false), failed(failed) {
    padded = (hidden + VEC - 1) / VEC * VEC;
#if CLUSTER > 1
    rank = cluster_rank();
#else
    rank = 0;
#endif
  }

  // ---- places in shared memory
  __device__ __forceinline__ uint4* weights() const { return reinterpret_cast<uint4*>(shared); }
  __device__ __forceinline__ u8* vectors(int slot) const {
    return shared + WEIGHT_BYTES + slot * VECTOR_BYTES;
  }
  __device__ __forceinline__ float* partial(int slot) const {
    return reinterpret_cast<float*>(shared + WEIGHT_BYTES + 2 * VECTOR_BYTES +
                                    (PARTIAL_BUFFERS == 2 ? slot : 0) * PARTIAL_BYTES);
  }
  __device__ __forceinline__ float* received(int slot) const {
    return reinterpret_cast<float*>(shared + WEIGHT_BYTES + 2 * VECTOR_BYTES +
                                    PARTIAL_BUFFERS * PARTIAL_BYTES + slot * RECEIVED_BYTES);
  }
  __device__ __forceinline__ Element* streams() const {
    return reinterpret_cast<Element*>(shared + SHARED_BYTES - 16 - STAGE_BYTES - STREAM_BYTES) +
           warp * 32;
  }
  __device__ __forceinline__ Element* stage() const {
    return reinterpret_cast<Element*>(shared + SHARED_BYTES - 16 - STAGE_BYTES) + warp * INNER * 32;
  }
  __device__ __forceinline__ u32 barrier(int slot) const {
    return shared_address(shared + SHARED_BYTES - 16 + slot * 8);
  }

  // ---- the inner dimension
  __device__ __forceinline__ int k_of(int c) const {
    return (((GRID ? rank * K_WARPS : 0) + k_warp) * CHUNKS + c) * CHUNK + q * VEC;
  }
  // Row r of the block's tiles: which unit's, counted from `first_unit`, and which of its rows.
  struct Row {
    int unit, part;
  };
  __device__ __forceinline__ static Row row_at(int r) {
    if (DIRECT) return {r / 16 * TILE_UNITS + r % TILE_UNITS, r % 16 / TILE_UNITS};
    return {r / OWN_ROWS * UNITS + r % OWN_ROWS / OUTER, r % OUTER};
  }

  // VEC elements of W from inner position k on, zero beyond the end. The matrix is the layer's own,
  // (gates · hidden, hidden): forwards W's row is one of its rows, backwards one of its columns.
  __device__ __forceinline__ uint4 weights_at(const Element* matrix, int unit, int part,
                                              int k) const {
#if !BACKWARD
    return gather(matrix + (size_t(part) * hidden + unit) * hidden, k, hidden);
#else
    union {
      uint4 all;
      Element each[VEC];
    } v;
    const int section = k / padded, first = k - section * padded;
    const int gate = CELL == 1 ? (section + 2) % 3 : section;  // a GRU's stand as (n, r, z)
    const Element* const column = matrix + size_t(gate) * hidden * hidden + unit;
#pragma unroll
    for (int e = 0; e < VEC; ++e)
      v.each[e] = section < INNER && first + e < hidden ? __ldg(column + size_t(first + e) * hidden)
                                                        : Element(0);
    return v.all;
#endif
  }

  __device__ __forceinline__ void load_weights(const Element* matrix) {
    const int first_unit = (blockIdx.x - (GRID ? rank : 0)) * UNITS;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        uint4 rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = (row_warp * ROW_TILES + m) * 16 + half * 8 + g;
          const Row row = row_at(r);
          const int unit = first_unit + row.unit;
          rows[half] = make_uint4(0, 0, 0, 0);
          if (row.unit < OWNERS * UNITS && row.part < OUTER && unit < hidden)
            rows[half] = weights_at(matrix, unit, row.part, k_of(c));
#if DTYPE == 2
          rows[half] = make_uint4(to_tf32(rows[half].x), to_tf32(rows[half].y),
                                  to_tf32(rows[half].z), to_tf32(rows[half].w));
#endif
        }
        const uint4 a = make_uint4(rows[0].x, rows[1].x, rows[0].y, rows[1].y);
        const uint4 b = make_uint4(rows[0].z, rows[1].z, rows[0].w, rows[1].w);
        if (m < REGISTER_TILES) {
          u32(&to)[2][4] = w[m % REGISTER_TILES][c];
          to[0][0] = a.x, to[0][1] = a.y, to[0][2] = a.z, to[0][3] = a.w;
          to[1][0] = b.x, to[1][1] = b.y, to[1][2] = b.z, to[1][3] = b.w;
        } else {
          uint4* const to =
              weights() + ((m - REGISTER_TILES) * CHUNKS + c) * 2 * THREADS + threadIdx.x;
          to[0] = a, to[THREADS] = b;  // read by this thread alone
        }
      }
  }

  // ---- multiplying
  __device__ __forceinline__ bool give_up(Patience& patience) {
    if (!given_up && patience.ended()) given_up = true, *failed = 1;
    return given_up;
  }

  struct Sums {
    float of[ROW_TILES][CHAINS][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int i = 0; i < ROW_TILES * CHAINS * 4; ++i) (&of[0][0][0])[i] = 0.0f;
    }
  };

  // One chunk of v against all row tiles.
  __device__ __forceinline__ void add(Sums& sums, int c, uint4 v) const {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      u32 a[2][4];
      if (m < REGISTER_TILES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = w[m % REGISTER_TILES][c][i / 4][i % 4];
      } else {
        const uint4* const at =
            weights() + ((m - REGISTER_TILES) * CHUNKS + c) * 2 * THREADS + threadIdx.x;
        const uint4 x = at[0], y = at[THREADS];
        a[0][0] = x.x, a[0][1] = x.y, a[0][2] = x.z, a[0][3] = x.w;
        a[1][0] = y.x, a[1][1] = y.y, a[1][2] = y.z, a[1][3] = y.w;
      }
      const int chain = CHAINS == 4 ? c % 2 * 2 : 0;
      accumulate(sums.of[m][chain], sums.of[m][CHAINS == 1 ? 0 : chain + 1], a, v);
    }
  }

  // The sums over this warp's part of the inner dimension, for batch tile n.
  __device__ __forceinline__ void leave(const Sums& sums, float* partial, int n) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      float total[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[i] = sums.of[m][0][i];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) total[i] += sums.of[m][chain][i];
      }
      if (DIRECT) {
        deal(finished[n][m], total);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = n * 8 + q * 2 + i % 2;
        const int r = (row_warp * ROW_TILES + m) * 16 + i / 2 * 8 + g;
        if (s < sequences) partial[(k_warp * SEQUENCES + s) * PARTIAL_ROW + r] = total[i];
      }
    }
  }
  // Of a unit with four rows, a lane has two for two sequences, and the lane 16 further the other
  // two: each takes all four for one of them.
  __device__ __forceinline__ void deal(float (&to)[4], const float (&total)[4]) const {
    if (OUTER == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = total[i];
      return;
    }
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
    for (int n = 0; n < BATCH_TILES; ++n) {
      if (n * 8 >= sequences) break;
      Sums sums;
      sums.clear();
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) add(sums, c, fetch(c, n));
      leave(sums, partial, n);
    }
  }

  // v through L2, as it arrives: AT_ONCE vectors are loaded together, the next ones while these are
  // multiplied. Vector f is chunk f % CHUNKS of batch tile f / CHUNKS.
  static constexpr int VECTORS = CHUNKS * BATCH_TILES;
  static constexpr int PIECES = (VECTORS + AT_ONCE - 1) / AT_ONCE;

  __device__ __forceinline__ bool wanted(int f) const {
    return f < VECTORS && f / CHUNKS * 8 + g < sequences && k_of(f % CHUNKS) < INNER * padded;
  }
  __device__ __forceinline__ uint4 load_vector(Published from, int f) const {
    return load_relaxed(from.rows + size_t(f / CHUNKS * 8 + g) * from.stride + k_of(f % CHUNKS));
  }
  // A piece's vectors, whether they have arrived or not.
  __device__ __forceinline__ void request(uint4 (&v)[AT_ONCE], Published from, int piece) const {
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      v[j] = make_uint4(0, 0, 0, 0);
      if (wanted(piece * AT_ONCE + j)) v[j] = load_vector(from, piece * AT_ONCE + j);
    }
  }
  __device__ __forceinline__ void await(uint4 (&v)[AT_ONCE], Published from, int piece) {
    Patience patience;
    while (true) {
      u32 missing = 0;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (has_mark(v[j])) missing |= 1u << j;
      if (!missing || (given_up || give_up(patience))) break;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (missing & (1u << j)) v[j] = load_vector(from, piece * AT_ONCE + j);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void multiply_published(float* partial, Published from) {
    uint4 v[2][AT_ONCE];
    if (PIECES > 1 && wanted(0)) {
      // many loads that find nothing would stand in the way of the stores they wait for
      Patience patience;
      while (has_mark(load_vector(from, 0)) && !give_up(patience)) {
      }
    }
    __syncwarp();
    request(v[0], from, 0);
    Sums sums;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      if (piece + 1 < PIECES) request(v[(piece + 1) & 1], from, piece + 1);
      await(v[piece & 1], from, piece);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int f = piece * AT_ONCE + j, c = f % CHUNKS, n = f / CHUNKS;
        if (f >= VECTORS || n * 8 >= sequences) break;
        if (c == 0) sums.clear();
        add(sums, c, v[piece & 1][j]);
        if (c == CHUNKS - 1) leave(sums, partial, n);
      }
    }
  }

  __device__ __forceinline__ static void accumulate(float (&even)[4], float (&odd)[4],
                                                    const u32 (&a)[2][4], uint4 v) {
#if DTYPE <= 1
    mma(even, a[0], v.x, v.y);
    mma(odd, a[1], v.z, v.w);
#elif DTYPE == 2
    mma(even, a[0], to_tf32(v.x), to_tf32(v.y));
    mma(odd, a[1], to_tf32(v.z), to_tf32(v.w));
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

  // ---- v in shared memory
  __device__ __forceinline__ uint4 from_shared(int slot, int c, int n) const {
    return *reinterpret_cast<const uint4*>(vectors(slot) + (n * 8 + g) * VECTOR_ROW +
                                           k_of(c) * int(sizeof(Element)));
  }
  __device__ __forceinline__ Element* place(int slot, int s, int section, int unit) const {
    return reinterpret_cast<Element*>(vectors(slot) + s * VECTOR_ROW) + section * padded + unit;
  }
  // Both slots zero: what is never written must not disturb a sum.
  __device__ __forceinline__ void clear_vectors() const {
    for (int i = threadIdx.x; i < 2 * VECTOR_BYTES / 16; i += THREADS)
      reinterpret_cast<uint4*>(vectors(0))[i] = make_uint4(0, 0, 0, 0);
  }
  // v from memory: unpadded rows of `hidden` (only where INNER is 1)
  __device__ __forceinline__ void fill_vectors(int slot, const Element* rows) const {
    for (int i = threadIdx.x; i < sequences * hidden; i += THREADS)
      *place(slot, i / hidden, 0, i % hidden) = rows[i];
  }

  // ---- once all warps multiplied: bring the sums to the blocks that own the rows.
  // `count` numbers the products of this launch.
  __device__ __forceinline__ void collect(int count) {
    if (DIRECT) return;
    __syncthreads();
#if GRID && CLUSTER > 1
    const float* const sums = partial(count & 1);
    const int slot = count & 1;
    for (int i = threadIdx.x; i < ROWS * sequences; i += THREADS) {
      const int r = i % ROWS, s = i / ROWS, owner = r / OWN_ROWS;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < K_WARPS; ++k) sum += sums[(k * SEQUENCES + s) * PARTIAL_ROW + r];
      const u32 to =
          shared_address(received(slot) + (rank * SEQUENCES + s) * OWN_ROWS + r % OWN_ROWS);
      push(remote(to, owner), remote(barrier(slot), owner), sum);
    }
    Patience patience;
    while (!barrier_passed(barrier(slot), (count >> 1) & 1) && !give_up(patience)) {
    }
    acquire_pushed();
    // re-armed for the product after the next, whose sums cannot come before this block's next ones
    if (threadIdx.x == 0) barrier_expect(barrier(slot), expected_bytes());
#endif
  }

  // The finished rows of y of item i's unit.
  __device__ __forceinline__ void read_sums(int slot, int i, float (&sum)[OUTER]) const {
#pragma unroll
    for (int part = 0; part < OUTER; ++part)
      sum[part] = DIRECT ? finished[i / TILE_ITEMS % BATCH_TILES][i / TILE_ITEMS / BATCH_TILES]
                                   [OUTER == 1 ? i % 4 : part]
                         : 0.0f;
    if (DIRECT) return;
    constexpr int TERMS = OWNERS == 1 ? K_WARPS : OWNERS;
    constexpr int ROW = OWNERS == 1 ? PARTIAL_ROW : OWN_ROWS;
    const float* const first =
        (OWNERS == 1 ? partial(slot) : received(slot)) + sequence_of(i) * ROW + unit_of(i) * OUTER;
#pragma unroll
    for (int k = 0; k < TERMS; ++k) {
      const float* const at = first + k * SEQUENCES * ROW;
      if (OUTER == 4) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        sum[0] += four.x, sum[1 % OUTER] += four.y, sum[2 % OUTER] += four.z,
            sum[3 % OUTER] += four.w;
      } else {
#pragma unroll
        for (int part = 0; part < OUTER; ++part) sum[part] += at[part];
      }
    }
  }
  // With one buffer of partial sums: nobody may write it before all have read.
  __device__ __forceinline__ void release_sums() const {
    if (PARTIAL_BUFFERS == 1 && !DIRECT) __syncthreads();
  }

  // ---- publishing within a cluster. Push number `count` fills slot (count + 1) & 1 of the
  // vectors.
  __device__ __forceinline__ u32 expected_bytes() const {
    return GRID ? OWNERS * OWN_ROWS * sequences * 4
                : INNER * padded * sequences * int(sizeof(Element));
  }
  __device__ __forceinline__ void open_cluster() const {
#if CLUSTER > 1
    if (threadIdx.x == 0) {
      barrier_init(barrier(0)), barrier_init(barrier(1));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      barrier_expect(barrier(0), expected_bytes()), barrier_expect(barrier(1), expected_bytes());
    }
    cluster_sync();
#else
    __syncthreads();
#endif
  }
  // No block may leave while others still push to it: each awaits all pushes before. After a wait
  // was given up that does not hold, and the driver may report the late push itself.
  __device__ __forceinline__ void close_cluster() const {
#if CLUSTER > 1
    cluster_sync();
#endif
  }
  // Wait for push number `count`. In a cluster a phase of a barrier ends when every warp that has
  // units has pushed its share. So no warp can miss one: the same barrier's next phase lacks this
  // warp's own bytes. And whoever has seen a phase end may push into the slot read before it: all
  // have pushed since, which they do after their last read.
  __device__ __forceinline__ void await_vectors(int count) {
#if !GRID && CLUSTER > 1
    // a warp without units pushes nothing, and nobody would wait for it
    if (DIRECT && row_warp * ROW_TILES * TILE_UNITS >= min(UNITS, padded - unit0())) return;
    Patience patience;
    while (!barrier_passed(barrier(count & 1), (count >> 1) & 1) && !give_up(patience)) {
    }
    acquire_pushed();
#elif !GRID
    __syncthreads();
#endif
  }
  __device__ __forceinline__ void rearm_vectors(int count) const {
#if !GRID && CLUSTER > 1
    if (threadIdx.x == 0) barrier_expect(barrier(count & 1), expected_bytes());
#endif
  }
  // The values of item i of all lanes of a warp, which call it together.
  __device__ __forceinline__ void publish_shared(int count, int slot, int i,
                                                 const Element (&value)[INNER]) const {
#if !GRID
#if CLUSTER > 1
    __syncwarp();
#pragma unroll
    for (int p = 0; p < INNER; ++p) stage()[p * 32 + place_of_lane()] = value[p];
    __syncwarp();
    constexpr int PUSHES = 32 / TOGETHER * INNER * CLUSTER;
    const u32 to = lane % CLUSTER;  // 32 is a multiple of CLUSTER
    const u32 base = remote(shared_address(vectors(slot)), to);
    const u32 there = remote(barrier(count & 1), to);
    const int end = min(UNITS, padded - unit0());
#pragma unroll
    for (int x = 0; x < PUSHES; x += 32) {
      const int y = (x + lane) / CLUSTER, p = y % INNER, place = y / INNER * TOGETHER;
      const int unit = unit_at(i, place), s = sequence_at(i, place);
      if (x + lane < PUSHES && s < sequences && unit < end)
        push(base + s * VECTOR_ROW + (p * padded + unit0() + unit) * int(sizeof(Element)), there,
             *reinterpret_cast<const Pushed<TOGETHER>*>(stage() + p * 32 + place));
    }
#else
    if (has(i, padded))
#pragma unroll
      for (int p = 0; p < INNER; ++p) *place(slot, sequence_of(i), p, unit_of(i)) = value[p];
#endif
#endif
  }
};
