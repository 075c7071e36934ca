// y = W · v at every step, W on chip for all of them, v exchanged between blocks.
//
// v has INNER sections of `hidden` values, each padded to a multiple of VEC. Forwards a unit has
// one row of y for each gate and v is h; backwards a unit has one row, and v holds the gradients of
// all gates.
//
// Warps share the rows (ROW_WARPS) and the inner dimension (K_WARPS); the partial sums of the
// latter meet in shared memory. A warp holds ROW_TILES × CHUNKS tiles of weights, the first
// REGISTER_TILES rows of tiles and REGISTER_CHUNKS of the next one in registers, the others in
// shared memory.
//
// GRID 1: all blocks of the launch exchange v through L2; a cluster shares the inner dimension
//         further, each block of it multiplying the rows of all (OWNERS), and partial sums go to
//         the block that owns the row.
// GRID 0: only the blocks of one cluster exchange v, through distributed shared memory.
#pragma once
#include "multiply.cuh"
#include "sequence.cuh"

// What is pushed at once: so many elements of a row of v.
template <int COUNT>
using Pushed = typename Bytes<COUNT* int(sizeof(Exchanged))>::Type;

struct Product : Multiplier {
  using Multiplier::Multiplier;

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
    // re-armed for the product after the next, whose sums cannot come before this block's next ones
    if (threadIdx.x == 0) barrier_expect(barrier(slot), expected_bytes());
#endif
  }

  // The finished rows of y of item i's unit.
  __device__ __forceinline__ void read_sums(int slot, int i, float (&sum)[OUTER]) const {
#pragma unroll
    for (int part = 0; part < OUTER; ++part) {
      sum[part] = 0.0f;
      if (DEALT) sum[part] = finished[i % BATCH_TILES][i / BATCH_TILES % ROW_TILES][part];
      if (DIRECT && !DEALT && !REPEATED)
        sum[part] = in_sheet(i / 2 / BATCH_TILES, i / 2 % BATCH_TILES, i % 2, part);
      if (REPEATED) {
        const bool second = q % 2;
        sum[part] = second ? in_sheet(2 * i + 1, 0, 0, part) : in_sheet(2 * i, 0, 0, part);
        if (WIDTH == 2 && q >= 2)
          sum[part] = second ? in_sheet(2 * i + 1, 0, 1, part) : in_sheet(2 * i, 0, 1, part);
      }
    }
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
  // A sum of this lane's unit in a sheet, in the even or the odd one of its columns.
  __device__ __forceinline__ float in_sheet(int sheet, int n, int odd, int part) const {
    const int eight = (OUTER == 1 ? sheet : sheet * 4 + part) % (ROW_TILES * 2);  // rows
    return finished[n][eight / 2][eight % 2 * 2 + odd];
  }
  // With one buffer of partial sums: nobody may write it before all have read.
  __device__ __forceinline__ void release_sums() const {
    if (PARTIAL_BUFFERS == 1 && !DIRECT) __syncthreads();
  }

  // ---- publishing through L2. Marks, with all that is read and written since they were, may be more
  // than L2 holds: those of this block's units, some steps from now, are asked for before anybody
  // waits for them. At 1024 × 16 in float16 a training step was 6 % shorter for it backwards;
  // forwards a layer of 512 × 64 takes 7 % less, and one of few sequences up to 2 % more
  // (MARKS_AHEAD).
  __device__ __forceinline__ void prefetch_marks(const Rows<Exchanged>& exchange, int steps) const {
    constexpr int SECTOR = 32 / int(sizeof(Exchanged));  // that L2 has together
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (unit_of(i) % SECTOR == 0 && has(i, padded - unit0()))
#pragma unroll
        for (int p = 0; p < INNER; ++p)
          prefetch(exchange.later(steps, sequence_of(i), unit0() + unit_of(i)) + p * padded);
  }

  // ---- publishing within a cluster. Push number `count` fills slot (count + 1) & 1 of the
  // vectors.
  __device__ __forceinline__ u32 expected_bytes() const {
    return GRID ? OWNERS * OWN_ROWS * sequences * 4
                : INNER * padded * sequences * int(sizeof(Exchanged));
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
    for (int p = 0; p < INNER; ++p) stage()[p * 32 + place_of_lane()] = pushed(value[p]);
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
        push(base + s * VECTOR_ROW + (p * padded + unit0() + unit) * int(sizeof(Exchanged)), there,
             *reinterpret_cast<const Pushed<TOGETHER>*>(stage() + p * 32 + place));
    }
#else
    if (has(i, hidden))  // the padding was cleared before
#pragma unroll
      for (int p = 0; p < INNER; ++p)
        *place(slot, sequence_of(i), p, unit_of(i)) = pushed(value[p]);
#endif
#endif
  }
};
