// All that follows from the gates' gradients, in one launch: the gradients of the input, of both
// weights and of both biases. For layers so small that a launch takes longer than a product.
//
// A block makes a tile of TILE × TILE: of the weights' gradients, whose inner dimension, all steps
// and sequences, is shared by the CLUSTER blocks of a cluster; or of the input's gradient.
//
// CELL and DTYPE as in forward.cu. rows = steps · batch.
#define GRID 0
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#include "tiles.cuh"

constexpr int STORED = CELL <= 1 ? 4 : 1;
static_assert(sizeof(tiles) >= (TILE + 1) * TILE * sizeof(float),
              "partial sums stand in the tiles");

struct GradientArguments {
  const Element* d_gates;  // (rows, STORED · hidden)
  const Element* input;    // (rows, inputs)
  const Element* output;   // (rows, output_row)
  const Element* h0;       // (batch, hidden)
  const Element* w_ih;     // (GATES · hidden, inputs)
  Element* d_input;        // (rows, inputs) or null
  Element* d_w_ih;         // as the weights
  Element* d_w_hh;
  Element* d_b_ih;  // (GATES · hidden), both or neither null
  Element* d_b_hh;
  int rows, batch, hidden, inputs, output_row, reverse;
  int by_vectors;  // all rows begin at multiples of 16 bytes
};

// Rows of a matrix; those from `edge` on, `edges` of them, stand elsewhere.
struct Source {
  const Element* first;
  const Element* other;
  int length, other_length, edge, edges;
  __device__ __forceinline__ const Element* row(int k) const {
    if (k >= edge && k < edge + edges) return other + size_t(k - edge) * other_length;
    return first + ptrdiff_t(k) * length;
  }
};

// The sum over all blocks of the cluster of what stands at the same place in each.
__device__ __forceinline__ float sum_over_cluster(const float* at) {
#if CLUSTER > 1
  float sum = 0.0f;
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];"
                 : "=f"(v)
                 : "r"(remote(address_of(at), rank))
                 : "memory");
    sum += v;
  }
  return sum;
#else
  return *at;
#endif
}

__device__ __forceinline__ void weight_tile(const GradientArguments& a, int tile, int rank) {
  const int gates = GATES * a.hidden, row_tiles = (gates + TILE - 1) / TILE;
  const int input_tiles = (a.inputs + TILE - 1) / TILE;
  const int across = tile / row_tiles, m0 = tile % row_tiles * TILE;
  const bool of_state = across >= input_tiles;
  const int n0 = (of_state ? across - input_tiles : across) * TILE;
  const int columns = of_state ? a.hidden : a.inputs;
  // a GRU's gradients stand as (n before the reset gate, r, z, n)
  const Element* const d_gates = a.d_gates + (CELL == 1 && !of_state ? a.hidden : 0);
  const int stored = STORED * a.hidden;
  const Source input{a.input, nullptr, a.inputs, 0, 0, 0};
  const int shift = a.reverse ? a.batch : -a.batch;
  const Source state{a.output + ptrdiff_t(shift) * a.output_row, a.h0,   a.output_row, a.hidden,
                     a.reverse ? a.rows - a.batch : 0,           a.batch};
  const int pieces = (a.rows + DEPTH - 1) / DEPTH, own = (pieces + CLUSTER - 1) / CLUSTER * DEPTH;
  const int begin = rank * own, end = min(a.rows, begin + own);
  const bool with_bias = n0 == 0 && a.d_b_ih;
  Sums sums;
  float bias = 0.0f;
  multiply<true, true>(
      sums, begin, end,
      [&](Flying& left, Flying& right, int k) {
        left.take<TILE>([&](int r) { return d_gates + size_t(k + r) * stored; }, end - k, m0, gates,
                        a.by_vectors);
        right.take<TILE>([&](int r) { return of_state ? state.row(k + r) : input.row(k + r); },
                         end - k, n0, columns, a.by_vectors);
      },
      [&](const Element* left) {
        if (with_bias && threadIdx.x < TILE)
#pragma unroll
          for (int k = 0; k < DEPTH; ++k) bias += to_float(left[k * WIDE + threadIdx.x]);
      });
  float* const partial = reinterpret_cast<float*>(tiles);
  __syncthreads();
  sums.each([&](int m, int n, float sum) { partial[m * TILE + n] = sum; });
  if (threadIdx.x < TILE) partial[TILE * TILE + threadIdx.x] = bias;
  __syncthreads();
#if CLUSTER > 1
  cluster_sync();
#endif
  auto row_of = [&](int m) {  // a GRU's state gates back from (n, r, z)
    return CELL == 1 && of_state ? (m < a.hidden ? m + 2 * a.hidden : m - a.hidden) : m;
  };
  Element* const out = of_state ? a.d_w_hh : a.d_w_ih;
  constexpr int SHARE = TILE / CLUSTER;  // rows that a block finishes
  for (int i = threadIdx.x; i < SHARE * TILE; i += THREADS) {
    const int m = rank * SHARE + i / TILE, n = i % TILE;
    if (m0 + m < gates && n0 + n < columns)
      out[size_t(row_of(m0 + m)) * columns + n0 + n] =
          from_float(sum_over_cluster(partial + m * TILE + n));
  }
  if (with_bias && rank == 0 && threadIdx.x < TILE && m0 + threadIdx.x < gates)
    (of_state ? a.d_b_hh : a.d_b_ih)[row_of(m0 + threadIdx.x)] =
        from_float(sum_over_cluster(partial + TILE * TILE + threadIdx.x));
#if CLUSTER > 1
  cluster_sync();  // others read this block's sums
#endif
}

__device__ __forceinline__ void input_tile(const GradientArguments& a, int tile) {
  const int gates = GATES * a.hidden, input_tiles = (a.inputs + TILE - 1) / TILE;
  const int m0 = tile / input_tiles * TILE, n0 = tile % input_tiles * TILE;
  if (m0 >= a.rows) return;
  const Element* const d_gates = a.d_gates + (CELL == 1 ? a.hidden : 0);
  const int stored = STORED * a.hidden;
  Sums sums;
  multiply<false, true>(
      sums, 0, gates,
      [&](Flying& left, Flying& right, int k) {
        left.take<DEPTH>([&](int r) { return d_gates + size_t(m0 + r) * stored; }, a.rows - m0, k,
                         gates, a.by_vectors);
        right.take<TILE>([&](int r) { return a.w_ih + size_t(k + r) * a.inputs; }, gates - k, n0,
                         a.inputs, a.by_vectors);
      },
      [](const Element*) {});
  sums.each([&](int m, int n, float sum) {
    if (m0 + m < a.rows && n0 + n < a.inputs)
      a.d_input[size_t(m0 + m) * a.inputs + n0 + n] = from_float(sum);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gradients(const __grid_constant__ GradientArguments a) {
  const int row_tiles = (GATES * a.hidden + TILE - 1) / TILE;
  const int columns = (a.inputs + TILE - 1) / TILE + (a.hidden + TILE - 1) / TILE;
  const int weight_blocks = row_tiles * columns * CLUSTER;
  const int block = blockIdx.x;
  if (block < weight_blocks)
    weight_tile(a, block / CLUSTER, block % CLUSTER);
  else
    input_tile(a, block - weight_blocks);
}
