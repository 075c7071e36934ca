// All that follows from the gates' gradients, in one launch: the gradients of the input, of both
// weights and of both biases. For layers so small that a launch takes longer than a product.
//
// A block makes a tile of TILE × TILE: of the weights' gradients, whose inner dimension, all steps
// and sequences, is shared by the SPLIT blocks of a cluster; or of the input's gradient.
//
// CELL and DTYPE as in forward.cu. rows = steps · batch.
#define GRID 0
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#include "numbers.cuh"

constexpr int TILE = 64, DEPTH = 32, THREADS = 128;
constexpr int STORED = CELL <= 1 ? 4 : 1;
// rows of shared memory are padded so that neither fragments nor columns of them meet in a bank
constexpr int WIDE = TILE + 8, NARROW = DEPTH + (sizeof(Element) == 2 ? 8 : 4);
constexpr int LEFT = DEPTH * WIDE > TILE* NARROW ? DEPTH * WIDE : TILE * NARROW;
constexpr int RIGHT = DEPTH * WIDE;
constexpr int VECTORS = DEPTH * TILE / VEC / THREADS;  // that a thread loads of a tile

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

__device__ __forceinline__ uint4 load(const Element* row, int column, int end, bool by_vectors) {
  if (by_vectors && column + VEC <= end) return __ldg(reinterpret_cast<const uint4*>(row + column));
  union {
    uint4 all;
    Element each[VEC];
  } v;
#pragma unroll
  for (int e = 0; e < VEC; ++e) v.each[e] = column + e < end ? __ldg(row + column + e) : Element(0);
  return v.all;
}

// A tile in flight from memory to shared memory.
struct Flying {
  uint4 v[VECTORS];
  // `across` values side by side in each row of the tile
  template <int ACROSS, class Row>
  __device__ __forceinline__ void take(Row row, int rows, int column, int end, bool by_vectors) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = (threadIdx.x + i * THREADS) * VEC, r = at / ACROSS, c = at % ACROSS;
      v[i] = r < rows && column + c < end ? load(row(r), column + c, end, by_vectors)
                                          : make_uint4(0, 0, 0, 0);
    }
  }
  template <int ACROSS, int ROW>
  __device__ __forceinline__ void put(Element* tile) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = (threadIdx.x + i * THREADS) * VEC;
      *reinterpret_cast<uint4*>(tile + at / ACROSS * ROW + at % ACROSS) = v[i];
    }
  }
};

__device__ __forceinline__ u32 address_of(const void* p) {
  return u32(__cvta_generic_to_shared(p));
}

#if DTYPE <= 1
constexpr int STEP = 16;  // inner elements of a product
template <bool ACROSS>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
  if (ACROSS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
// 16 × 16 of the left factor: from [inner][outer] (ACROSS) or [outer][inner]
template <bool ACROSS>
__device__ __forceinline__ void left_fragment(u32 (&a)[4], const Element* tile, int m, int k) {
  const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
  // the four 8 × 8 parts in the order (m, k): (0, 0), (8, 0), (0, 8), (8, 8)
  const Element* const at = ACROSS ? tile + (k + third * 8 + low) * WIDE + m + second * 8
                                   : tile + (m + second * 8 + low) * NARROW + k + third * 8;
  load_matrices<ACROSS>(a, address_of(at));
}
// 16 × 16 of the right factor, [inner][outer]: two fragments of 16 × 8
__device__ __forceinline__ void right_fragments(u32 (&b)[4], const Element* tile, int k, int n) {
  const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
  load_matrices<true>(b, address_of(tile + (k + second * 8 + low) * WIDE + n + third * 8));
}
#else
constexpr int STEP = 8;
template <bool ACROSS>
__device__ __forceinline__ void left_fragment(u32 (&a)[4], const Element* tile, int m, int k) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = m + g + i % 2 * 8, inner = k + q + i / 2 * 4;
    a[i] = ACROSS ? tile[inner * WIDE + row] : tile[row * NARROW + inner];
  }
}
__device__ __forceinline__ void right_fragments(u32 (&b)[4], const Element* tile, int k, int n) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = tile[(k + q + i % 2 * 4) * WIDE + n + i / 2 * 8 + g];
}
#endif

__device__ __forceinline__ void add_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE <= 1
  mma(c, a, b0, b1);
#else
  u32 high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) high[i] = to_tf32(a[i]);
#if DTYPE == 3
  u32 rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rest[i] = tf32_rest(a[i]);
  mma(c, rest, to_tf32(b0), to_tf32(b1));
  mma(c, high, tf32_rest(b0), tf32_rest(b1));
#endif
  mma(c, high, to_tf32(b0), to_tf32(b1));
#endif
}

struct Sums {
  float of[2][4][4];  // a warp has 32 × 32 of the tile

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int i = 0; i < 32; ++i) (&of[0][0][0])[i] = 0.0f;
  }
  template <bool ACROSS>
  __device__ __forceinline__ void add(const Element* left, const Element* right) {
    const int warp = threadIdx.x / 32, m = warp / 2 * 32, n = warp % 2 * 32;
#pragma unroll
    for (int k = 0; k < DEPTH; k += STEP) {
      u32 a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        left_fragment<ACROSS>(a[i], left, m + i * 16, k);
        right_fragments(b[i], right, k, n + i * 16);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          add_product(of[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
  // give(row, column, value) for each of this thread's sums
  template <class Give>
  __device__ __forceinline__ void each(Give give) const {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int x = 0; x < 4; ++x)
          give(warp / 2 * 32 + i * 16 + x / 2 * 8 + g, warp % 2 * 32 + j * 8 + q * 2 + x % 2,
               of[i][j][x]);
  }
};

__shared__ __align__(16) Element tiles[2 * (LEFT + RIGHT)];
static_assert(sizeof(tiles) >= (TILE + 1) * TILE * sizeof(float),
              "partial sums stand in the tiles");

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

// Inner elements [begin, end), DEPTH at a time, the next ones under way while these are multiplied.
// take(left, right, k) loads them; seen(left) is called with each left tile.
template <bool ACROSS, class Take, class Seen>
__device__ __forceinline__ void multiply(Sums& sums, int begin, int end, Take take, Seen seen) {
  constexpr int LEFT_ACROSS = ACROSS ? TILE : DEPTH, LEFT_ROW = ACROSS ? WIDE : NARROW;
  Flying left, right;
  if (begin < end) take(left, right, begin);
  int slot = 0;
  for (int k = begin; k < end; k += DEPTH, slot ^= 1) {
    Element* const a = tiles + slot * (LEFT + RIGHT);
    Element* const b = a + LEFT;
    left.put<LEFT_ACROSS, LEFT_ROW>(a), right.put<TILE, WIDE>(b);
    __syncthreads();
    if (k + DEPTH < end) take(left, right, k + DEPTH);
    sums.add<ACROSS>(a, b);
    seen(a);
  }
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
  multiply<true>(
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
  multiply<false>(
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
