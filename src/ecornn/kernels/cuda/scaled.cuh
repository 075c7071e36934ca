// Float32 that tensor cores multiply as float16: DTYPE 5.
//
// TF32 and float16 have the same ten bits after the first; what float16 lacks is exponents. So all
// factors are multiplied by a power of two first, and the sums, in float32, divided by both. States
// of an LSTM or a tanh cell lie within (-1, 1) and are published 2^15 times as large, weights are
// kept 2^10 times as large: what is beyond 2^-29 and 2^-24 is rounded as TF32 rounds it, and what is
// not loses 2^-40 and 2^-35 at most. Half as many bytes are kept on chip, exchanged and read, and a
// product of tensor cores takes twice as many.
//
// Initial states may be larger, and so may weights. Where one would become an infinity, they are
// taken once more, 16 times smaller, but not below 2^-9 and 2^-6 times as large: others share the
// scale, and lose 2^-16 of a state and 2^-19 of a weight at most. What is too large even so counts
// as 3.3e7 or 4.2e6: sums that it is part of are as large, but not right.
// That is found when they are read: of a warp's weights, and of the states that it gathers for
// itself, by the warp; of states in shared memory by the block. A GRU's states stay within 1 or the
// largest initial one, so that its blocks publish them by what they have all found of these.
#pragma once
#include "numbers.cuh"

#if DTYPE == 5
static_assert(!BACKWARD, "gradients may be of any size at every step");
static_assert(CELL <= 2, "states must have a bound");
static_assert(CELL != 1 || !GRID || CLUSTER == 1,
              "a block must find the bound of all units' states");
static_assert(!STAGED_BYTES, "weights must be converted on their way");

constexpr float STATES_BY = 32768.0f, WEIGHTS_BY = 1024.0f, LESS = 1.0f / 16.0f;
constexpr float LEAST_STATES_BY = 0x1p-9f, LEAST_WEIGHTS_BY = 0x1p-6f;
constexpr float MOST = 65504.0f;  // float16's

__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// What powers of two become one over.
__device__ __forceinline__ float inverse(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}

// Whether a value became an infinity, which was none.
__device__ __forceinline__ bool is_beyond(float scaled, Element bits) {
  return !(fabsf(scaled) <= MOST) && (bits & ~0u >> 1) < 0x7f800000u;
}

// Values of any size on their way to float16.
struct Scaling {
  float by, least;
  bool too_large;

  __device__ __forceinline__ void begin(float first, float last) {
    by = first, least = last, too_large = false;
  }
  __device__ __forceinline__ float scaled(Element bits) {
    const float y = __uint_as_float(bits) * by;
    const bool beyond = is_beyond(y, bits);
    too_large |= beyond;
    return beyond ? copysignf(MOST, y) : y;
  }
  __device__ __forceinline__ Exchanged one(Element bits) {
    return Exchanged(two_halves(scaled(bits), 0.0f));
  }
  // VEC elements of a row of which so many are left, zeros for the others. `whole`: all or none.
  __device__ __forceinline__ uint4 read(const Element* from, int left, bool whole) {
    Element each[VEC];
    if (whole) {
      const uint4* const two = reinterpret_cast<const uint4*>(from);
      const uint4 none = make_uint4(0, 0, 0, 0);
      const uint4 low = left > 0 ? __ldg(two) : none, high = left > 0 ? __ldg(two + 1) : none;
      each[0] = low.x, each[1] = low.y, each[2] = low.z, each[3] = low.w;
      each[4] = high.x, each[5] = high.y, each[6] = high.z, each[7] = high.w;
    } else {
#pragma unroll
      for (int e = 0; e < VEC; ++e) each[e] = e < left ? __ldg(from + e) : Element(0);
    }
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = scaled(each[2 * i]), high = scaled(each[2 * i + 1]);
      pairs[i] = two_halves(low, high);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  // Whether all must be read again, smaller: as one lane of the warp, or one thread of the block,
  // has found.
  __device__ __forceinline__ bool again_by_warp() { return again(__any_sync(~0u, too_large)); }
  __device__ __forceinline__ bool again_by_block() { return again(__syncthreads_or(too_large)); }

 private:
  __device__ __forceinline__ bool again(bool found) {
    const bool can = found && by > least;
    too_large = false;
    if (can) by *= LESS;
    return can;
  }
};
#endif
