// Products of small matrices, by blocks that make a tile of TILE × TILE each. For layers so small
// that a launch takes longer than a product.
#pragma once
#include "numbers.cuh"

constexpr int TILE = 64, DEPTH = 32, THREADS = 128;
// rows of shared memory are padded so that neither fragments nor columns of them meet in a bank
constexpr int WIDE = TILE + 8, NARROW = DEPTH + (sizeof(Element) == 2 ? 8 : 4);
constexpr int SIDE = DEPTH * WIDE > TILE* NARROW ? DEPTH * WIDE : TILE * NARROW;
constexpr int VECTORS = DEPTH * TILE / VEC / THREADS;  // that a thread loads of a tile

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
// 16 × 16 of the right factor, likewise: two fragments of 16 × 8
template <bool ACROSS>
__device__ __forceinline__ void right_fragments(u32 (&b)[4], const Element* tile, int k, int n) {
  const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
  const Element* const at = ACROSS ? tile + (k + second * 8 + low) * WIDE + n + third * 8
                                   : tile + (n + third * 8 + low) * NARROW + k + second * 8;
  load_matrices<ACROSS>(b, address_of(at));
}
#elif DTYPE == 4
template <bool ACROSS>
__device__ __forceinline__ Element at(const Element* tile, int outer, int inner) {
  return ACROSS ? tile[inner * WIDE + outer] : tile[outer * NARROW + inner];
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
template <bool ACROSS>
__device__ __forceinline__ void right_fragments(u32 (&b)[4], const Element* tile, int k, int n) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = n + g + i / 2 * 8, inner = k + q + i % 2 * 4;
    b[i] = ACROSS ? tile[inner * WIDE + column] : tile[column * NARROW + inner];
  }
}
#endif

#if DTYPE != 4
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
#endif

struct Sums {
  float of[2][4][4];  // a warp has 32 × 32 of the tile

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int i = 0; i < 32; ++i) (&of[0][0][0])[i] = 0.0f;
  }
  template <bool LEFT_ACROSS, bool RIGHT_ACROSS>
  __device__ __forceinline__ void add(const Element* left, const Element* right) {
    const int warp = threadIdx.x / 32, m = warp / 2 * 32, n = warp % 2 * 32;
#if DTYPE == 4
    // each lane its own sums, where tensor cores would leave them: see `each`
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll 8
    for (int k = 0; k < DEPTH; ++k) {
      float a[4], b[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = to_float(at<LEFT_ACROSS>(left, m + i * 8 + g, k));
#pragma unroll
      for (int j = 0; j < 8; ++j)
        b[j] = to_float(at<RIGHT_ACROSS>(right, n + j / 2 * 8 + q * 2 + j % 2, k));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float& sum = of[i / 2][j / 2][i % 2 * 2 + j % 2];
          sum = fmaf(a[i], b[j], sum);
        }
    }
#else
#pragma unroll
    for (int k = 0; k < DEPTH; k += STEP) {
      u32 a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        left_fragment<LEFT_ACROSS>(a[i], left, m + i * 16, k);
        right_fragments<RIGHT_ACROSS>(b[i], right, k, n + i * 16);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          add_product(of[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
#endif
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

__shared__ __align__(16) Element tiles[4 * SIDE];  // two of each factor

// Inner elements [begin, end), DEPTH at a time, the next ones under way while these are multiplied.
// take(left, right, k) loads them; seen(left) is called with each left tile. A factor lies ACROSS
// where its rows are inner elements.
template <bool LEFT_ACROSS, bool RIGHT_ACROSS, class Take, class Seen>
__device__ __forceinline__ void multiply(Sums& sums, int begin, int end, Take take, Seen seen) {
  Flying left, right;
  if (begin < end) take(left, right, begin);
  int slot = 0;
  for (int k = begin; k < end; k += DEPTH, slot ^= 1) {
    Element* const a = tiles + slot * 2 * SIDE;
    Element* const b = a + SIDE;
    left.put<LEFT_ACROSS ? TILE : DEPTH, LEFT_ACROSS ? WIDE : NARROW>(a);
    right.put<RIGHT_ACROSS ? TILE : DEPTH, RIGHT_ACROSS ? WIDE : NARROW>(b);
    __syncthreads();
    if (k + DEPTH < end) take(left, right, k + DEPTH);
    sums.add<LEFT_ACROSS, RIGHT_ACROSS>(a, b);
    seen(a);
  }
}
