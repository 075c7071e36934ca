// One recurrent layer forwards, its recurrent weights on chip for all time steps; see product.cuh.
//
// blockIdx: x the block's units, y the group of sequences, z the direction. A launch runs `steps`
// steps from `first_step` on, so that a long sequence can be cut into pieces.
//
// CELL 0 lstm, 1 gru, 2 tanh, 3 relu. FEATURES 1: there are lengths or resets.
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#define OUTER GATES
#define INNER 1
#include "product.cuh"
#include "sequence.cuh"
#include "biases.cuh"

// Pointers to per-direction tensors come in pairs; the states are (directions, batch, hidden).
struct ForwardArguments {
  const Element* gates[2];    // (steps, batch, GATES · hidden): the input's share, without bias
  const Element* weights[2];  // (GATES · hidden, hidden)
  const Element* b_ih[2];     // (GATES · hidden), both or neither null
  const Element* b_hh[2];
  Element* exchange[2];  // (total, batch, exchange_row): marked before; may be the output
  Element* output[2];    // (total, batch, output_row)
  Element* cells[2];     // (total, batch, output_row) or null
  Element* kept[2];      // (total, batch, 4 · hidden) or null: pre-activations
  const Element* h0;     // the initial states
  const Element* c0;
  const Element* h_in;  // the states before first_step
  const float* c_in;    // null where first_step is 0
  Element* h_out;
  Element* c_n;              // null where more steps follow
  float* c_out;              // null where none do
  const long long* lengths;  // (batch) or null
  const u8* resets;          // (total, batch) or null
  int* failed;
  int steps, first_step, total, batch, hidden;
  int output_row, exchange_row, first_sequence, end_sequence, first_direction, group_batch, flags;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ ForwardArguments a) {
  const int d = a.first_direction + blockIdx.z, unit0 = blockIdx.x * UNITS, hidden = a.hidden;
  const int first = a.first_sequence + blockIdx.y * a.group_batch;
  const int sequences = min(a.group_batch, a.end_sequence - first);
  if (sequences <= 0) return;  // a group of a smaller last launch; its whole cluster leaves
  const size_t states = (size_t(d) * a.batch + first) * hidden;
  const Times times{a.total, d, a.resets, a.batch};
  Product product(hidden, sequences, a.failed);
  product.load_weights(a.weights[d]);

  // what a thread keeps of its (unit, sequence) pairs
  float cell[ITEMS], h[ITEMS], initial_sum[ITEMS][GATES], bias[ITEMS][PRE];
  int length[ITEMS];
  Element share[ITEMS][GATES];
  auto unit_of = [&](int i) { return unit0 + int(threadIdx.x + i * THREADS) % UNITS; };
  auto sequence_of = [&](int i) { return int(threadIdx.x + i * THREADS) / UNITS; };
  auto mine = [&](int i) { return sequence_of(i) < sequences && unit_of(i) < hidden; };
  auto state_at = [&](int i) { return states + size_t(sequence_of(i)) * hidden + unit_of(i); };
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    cell[i] = h[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < PRE; ++k) bias[i][k] = 0.0f;
    length[i] = a.total;
    if (!mine(i)) continue;
    if (a.b_ih[d]) add_biases(bias[i], a.b_ih[d] + unit_of(i), a.b_hh[d] + unit_of(i), hidden);
    h[i] = to_float(a.h_in[state_at(i)]);
    if (CELL == 0) cell[i] = a.c_in ? a.c_in[state_at(i)] : to_float(a.c0[state_at(i)]);
    if (FEATURES) length[i] = length_of(a.lengths, first + sequence_of(i), a.total);
  }
  // places that move with time; addresses are advanced, not reckoned anew at every step
  const Element* share_at[ITEMS];
  size_t output_at[ITEMS];
  Element *const output = a.output[d], *const exchange = a.exchange[d], *const cells = a.cells[d];
  const int exchange_row = a.exchange_row;
  const ptrdiff_t share_step = ptrdiff_t(a.batch) * GATES * hidden * (d ? -1 : 1);
  const ptrdiff_t output_step = ptrdiff_t(a.batch) * a.output_row * (d ? -1 : 1);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int sequence = first + sequence_of(i), t = d ? a.total - 1 - a.first_step : a.first_step;
    share_at[i] = a.gates[d] + (size_t(d ? a.steps - 1 : 0) * a.batch + sequence) * GATES * hidden +
                  unit_of(i);
    output_at[i] = (size_t(t) * a.batch + sequence) * a.output_row + unit_of(i);
  }
  // the input's share of a step, loaded one step ahead
  auto load_share = [&]() {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate)
        if (mine(i)) share[i][gate] = __ldg(share_at[i] + gate * hidden);
      share_at[i] += share_step;
    }
  };
  load_share();

  // h from memory, unpadded; or as it was published
  auto multiply_given = [&](const Element* rows, float* to) {
    product.multiply(to, [&](int c, int n) {
      const int s = n * 8 + product.g;
      if (!GRID) return product.from_shared(0, c, n);
      return s < sequences ? gather(rows + size_t(s) * hidden, product.k_of(c), hidden)
                           : make_uint4(0, 0, 0, 0);
    });
  };
  int products = 0;
  if (!GRID) {
    product.clear_vectors();
    __syncthreads();
    product.fill_vectors(0, (FEATURES ? a.h0 : a.h_in) + states);
  }
  product.open_cluster();
  if (FEATURES) {
    // the product of the initial state, for sequences that begin or are reset to it later
    multiply_given(a.h0 + states, product.partial(0));
    product.collect(products);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate)
        if (mine(i))
          initial_sum[i][gate] =
              product.sum_of(products, gate * UNITS + unit_of(i) - unit0, sequence_of(i));
    __syncthreads();
    ++products;
    if (!GRID) product.fill_vectors(0, a.h_in + states);
    __syncthreads();
  }

  for (int local = 0; local < a.steps; ++local, ++products) {
    const int step = a.first_step + local, t = d ? a.total - 1 - step : step;
    float* const partial = product.partial(products & 1);
    if (local == 0) {
      multiply_given(a.h_in + states, partial);
    } else if (GRID) {
      const int before = d ? t + 1 : t - 1;
      product.multiply_published(
          partial, {exchange + (size_t(before) * a.batch + first) * exchange_row, exchange_row});
    } else {
      product.await_vectors(local - 1);
      product.multiply(partial, [&](int c, int n) { return product.from_shared(local & 1, c, n); });
    }
    product.collect(products);
    if (local > 0) product.rearm_vectors(local - 1);

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item0 = (product.warp + i * WARPS) * 32;
      if (item0 / UNITS >= sequences) break;
      const int unit = unit_of(i), s = sequence_of(i);
      Element bits[1] = {0};
      float pre[PRE], state = 0.0f;
      if (mine(i)) {
        float sum[GATES];
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
          sum[gate] = product.sum_of(products, gate * UNITS + unit - unit0, s);
        float h_in = h[i], c_in = cell[i];
        if (FEATURES) {
          const bool cut = times.cut(t, first + s, length[i]);
          const bool to_initial = cut && (a.flags & RESET_TO_INITIAL);
          const bool begins = d && t == length[i] - 1;
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate)
            sum[gate] = to_initial || begins ? initial_sum[i][gate] : cut ? 0.0f : sum[gate];
          if (cut) {
            h_in = to_initial ? to_float(a.h0[state_at(i)]) : 0.0f;
            if (CELL == 0) c_in = to_initial ? to_float(a.c0[state_at(i)]) : 0.0f;
          }
        }
        const bool active = !FEATURES || t < length[i];
        float c_new = 0.0f, h_new;
        if (CELL == 0) {
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate)
            pre[gate] = to_float(share[i][gate]) + bias[i][gate] + sum[gate];
          c_new = sigmoid(pre[1 % PRE]) * c_in + sigmoid_once(pre[0]) * tanh_of(pre[2 % PRE]);
          h_new = sigmoid_once(pre[3 % PRE]) * tanh_of(c_new);
        } else if (CELL == 1) {
          pre[0] = to_float(share[i][0]) + bias[i][0] + sum[0];
          pre[1 % PRE] = to_float(share[i][1 % GATES]) + bias[i][1 % PRE] + sum[1 % GATES];
          pre[2 % PRE] = to_float(share[i][2 % GATES]) + bias[i][2 % PRE];
          pre[3 % PRE] = sum[2 % GATES] + bias[i][3 % PRE];
          const float candidate = tanh_of(pre[2 % PRE] + sigmoid_once(pre[0]) * pre[3 % PRE]);
          h_new = candidate + sigmoid(pre[1 % PRE]) * (h_in - candidate);
        } else {
          pre[0] = to_float(share[i][0]) + bias[i][0] + sum[0];
          h_new = CELL == 2 ? tanh_of(pre[0]) : pre[0] < 0.0f ? 0.0f : pre[0];  // a NaN stays one
        }
        if (active) {
          h[i] = to_float(unmarked(from_float(h_new)));
          cell[i] = c_new;
        }
        bits[0] = unmarked(from_float(h[i]));
        state = cell[i];
        if (!active && !(a.flags & FROZEN_AFTER_END)) bits[0] = 0, state = 0.0f;
      }
      const size_t at = output_at[i];
      output_at[i] += output_step;
      if (!GRID) {
        // nobody waits for the last step's, and a push must not come after its block has left
        if (local + 1 < a.steps) product.publish_shared(local, item0, unit0, bits);
      } else if (s < sequences && unit < product.padded) {
        const size_t row = size_t(t) * a.batch + first + s;
        store_relaxed(exchange + (exchange == output ? at : row * exchange_row + unit), bits[0]);
      }
      // the next step waits for none of what follows
      if (!mine(i)) continue;
      if (!GRID || output != exchange) output[at] = bits[0];
      if (CELL == 0 && cells) cells[at] = from_float(state);
      if (a.kept[d]) {
        Element* const kept = a.kept[d] + (size_t(t) * a.batch + first + s) * PRE * hidden + unit;
#pragma unroll
        for (int gate = 0; gate < PRE; ++gate) kept[gate * hidden] = from_float(pre[gate]);
      }
    }
    product.release_sums();
    if (local + 1 < a.steps) load_share();
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (!mine(i)) continue;
    a.h_out[state_at(i)] = from_float(h[i]);
    if (CELL == 0 && a.c_n) a.c_n[state_at(i)] = from_float(cell[i]);
    if (CELL == 0 && a.c_out) a.c_out[state_at(i)] = cell[i];
  }
  product.close_cluster();
}
