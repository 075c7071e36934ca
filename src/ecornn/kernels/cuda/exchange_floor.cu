// The exchange of a forward pass and nothing else: at every step each block publishes its slice of
// h and reads all of h, by the very loop of forward.cu. What this takes is the floor under any
// forward pass.
#define BACKWARD 0
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#define OUTER GATES
#define INNER 1
#define PARTS GATES  // as forward.cu has them, for the same shared memory
#include "product.cuh"

struct FloorArguments {
  Exchanged*
      exchange;  // (steps, batch, padded hidden): marked before, where blocks exchange through L2
  u32* seen;     // (blocks): keeps the reads from being left out
  int* failed;
  int steps, batch, hidden, group_batch;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    exchange_floor(const __grid_constant__ FloorArguments a) {
  const int unit0 = blockIdx.x * UNITS, first = blockIdx.y * a.group_batch;
  const int sequences = min(a.group_batch, a.batch - first);
  if (sequences <= 0) return;
  Product product(a.hidden, sequences, a.failed);
  if (!GRID) product.clear_vectors();
  product.open_cluster();
  u32 folded = 0;
  for (int local = 0; local < a.steps; ++local) {
    if (local > 0 && GRID) {
      const Published from{a.exchange + (size_t(local - 1) * a.batch + first) * product.padded,
                           product.padded};
      product.each_published(from, [&](int, const uint4(&v)[AT_ONCE]) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) folded ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
      });
    } else if (local > 0) {
      product.await_vectors(local - 1);
#pragma unroll
      for (int n = 0; n < BATCH_TILES; ++n)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          const uint4 v = product.from_shared(local & 1, c, n);
          folded ^= v.x ^ v.y ^ v.z ^ v.w;
        }
    }
    if (!DIRECT) __syncthreads();  // as forward.cu has it
    if (local > 0) product.rearm_vectors(local - 1);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (product.warp_sequence(i) >= sequences) continue;
      const int unit = unit0 + product.unit_of(i), s = product.sequence_of(i);
      const Element bits[1] = {Element((folded & 1) + local % 256)};
      if (!GRID)
        product.publish_shared(local, (local + 1) & 1, i, bits);
      else if (product.has(i, product.padded - unit0))
        store_relaxed(a.exchange + (size_t(local) * a.batch + first + s) * product.padded + unit,
                      Exchanged(bits[0]));
    }
    product.note_publication();
  }
  if (!GRID) product.await_vectors(a.steps - 1);
  if (threadIdx.x == 0) a.seen[blockIdx.y * gridDim.x + blockIdx.x] = folded;
  product.close_cluster();
}
