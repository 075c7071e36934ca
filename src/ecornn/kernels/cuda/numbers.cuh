// The element types, their products on tensor cores, and the activations.
//
// DTYPE 0 bfloat16, 1 float16, 2 float32 multiplied as TF32, 3 float32 by three TF32 products, 4
// float32 multiplied as IEEE has it, which tensor cores cannot: see columns.cuh and tiles.cuh, 5
// float32 multiplied as float16: see scaled.cuh.
#pragma once
#include "exchange.cuh"

#if DTYPE <= 1
using Element = u16;
#else
using Element = u32;
#endif

constexpr int VEC = 16 / sizeof(Exchanged);     // of one 16-byte load
constexpr int ELEMENTS = 16 / sizeof(Element);  // likewise
constexpr int CHUNK = 4 * VEC;  // inner elements the four lanes of a row load at once

#if DTYPE == 0
#define MMA_SHAPE "m16n8k16"
#define MMA_TYPE "bf16"
__device__ __forceinline__ float to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
__device__ __forceinline__ u16 from_float(float x) {
  u32 pair;  // of two, because the instruction for one is the slower
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  return u16(pair);
}
#elif DTYPE == 1
#define MMA_SHAPE "m16n8k16"
#define MMA_TYPE "f16"
__device__ __forceinline__ float to_float(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ u16 from_float(float x) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  return u16(pair);
}
#else
#if DTYPE == 5
#define MMA_SHAPE "m16n8k16"
#define MMA_TYPE "f16"
#else
#define MMA_SHAPE "m16n8k8"
#define MMA_TYPE "tf32"
#endif
__device__ __forceinline__ float to_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 from_float(float x) { return __float_as_uint(x); }
#endif

#if DTYPE >= 2
// With three products, volatile: were it moved out of the loop over time, the weights' two parts
// would take twice the registers there are.
#if DTYPE == 3
#define ROUNDING asm volatile
#else
#define ROUNDING asm
#endif
__device__ __forceinline__ u32 to_tf32(u32 bits) {
  u32 rounded;
  ROUNDING("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}
// What rounding to TF32 lost, itself as TF32.
__device__ __forceinline__ u32 tf32_rest(u32 bits) {
  return to_tf32(__float_as_uint(__uint_as_float(bits) - __uint_as_float(to_tf32(bits))));
}
#endif

// Whether one of the values is still the mark.
struct Marks {
  u32 found = 0;
#if HALVES
  // A half of x that is all ones is a half of ~x that is zero: taking one from it borrows into its
  // highest bit, which x has. Two instructions a word; those that compare halves are emulated.
  __device__ __forceinline__ void look(u32 x) { found |= (0xfffefffeu - x) & x; }
  __device__ __forceinline__ bool any() const { return found & 0x80008000u; }
#else
  __device__ __forceinline__ void look(u32 x) { found = max(found, x); }
  __device__ __forceinline__ bool any() const { return found == ~0u; }  // the largest number
#endif
  __device__ __forceinline__ void look(uint4 v) {
    // by itself first: one chain through many vectors would be waited for
    Marks own;
    own.look(v.x), own.look(v.y), own.look(v.z), own.look(v.w);
    found = HALVES ? found | own.found : max(found, own.found);
  }
};
__device__ __forceinline__ bool has_mark(uint4 v) {
  Marks marks;
  marks.look(v);
  return marks.any();
}

// c[16×8] += a · b, over 16 half-precision or 8 TF32 inner elements
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned." MMA_SHAPE ".row.col.f32." MMA_TYPE "." MMA_TYPE
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// exp(scale · x) by the hardware's power of two. What it flushes to zero would be lost beside 1, to
// which it is added; __expf saves it by three more instructions.
template <int SCALE>
__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * (SCALE * 1.44269504f)));
  return y;
}

// By the fast exponential and division; a NaN stays one.
__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + exponential<-1>(x));
}

#if DTYPE == 0
// The hardware's tanh errs by 2^-11 at most, half of what rounding to bfloat16 does.
__device__ __forceinline__ float tanh_of(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// For gates that are used once. What a state is multiplied with at every step needs the exact one:
// a forget gate near 1 that is off by 2^-12 would lose a memory in some thousand steps.
__device__ __forceinline__ float sigmoid_once(float x) { return 0.5f + 0.5f * tanh_of(0.5f * x); }
#else
__device__ __forceinline__ float tanh_of(float x) {
  const float far = 1.0f - __fdividef(2.0f, 1.0f + exponential<2>(x));
#if DTYPE >= 2
  // that is 1e-7 off everywhere, which near zero is much of the value; both are computed and one is
  // chosen, because lanes would part at a branch
  const float square = x * x;
  float series = fmaf(square, 0.0218694885f, -0.0539682540f);
  series = fmaf(square, series, 0.133333333f);
  series = fmaf(square, series, -0.333333333f);
  const float near = fmaf(x * square, series, x);
  return square < 0.0625f ? near : far;
#else
  return far;
#endif
}
__device__ __forceinline__ float sigmoid_once(float x) { return sigmoid(x); }
#endif
