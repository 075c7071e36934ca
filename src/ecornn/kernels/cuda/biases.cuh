// Pre-activations of a unit, and the biases in them.
#pragma once
#include "numbers.cuh"

// A GRU's candidate has two shares, the input's and the state's, with the reset gate between them.
constexpr int PRE = CELL == 1 ? 4 : GATES;

// b_ih and b_hh point at the unit's first bias; gates lie `hidden` apart.
__device__ __forceinline__ void add_biases(float (&bias)[PRE], const Element* b_ih,
                                           const Element* b_hh, int hidden) {
#pragma unroll
  for (int gate = 0; gate < GATES; ++gate) {
    const float input = to_float(b_ih[gate * hidden]), state = to_float(b_hh[gate * hidden]);
    if (CELL == 1 && gate == 2)
      bias[2 % PRE] = input, bias[3 % PRE] = state;
    else
      bias[gate] = input + state;
  }
}
