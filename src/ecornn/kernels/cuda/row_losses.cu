// The cross entropy of each row of scores, and in the scores' place its gradient by them.
//
// DTYPE as in forward.cu, without the last one. A block makes a row: it reads it once for the
// largest score and the sum of the exponentials, and once more, from L2 by then, for the gradient.
#define GRID 0
#define CLUSTER 1
#include "numbers.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffffu;

__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }  // -∞

struct RowLossArguments {
  Element* scores;          // (rows, width), rows of whole vectors
  const long long* target;  // (rows); below zero: the row does not count
  float* losses;            // (rows)
  int rows, width;
  int classes;  // of a row; what is beyond fills it up, with scores of -∞
  float smoothing, factor;
};

extern __shared__ __align__(16) u8 shared[];

#if DTYPE <= 1
__device__ __forceinline__ float exp_of(float x) { return exponential<1>(x); }
#else
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
#endif

union Vector {
  uint4 bits;
  Element each[VEC];
};

// Of some scores: the largest, and the sum of the exponentials of what each is below it.
struct Sums {
  float largest = nothing(), sum = 0.0f;

  __device__ __forceinline__ void add(const Vector& scores) {
    float x[VEC], top = largest;
#pragma unroll
    for (int i = 0; i < VEC; ++i) x[i] = to_float(scores.each[i]), top = fmaxf(top, x[i]);
    const float zero = level(top);
    sum *= exp_of(largest - zero);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += exp_of(x[i] - zero);
    largest = top;
  }
  // Where there is nothing but -∞ yet, differences from it would not be numbers.
  static __device__ __forceinline__ float level(float top) {
    return top == nothing() ? 0.0f : top;
  }
};

// Over a block; all threads have the result.
template <class Combine>
__device__ __forceinline__ float over_block(float mine, Combine combine) {
  static_assert(WARPS == 32, "each warp reads what all of them have found");
  float* const found = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) mine = combine(mine, __shfl_xor_sync(ALL, mine, mask));
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = found[threadIdx.x % 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) mine = combine(mine, __shfl_xor_sync(ALL, mine, mask));
  __syncthreads();  // the memory is used again
  return mine;
}
__device__ __forceinline__ float added_up(float mine) {
  return over_block(mine, [](float x, float y) { return x + y; });
}
__device__ __forceinline__ Sums over_block(const Sums& mine) {
  Sums all;
  all.largest = over_block(mine.largest, [](float x, float y) { return fmaxf(x, y); });
  all.sum = added_up(mine.sum * exp_of(mine.largest - Sums::level(all.largest)));
  return all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    row_losses(const __grid_constant__ RowLossArguments a) {
  const size_t row = blockIdx.x;
  uint4* const scores = reinterpret_cast<uint4*>(a.scores + row * a.width);
  const int vectors = a.width / VEC, target = int(a.target[row]);
  if (target < 0) {
    for (int i = threadIdx.x; i < vectors; i += THREADS) scores[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) a.losses[row] = 0.0f;
    return;
  }
  const float own = to_float(a.scores[row * a.width + target]);  // before it is overwritten
  Sums mine;
  for (int i = threadIdx.x; i < vectors; i += THREADS) mine.add(Vector{scores[i]});
  const Sums all = over_block(mine);
  const float log_sum = logf(all.sum), share = 1.0f / all.sum;
  const float even = a.smoothing / a.classes;
  float loss = (all.largest - own) + log_sum;
  // small where the model is right: a difference of rounded numbers would be none
  const float of_target = expm1f(-loss) + (a.smoothing - even);
  float below = 0.0f;
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    Vector vector{scores[i]};
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int v = i * VEC + j;
      const float x = to_float(vector.each[j]) - all.largest;
      const bool counts = v < a.classes;
      below += counts ? x : 0.0f;
      const float gradient = exp_of(x) * share - (counts ? even : 0.0f);
      vector.each[j] = from_float(a.factor * (v == target ? of_target : gradient));
    }
    scores[i] = vector.bits;
  }
  if (a.smoothing != 0.0f) {
    below = added_up(below);
    loss = (1.0f - a.smoothing) * loss + a.smoothing * (log_sum - below / a.classes);
  }
  if (threadIdx.x == 0) a.losses[row] = loss;
}
