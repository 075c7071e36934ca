// Time: the rows of a step, and where a sequence begins, ends and is cut: what `lengths` and
// `resets` mean.
#pragma once
#include "numbers.cuh"

// One step's rows of a tensor, a row for each sequence; `move` goes on to the next step.
template <class T>
struct Rows {
  T* first;
  int length, step;  // a step's elements are fewer than 2^31; the host sees to it
  int there;         // whether the tensor is: it may be null

  // `row` is the first of the first step's rows
  __device__ __forceinline__ Rows(T* tensor, size_t row, int length, int rows_a_step)
      : first(tensor + row * length),
        length(length),
        step(rows_a_step * length),
        there(tensor != nullptr) {
    // otherwise the compiler keeps what these are made of, in more registers, and makes them anew
    // at every step
    asm("" : "+r"(step), "+r"(there));
  }
  __device__ __forceinline__ T* at(int sequence, int unit) const {
    return first + u32(sequence * length + unit);
  }
  __device__ __forceinline__ T* before() const { return first - step; }
  // `at` that many steps later
  __device__ __forceinline__ T* later(int steps, int sequence, int unit) const {
    return at(sequence, unit) + steps * size_t(step);
  }
  __device__ __forceinline__ void move() { first += step; }
};

enum Flags { RESET_TO_INITIAL = 1, FROZEN_AFTER_END = 2 };

struct Times {
  int total, reverse;
  const u8* resets;  // (total, batch) or null
  int batch;

  // A reset is a boundary before its step that neither direction crosses: the reverse direction is
  // cut where it enters the step before. Beyond a sequence's end there are no resets.
  __device__ __forceinline__ bool cut(int t, int sequence, int length) const {
    if (!resets) return false;
    const int boundary = t + reverse;
    return boundary < length && resets[size_t(boundary) * batch + sequence];
  }
};

__device__ __forceinline__ int length_of(const long long* lengths, int sequence, int total) {
  // in a captured graph nobody checks them; one beyond the end counts as the end
  return lengths ? int(min(max(lengths[sequence], 0ll), static_cast<long long>(total))) : total;
}
