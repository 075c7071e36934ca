// The input's share of the gates, gates = input · w_ihᵀ, for small layers.
//
// DTYPE as in forward.cu. A block makes a tile; blocks lie along the gates first.
#define GRID 0
#define CELL 0
#define CLUSTER 1
#include "launches.cuh"
#include "tiles.cuh"

struct ShareArguments {
  const Element* input;  // (rows, inputs)
  const Element* w_ih;   // (gates, inputs)
  Element* shares;       // (rows, gates)
  int rows, gates, inputs;
  int by_vectors;  // all rows begin at multiples of 16 bytes
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    shares(const __grid_constant__ ShareArguments a) {
  let_next_launch_begin();  // it loads its weights meanwhile
  const int gate_tiles = (a.gates + TILE - 1) / TILE;
  const int m0 = blockIdx.x / gate_tiles * TILE, n0 = blockIdx.x % gate_tiles * TILE;
  Sums sums;
  multiply<false, false>(
      sums, 0, a.inputs,
      [&](Flying& left, Flying& right, int k) {
        left.take<DEPTH>([&](int r) { return a.input + size_t(m0 + r) * a.inputs; }, a.rows - m0, k,
                         a.inputs, a.by_vectors);
        right.take<DEPTH>([&](int r) { return a.w_ih + size_t(n0 + r) * a.inputs; }, a.gates - n0,
                          k, a.inputs, a.by_vectors);
      },
      [](const Element*) {});
  sums.each([&](int m, int n, float sum) {
    if (m0 + m < a.rows && n0 + n < a.gates)
      a.shares[size_t(m0 + m) * a.gates + n0 + n] = from_float(sum);
  });
}
