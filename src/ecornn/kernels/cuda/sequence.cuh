// Where a sequence begins, ends and is cut: what `lengths` and `resets` mean at a time step.
#pragma once
#include "numbers.cuh"

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
