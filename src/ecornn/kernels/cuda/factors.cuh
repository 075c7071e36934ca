// What a step's gradients are multiplied with: the derivatives of its cell.
#pragma once
#include "biases.cuh"

struct Factors {
  float by_h[3], by_c[4];  // of the gradient of h, and of an LSTM's c or a GRU's candidate

  // `state`: an LSTM's c or a GRU's h that entered the step, a simple cell's h that left it
  __device__ __forceinline__ void find(const float (&pre)[PRE], float state) {
    if (CELL == 0) {
      const float in = sigmoid_once(pre[0]), forget = sigmoid(pre[1 % PRE]);
      const float candidate = tanh_of(pre[2 % PRE]), gate = sigmoid_once(pre[3 % PRE]);
      const float shown = tanh_of(forget * state + in * candidate);
      by_h[0] = gate * (1.0f - shown * shown);
      by_h[1] = shown * gate * (1.0f - gate);
      by_c[0] = candidate * in * (1.0f - in);
      by_c[1] = state * forget * (1.0f - forget);
      by_c[2] = in * (1.0f - candidate * candidate);
      by_c[3] = forget;
    } else if (CELL == 1) {
      const float reset = sigmoid_once(pre[0]), update = sigmoid(pre[1 % PRE]);
      const float inner = pre[3 % PRE];
      const float candidate = tanh_of(pre[2 % PRE] + reset * inner);
      by_h[0] = (1.0f - update) * (1.0f - candidate * candidate);
      by_h[1] = (state - candidate) * update * (1.0f - update);
      by_h[2] = update;
      by_c[0] = reset;
      by_c[1] = inner * reset * (1.0f - reset);
    } else {
      by_h[0] = CELL == 2 ? 1.0f - state * state : state > 0.0f ? 1.0f : 0.0f;
    }
  }
};
