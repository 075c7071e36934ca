// One recurrent layer forwards, its recurrent weights in registers for all time steps.
//
// A block owns UNITS hidden units and keeps their rows of w_hh; its warps share the inner dimension
// K = hidden. At each step a warp reads the part of h it multiplies straight from the output of the
// step before, as it arrives, multiplies on tensor cores, and the warps' partial sums meet in shared
// memory, where one thread a (unit, sequence) does the cell and publishes h. The batch may be split
// over groups of blocks, each with all the weights: blockIdx.y is the group.
//
// Compile-time constants:
//   CELL         0 lstm, 1 gru, 2 tanh, 3 relu
//   DTYPE        0 bfloat16, 1 float16
//   UNITS        hidden units a block owns, a multiple of 8
//   CHUNKS       pieces of 32 along K that a warp owns
//   BATCH_TILES  tiles of 8 sequences that a group has
//   WARPS        warps of a block
//
// The inner dimension is permuted within each piece of 32, in weights and states alike, so that the
// eight values a lane needs for two products lie side by side: one 16-byte load feeds both.
#include "numbers.cuh"

constexpr int GATES = CELL == 0 ? 4 : CELL == 1 ? 3 : 1;
constexpr int ROWS = UNITS * GATES;
constexpr int ROW_TILES = (ROWS + 15) / 16;
constexpr int SEQUENCES = BATCH_TILES * 8;
constexpr int THREADS = WARPS * 32;
constexpr int ITEMS = (UNITS * SEQUENCES + THREADS - 1) / THREADS;

struct Arguments {
  const u16* gates;    // (steps, batch, GATES · hidden): the input's share, biases included
  const u16* w_hh;     // (GATES · hidden, hidden)
  const u16* b_hn;     // (hidden) or null: a GRU's bias inside the reset gate
  const u16* h0;       // (batch, hidden)
  const float* c0;     // (batch, hidden) or null
  u16* output;         // (steps, batch, row): marked before the launch
  u16* cells;          // (steps, batch, hidden) or null
  float* c_n;          // (batch, hidden) or null
  int* failed;         // set if a wait was given up
  int steps, batch, hidden, row, group_batch, reverse;
};

extern __shared__ float partial[];  // [2][WARPS][ROW_TILES · 16][SEQUENCES]

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    persistent_forward(const u16* gates, const u16* w_hh, const u16* b_hn, const u16* h0,
                       const float* c0, u16* output, u16* cells, float* c_n, int* failed, int steps,
                       int batch, int hidden, int row, int group_batch, int reverse) {
  const Arguments a{gates, w_hh,   b_hn,  h0,     c0,  output,      cells,  c_n,
                    failed, steps, batch, hidden, row, group_batch, reverse};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int unit0 = blockIdx.x * UNITS;
  const int first = blockIdx.y * a.group_batch;
  const int sequences = min(a.group_batch, a.batch - first);
  const int k0 = warp * CHUNKS * 32 + q * 8;

  u32 w[ROW_TILES][CHUNKS][2][4];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = m * 16 + half * 8 + g, unit = unit0 + r % UNITS, k = k0 + c * 32;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (r < ROWS && unit < a.hidden && k < a.hidden)
          v = *reinterpret_cast<const uint4*>(
              a.w_hh + (size_t(r / UNITS) * a.hidden + unit) * a.hidden + k);
        w[m][c][0][half] = v.x, w[m][c][0][2 + half] = v.y;
        w[m][c][1][half] = v.z, w[m][c][1][2 + half] = v.w;
      }

  float cell[ITEMS], h_last[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = threadIdx.x + i * THREADS, unit = unit0 + item % UNITS, s = item / UNITS;
    const bool mine = s < sequences && unit < a.hidden;
    const size_t at = size_t(first + s) * a.hidden + unit;
    cell[i] = mine && a.c0 ? a.c0[at] : 0.0f;
    h_last[i] = mine && CELL == 1 ? to_float(a.h0[at]) : 0.0f;
  }

  bool given_up = false;
  for (int step = 0; step < a.steps; ++step) {
    const int t = a.reverse ? a.steps - 1 - step : step;
    const int before = a.reverse ? t + 1 : t - 1;

    // the input's share arrives while h is waited for
    float share[ITEMS][GATES];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS, unit = unit0 + item % UNITS, s = item / UNITS;
      const bool mine = s < sequences && unit < a.hidden;
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate)
        share[i][gate] =
            mine ? to_float(__ldg(a.gates + (size_t(t) * a.batch + first + s) * GATES * a.hidden +
                                  gate * a.hidden + unit))
                 : 0.0f;
    }

    uint4 h[CHUNKS][BATCH_TILES];
    u32 polls = 0;
    bool waiting = true;
    u32 arrived = 0;
    while (waiting) {
      waiting = false;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int n = 0; n < BATCH_TILES; ++n) {
          const u32 bit = 1u << (c * BATCH_TILES + n);
          if (arrived & bit) continue;
          const int s = n * 8 + g, k = k0 + c * 32;
          if (s >= sequences || k >= a.hidden) {
            h[c][n] = make_uint4(0, 0, 0, 0);
          } else {
            const u16* source = step == 0 ? a.h0 + size_t(first + s) * a.hidden + k
                                          : a.output + (size_t(before) * a.batch + first + s) * a.row + k;
            h[c][n] = load_relaxed(source);
          }
        }
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int n = 0; n < BATCH_TILES; ++n) {
          if (step > 0 && has_mark(h[c][n]) && !given_up)
            waiting = true;
          else
            arrived |= 1u << (c * BATCH_TILES + n);
        }
      if (waiting && ++polls > MOST_POLLS) {
        given_up = true;
        *a.failed = 1;
      }
    }

    float sum[ROW_TILES][BATCH_TILES][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int n = 0; n < BATCH_TILES; ++n)
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          mma(sum[m][n], w[m][c][0], h[c][n].x, h[c][n].y);
          mma(sum[m][n], w[m][c][1], h[c][n].z, h[c][n].w);
        }

    float* const mine = partial + ((step & 1) * WARPS + warp) * ROW_TILES * 16 * SEQUENCES;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < BATCH_TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* const place = mine + (m * 16 + half * 8 + g) * SEQUENCES + n * 8 + q * 2;
          *reinterpret_cast<float2*>(place) = make_float2(sum[m][n][half * 2], sum[m][n][half * 2 + 1]);
        }
    // one barrier a step: the other half of `partial` is free again once all have come here
    __syncthreads();

    const float* const all = partial + (step & 1) * WARPS * ROW_TILES * 16 * SEQUENCES;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = threadIdx.x + i * THREADS, unit = unit0 + item % UNITS, s = item / UNITS;
      if (s >= sequences || unit >= a.hidden) continue;
      float state[GATES];
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate) {
        state[gate] = 0.0f;
#pragma unroll
        for (int v = 0; v < WARPS; ++v)
          state[gate] += all[(v * ROW_TILES * 16 + gate * UNITS + item % UNITS) * SEQUENCES + s];
      }
      float out;
      if (CELL == 0) {
        const float in = sigmoid(share[i][0] + state[0]), forget = sigmoid(share[i][1 % GATES] + state[1 % GATES]);
        const float candidate = tanh_of(share[i][2 % GATES] + state[2 % GATES]);
        const float gate = sigmoid(share[i][3 % GATES] + state[3 % GATES]);
        cell[i] = forget * cell[i] + in * candidate;
        out = gate * tanh_of(cell[i]);
      } else if (CELL == 1) {
        const float bias = a.b_hn ? to_float(a.b_hn[unit]) : 0.0f;
        const float reset = sigmoid(share[i][0] + state[0]), update = sigmoid(share[i][1 % GATES] + state[1 % GATES]);
        const float candidate = tanh_of(share[i][2 % GATES] + reset * (state[2 % GATES] + bias));
        out = candidate + update * (h_last[i] - candidate);
      } else {
        out = share[i][0] + state[0];
        out = CELL == 2 ? tanh_of(out) : out < 0.0f ? 0.0f : out;  // a NaN stays one
      }
      const u16 bits = unmarked(from_float(out));
      h_last[i] = to_float(bits);
      const size_t sequence = size_t(t) * a.batch + first + s;
      store_relaxed(a.output + sequence * a.row + unit, bits);
      if (CELL == 0 && a.cells) a.cells[sequence * a.hidden + unit] = from_float(cell[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = threadIdx.x + i * THREADS, unit = unit0 + item % UNITS, s = item / UNITS;
    if (a.c_n && s < sequences && unit < a.hidden) a.c_n[size_t(first + s) * a.hidden + unit] = cell[i];
  }
}
