// One recurrent layer backwards in time; the transposed recurrent weights are on chip for all
// steps.
//
// Takes what the forward pass kept, with the gates' pre-activations (kept or recomputed), and gives
// the gradient of the gates at every step. All other gradients are large products of those. A
// launch undoes `steps` steps, `first_step` were undone before.
//
// The gates' gradients of a step are what blocks exchange. For a GRU they stand as
// (n before the reset gate, r, z, n): the first three are the state's, the last three the input's.
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#define OUTER 1
#define INNER GATES
#include "product.cuh"
#include "sequence.cuh"
#include "biases.cuh"

constexpr int READ = CELL == 0 || CELL == 1 ? 4 : 0;    // pre-activations read
constexpr int STORED = CELL == 0 || CELL == 1 ? 4 : 1;  // gradients written

struct BackwardArguments {
  const Element* gates[2];  // (steps, batch, 4 · hidden), LSTM and GRU
  const Element* b_ih[2];   // (GATES · hidden) where the gates are without, else null
  const Element* b_hh[2];
  const Element* weights[2];  // (hidden, GATES · hidden)
  Element* exchange[2];       // (steps, batch, exchange_row): marked before; may be d_gates
  Element* d_gates[2];        // (steps, batch, STORED · hidden)
  const Element* output[2];   // (total, batch, output_row), as all of these four
  const Element* cells[2];
  const Element* d_output[2];  // or null
  const Element* d_cells[2];   // or null
  const Element* h0;
  const Element* c0;
  const Element* d_h_n;  // or null
  const Element* d_c_n;
  const float* d_h_in;  // null where first_step is 0
  const float* d_c_in;
  float* d_h_out;  // null where d_h0 is not
  float* d_c_out;
  Element* d_h0;  // the last piece's result, where no reset adds to it, or null
  Element* d_c0;
  float* d_h_initial;  // what resets to the initial state add to its gradient, or null
  float* d_c_initial;
  const long long* lengths;
  const u8* resets;
  int* failed;
  int steps, first_step, total, batch, hidden;
  int output_row, exchange_row, first_sequence, end_sequence, first_direction, group_batch, flags;
};

// What one (unit, sequence) loads for a step, one step ahead.
struct Loaded {
  Element pre[PRE], before, h, d_output, d_cell;
  u8 cut;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ BackwardArguments a) {
  const int d = a.first_direction + blockIdx.z, unit0 = blockIdx.x * UNITS, hidden = a.hidden;
  const int first = a.first_sequence + blockIdx.y * a.group_batch;
  const int sequences = min(a.group_batch, a.end_sequence - first);
  if (sequences <= 0) return;  // a group of a smaller last launch; its whole cluster leaves
  const size_t states = (size_t(d) * a.batch + first) * hidden;
  const Times times{a.total, d, a.resets, a.batch};
  Product product(hidden, sequences, a.failed);
  product.load_weights(a.weights[d]);

  // d_h: the part of the gradient of h that does not come through the product
  float d_h[ITEMS], d_c[ITEMS], h_initial[ITEMS], c_initial[ITEMS], bias[ITEMS][PRE];
  bool was_cut[ITEMS];
  int length[ITEMS];
  Loaded next[ITEMS];
  auto unit_of = [&](int i) { return unit0 + int(threadIdx.x + i * THREADS) % UNITS; };
  auto sequence_of = [&](int i) { return int(threadIdx.x + i * THREADS) / UNITS; };
  auto mine = [&](int i) { return sequence_of(i) < sequences && unit_of(i) < hidden; };
  auto state_at = [&](int i) { return states + size_t(sequence_of(i)) * hidden + unit_of(i); };
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    d_h[i] = d_c[i] = h_initial[i] = c_initial[i] = 0.0f;
    was_cut[i] = false;
#pragma unroll
    for (int k = 0; k < PRE; ++k) bias[i][k] = 0.0f;
    length[i] = a.total;
    if (!mine(i)) continue;
    if (READ && a.b_ih[d])
      add_biases(bias[i], a.b_ih[d] + unit_of(i), a.b_hh[d] + unit_of(i), hidden);
    if (a.d_h_in)
      d_h[i] = a.d_h_in[state_at(i)];
    else if (a.d_h_n)
      d_h[i] = to_float(a.d_h_n[state_at(i)]);
    if (CELL == 0) {
      if (a.d_c_in)
        d_c[i] = a.d_c_in[state_at(i)];
      else if (a.d_c_n)
        d_c[i] = to_float(a.d_c_n[state_at(i)]);
    }
    if (FEATURES) length[i] = length_of(a.lengths, first + sequence_of(i), a.total);
  }

  auto time_of = [&](int local) {
    return d ? a.first_step + local : a.total - 1 - a.first_step - local;
  };
  auto row_of = [&](int local) { return d ? local : a.steps - 1 - local; };
  // places that move with time; addresses are advanced, not reckoned anew at every step
  const Element *const output = a.output[d], *const cells = a.cells[d],
                       *const d_output = a.d_output[d];
  const Element* const d_cells = a.d_cells[d];
  Element *const d_gates = a.d_gates[d], *const exchange = a.exchange[d];
  const int exchange_row = a.exchange_row;
  const ptrdiff_t output_step = ptrdiff_t(a.batch) * a.output_row * (d ? 1 : -1);
  const ptrdiff_t gates_step = ptrdiff_t(a.batch) * READ * hidden * (d ? 1 : -1);
  const ptrdiff_t stored_step = ptrdiff_t(a.batch) * STORED * hidden * (d ? 1 : -1);
  const Element* gates_at[ITEMS];
  size_t output_at[ITEMS], stored_at[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int sequence = first + sequence_of(i), unit = unit_of(i);
    const size_t row = size_t(row_of(0)) * a.batch + sequence;
    gates_at[i] = a.gates[d] + row * READ * hidden + unit;
    stored_at[i] = row * STORED * hidden + unit;
    output_at[i] = (size_t(time_of(0)) * a.batch + sequence) * a.output_row + unit;
  }
  auto load = [&](int local) {
    const int t = time_of(local), before = d ? t + 1 : t - 1;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const size_t at = output_at[i];
      output_at[i] += output_step;
      const Element* const gates = gates_at[i];
      gates_at[i] += gates_step;
      if (!mine(i)) continue;
      Loaded& l = next[i];
#pragma unroll
      for (int gate = 0; gate < READ; ++gate) l.pre[gate] = __ldg(gates + gate * hidden);
      l.d_output = d_output ? __ldg(d_output + at) : Element(0);
      l.d_cell = CELL == 0 && d_cells ? __ldg(d_cells + at) : Element(0);
      if (CELL >= 2) l.h = __ldg(output + at);
      l.cut = FEATURES && times.cut(t, first + sequence_of(i), length[i]);
      if (CELL < 2) {
        // the state that entered the step: c of an LSTM, h of a GRU
        const bool begins = d ? before >= length[i] : before < 0;
        if (l.cut && !(a.flags & RESET_TO_INITIAL))
          l.before = Element(0);
        else if (l.cut || begins)
          l.before = __ldg((CELL == 0 ? a.c0 : a.h0) + state_at(i));
        else
          l.before = __ldg((CELL == 0 ? cells : output) + at + output_step);
      }
    }
  };
  load(0);
  if (!GRID) product.clear_vectors();
  product.open_cluster();

  int products = 0;
  // the gates' gradients of step `local`, multiplied
  auto undo_product = [&](int local) {
    float* const partial = product.partial(products & 1);
    if (GRID) {
      product.multiply_published(
          partial,
          {exchange + (size_t(row_of(local)) * a.batch + first) * exchange_row, exchange_row});
    } else {
      product.await_vectors(local);
      product.multiply(partial,
                       [&](int c, int n) { return product.from_shared((local + 1) & 1, c, n); });
    }
    product.collect(products);
    product.rearm_vectors(local);
  };
  // the whole gradient of the state that entered the step undone last
  auto entering = [&](int i) {
    const float sum = d_h[i] + product.sum_of(products, unit_of(i) - unit0, sequence_of(i));
    if (!FEATURES || !was_cut[i]) return sum;
    h_initial[i] += sum;
    return 0.0f;
  };

  for (int local = 0; local < a.steps; ++local) {
    const int t = time_of(local);
    // all that the gradient is multiplied with, while the exchange runs
    float by_h[ITEMS][3], by_c[ITEMS][4];
    Loaded now[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      now[i] = next[i];
      const float before = to_float(now[i].before);
      float pre[PRE];
#pragma unroll
      for (int k = 0; k < READ; ++k) pre[k] = to_float(now[i].pre[k]) + bias[i][k];
      if (CELL == 0) {
        const float in = sigmoid_once(pre[0]), forget = sigmoid(pre[1 % PRE]);
        const float candidate = tanh_of(pre[2 % PRE]), gate = sigmoid_once(pre[3 % PRE]);
        const float shown = tanh_of(forget * before + in * candidate);
        by_h[i][0] = gate * (1.0f - shown * shown);
        by_h[i][1] = shown * gate * (1.0f - gate);
        by_c[i][0] = candidate * in * (1.0f - in);
        by_c[i][1] = before * forget * (1.0f - forget);
        by_c[i][2] = in * (1.0f - candidate * candidate);
        by_c[i][3] = forget;
      } else if (CELL == 1) {
        const float reset = sigmoid_once(pre[0]), update = sigmoid(pre[1 % PRE]);
        const float inner = pre[3 % PRE];
        const float candidate = tanh_of(pre[2 % PRE] + reset * inner);
        by_h[i][0] = (1.0f - update) * (1.0f - candidate * candidate);
        by_h[i][1] = (before - candidate) * update * (1.0f - update);
        by_h[i][2] = update;
        by_c[i][0] = reset;
        by_c[i][1] = inner * reset * (1.0f - reset);
      } else {
        const float y = to_float(now[i].h);
        by_h[i][0] = CELL == 2 ? 1.0f - y * y : y > 0.0f ? 1.0f : 0.0f;
      }
    }
    if (local + 1 < a.steps) load(local + 1);
    if (local > 0) undo_product(local - 1);

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item0 = (product.warp + i * WARPS) * 32;
      if (item0 / UNITS >= sequences) break;
      const int unit = unit_of(i), s = sequence_of(i);
      Element bits[STORED] = {};
      if (mine(i)) {
        float h = local > 0 ? entering(i) : d_h[i], c = d_c[i];
        const bool active = !FEATURES || t < length[i];
        if (active || (a.flags & FROZEN_AFTER_END)) {
          h += to_float(now[i].d_output);
          if (CELL == 0) c += to_float(now[i].d_cell);
        }
        float grad[STORED] = {};
        if (!active) {
          d_h[i] = h, d_c[i] = c;
        } else if (CELL == 0) {
          c += h * by_h[i][0];
          grad[0] = c * by_c[i][0], grad[1 % STORED] = c * by_c[i][1],
          grad[2 % STORED] = c * by_c[i][2];
          grad[3 % STORED] = h * by_h[i][1];
          d_h[i] = 0.0f, d_c[i] = c * by_c[i][3];
        } else if (CELL == 1) {
          const float candidate = h * by_h[i][0];
          grad[0] = candidate * by_c[i][0], grad[1 % STORED] = candidate * by_c[i][1];
          grad[2 % STORED] = h * by_h[i][1], grad[3 % STORED] = candidate;
          d_h[i] = h * by_h[i][2];
        } else {
          grad[0] = h * by_h[i][0];
          d_h[i] = 0.0f;
        }
        if (FEATURES) {
          was_cut[i] = now[i].cut;
          if (now[i].cut && CELL == 0) c_initial[i] += d_c[i], d_c[i] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < STORED; ++k) bits[k] = unmarked(from_float(grad[k]));
      }
      const size_t at = stored_at[i];
      stored_at[i] += stored_step;
      Element published[INNER];
#pragma unroll
      for (int k = 0; k < INNER; ++k) published[k] = bits[k];
      if (!GRID) {
        product.publish_shared(local, item0, unit0, published);
      } else if (s < sequences && unit < product.padded) {
        const size_t row = size_t(row_of(local)) * a.batch + first + s;
        Element* const to = exchange + (exchange == d_gates ? at : row * exchange_row + unit);
#pragma unroll
        for (int k = 0; k < INNER; ++k) store_relaxed(to + k * product.padded, published[k]);
      }
      // the next step waits for none of what follows
      if (!mine(i)) continue;
#pragma unroll
      for (int k = 0; k < STORED; ++k)
        if (!GRID || k >= INNER || d_gates != exchange) d_gates[at + k * hidden] = bits[k];
    }
    if (local > 0) product.release_sums(), ++products;
  }
  undo_product(a.steps - 1);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (!mine(i)) continue;
    const float h = entering(i);
    if (a.d_h0) {
      a.d_h0[state_at(i)] = from_float(h);
      if (CELL == 0) a.d_c0[state_at(i)] = from_float(d_c[i]);
    } else {
      a.d_h_out[state_at(i)] = h;
      if (CELL == 0) a.d_c_out[state_at(i)] = d_c[i];
    }
    if (FEATURES && a.d_h_initial) {
      a.d_h_initial[state_at(i)] += h_initial[i];
      if (CELL == 0) a.d_c_initial[state_at(i)] += c_initial[i];
    }
  }
  product.close_cluster();
}
