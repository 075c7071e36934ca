// One recurrent layer backwards in time; the transposed recurrent weights are on chip for all
// steps.
//
// Takes what the forward pass kept, with the gates' pre-activations (kept or recomputed), and gives
// the gradient of the gates at every step. All other gradients are large products of those. A
// launch undoes `steps` steps, `first_step` were undone before.
//
// The gates' gradients of a step are what blocks exchange. For a GRU they stand as
// (n before the reset gate, r, z, n): the first three are the state's, the last three the input's.
#define BACKWARD 1
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#define OUTER 1
#define INNER GATES
#define READ (CELL <= 1 ? 4 : 0)  // pre-activations read
// and the state that entered the step (a simple cell: that left it), the gradients of h and of c
#define PARTS (READ + (CELL == 0 ? 3 : 2))
#include "factors.cuh"
#include "stream.cuh"

constexpr int STORED = CELL <= 1 ? 4 : 1;  // gradients written

struct BackwardArguments {
  const Element* gates[2];  // (steps, batch, 4 · hidden), LSTM and GRU
  const Element* b_ih[2];   // (GATES · hidden) where the gates are without, else null
  const Element* b_hh[2];
  const Element* weights[2];  // (GATES · hidden, hidden)
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
  float d_h[ITEMS], d_c[ITEMS], bias[ITEMS][PRE];
  bool was_cut[ITEMS];
  int length[ITEMS];
  auto unit_of = [&](int i) { return unit0 + product.unit_of(i); };
  auto sequence_of = [&](int i) { return product.sequence_of(i); };
  auto mine = [&](int i) { return product.has(i, hidden - unit0); };
  auto state_at = [&](int i) { return states + size_t(sequence_of(i)) * hidden + unit_of(i); };
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    d_h[i] = d_c[i] = 0.0f;
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
  // the group's rows of a step, in the tensors of all steps and in those of this launch's
  const size_t row0 = size_t(time_of(0)) * a.batch + first;
  const size_t own_row0 = size_t(d ? 0 : a.steps - 1) * a.batch + first;
  const int a_step = d ? a.batch : -a.batch;
  const Rows<const Element> gates(a.gates[d], own_row0, READ * hidden, a_step);
  const Rows<const Element> output(a.output[d], row0, a.output_row, a_step);
  const Rows<const Element> cells(a.cells[d], row0, a.output_row, a_step);
  const Rows<const Element> d_output(a.d_output[d], row0, a.output_row, a_step);
  const Rows<const Element> d_cells(a.d_cells[d], row0, a.output_row, a_step);
  Rows<Element> d_gates(a.d_gates[d], own_row0, STORED * hidden, a_step);
  Rows<Element> exchange(a.exchange[d], own_row0, a.exchange_row, a_step);
  const bool d_gates_are_exchanged = GRID && a.d_gates[d] == a.exchange[d];

  // what a step reads, parts in this order
  constexpr int STATE = READ, ARRIVING_H = READ + 1, ARRIVING_C = READ + 2;
  Stream stream(product,
                hidden % VEC == 0 && begins_a_vector(a.gates[d]) &&
                    begins_a_vector(CELL == 0 ? a.cells[d] : a.output[d]) &&
                    begins_a_vector(a.d_output[d]) && begins_a_vector(a.d_cells[d]),
                [&](int part) {
                  Rows<const Element> rows = part < READ         ? gates
                                             : part > ARRIVING_H ? d_cells
                                             : part > STATE      ? d_output
                                             : CELL == 0         ? cells
                                                                 : output;
                  if (part < READ) rows.first += part * hidden;
                  // of a simple cell the state that left the step, of the others that entered it
                  if (part == STATE && CELL < 2) rows.move();
                  return rows;
                });
  auto copy_step = [&](int local, int slot) {
    const bool there = local < a.steps;
    // the state that entered the first step in time stands elsewhere
    const bool has_state = there && (CELL >= 2 || a.first_step + local + 1 < a.total);
    stream.copy(slot, [&](int part) { return part == STATE ? has_state : there; });
  };
#pragma unroll
  for (int ahead = 0; ahead < AHEAD; ++ahead) copy_step(ahead, ahead);
  if (!GRID) product.clear_vectors();
  product.open_cluster();

  // The gates' gradients of step `local` multiplied: product number `local`. `slot`: whether the
  // step is an odd one.
  auto undo_product = [&](int local, int slot) {
    float* const partial = product.partial(slot);
    if (GRID) {
      product.multiply_published(partial, {exchange.before(), a.exchange_row});
    } else {
      product.await_vectors(local);
      product.multiply(partial, [&](int c, int n) { return product.from_shared(slot ^ 1, c, n); });
    }
    product.collect(local);
    product.rearm_vectors(local);
  };
  // the whole gradient of the state that entered the step undone last
  auto entering = [&](int i, int slot) {
    float sum[1];
    product.read_sums(slot, i, sum);
    if (!FEATURES || !was_cut[i]) return d_h[i] + sum[0];
    // in memory and not in registers, which are short: resets are seldom
    if (a.d_h_initial) a.d_h_initial[state_at(i)] += d_h[i] + sum[0];
    return 0.0f;
  };

  Element shown[ITEMS][STORED];  // the gates' gradients, for others than the next step
  auto show = [&](int i) {
    if (!mine(i)) return;
#pragma unroll
    for (int k = 0; k < STORED; ++k)
      if (!d_gates_are_exchanged || k >= INNER)
        d_gates.at(sequence_of(i), unit_of(i))[k * hidden] = shown[i][k];
  };

  // `slot`: whether the step is an odd one, known where this is inlined
  auto take_step = [&](int local, int slot) {
    const int t = time_of(local);
    uint4 v[CHUNKS];
    // of the first step nobody reads the sums
    auto multiply_loaded = [&] {
      product.multiply(product.partial(slot ^ 1), [&](int c, int) { return v[c]; });
    };
    if (TRAILING) {
      product.await_vectors(local - 1);
      product.load_vectors(v, slot);
      if (PRODUCT_FIRST) multiply_loaded();
      if (local > 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) show(i);
        d_gates.move();
      }
    }
    // all that the gradient is multiplied with, while the exchange or the product runs
    Factors factors[ITEMS];
    Element read[ITEMS][PARTS];
    float state[ITEMS];
    bool cut[ITEMS];
    auto take = [&](int i) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) read[i][part] = stream.read(slot, i, part);
      cut[i] = FEATURES && mine(i) && times.cut(t, first + sequence_of(i), length[i]);
      state[i] = to_float(read[i][STATE]);
      if (CELL >= 2) return;
      const bool begins = d ? t + 1 >= length[i] : t == 0;
      if (cut[i] && !(a.flags & RESET_TO_INITIAL))
        state[i] = 0.0f;
      else if ((cut[i] || begins) && mine(i))
        state[i] = to_float((CELL == 0 ? a.c0 : a.h0)[state_at(i)]);
    };
    auto prepare = [&](int i) {
      float pre[PRE];
#pragma unroll
      for (int k = 0; k < READ; ++k) pre[k] = to_float(read[i][k]) + bias[i][k];
      factors[i].find(pre, state[i]);
    };
    stream.await();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (product.warp_sequence(i) >= sequences) continue;
      take(i);
      if (!TRAILING) prepare(i);
    }
    copy_step(local + AHEAD, slot);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (TRAILING) prepare(i);
    if (TRAILING && !PRODUCT_FIRST)
      multiply_loaded();
    else if (!TRAILING && local > 0)
      undo_product(local - 1, slot ^ 1);

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (product.warp_sequence(i) >= sequences) continue;
      const int unit = unit_of(i), s = sequence_of(i);
      Element bits[STORED] = {};
      if (mine(i)) {
        float h = local > 0 ? entering(i, slot ^ 1) : d_h[i], c = d_c[i];
        const bool active = !FEATURES || t < length[i];
        if (active || (a.flags & FROZEN_AFTER_END)) {
          if (d_output.there) h += to_float(read[i][ARRIVING_H]);
          if (CELL == 0 && d_cells.there) c += to_float(read[i][ARRIVING_C % PARTS]);
        }
        float grad[STORED] = {};
        const float(&by_h)[3] = factors[i].by_h, (&by_c)[4] = factors[i].by_c;
        if (!active) {
          d_h[i] = h, d_c[i] = c;
        } else if (CELL == 0) {
          c += h * by_h[0];
          grad[0] = c * by_c[0], grad[1 % STORED] = c * by_c[1], grad[2 % STORED] = c * by_c[2];
          grad[3 % STORED] = h * by_h[1];
          d_h[i] = 0.0f, d_c[i] = c * by_c[3];
        } else if (CELL == 1) {
          const float candidate = h * by_h[0];
          grad[0] = candidate * by_c[0], grad[1 % STORED] = candidate * by_c[1];
          grad[2 % STORED] = h * by_h[1], grad[3 % STORED] = candidate;
          d_h[i] = h * by_h[2];
        } else {
          grad[0] = h * by_h[0];
          d_h[i] = 0.0f;
        }
        if (FEATURES) {
          was_cut[i] = cut[i];
          if (cut[i] && CELL == 0) {
            if (a.d_c_initial) a.d_c_initial[state_at(i)] += d_c[i];
            d_c[i] = 0.0f;
          }
        }
#pragma unroll
        for (int k = 0; k < STORED; ++k) bits[k] = unmarked(from_float(grad[k]));
      }
      Element published[INNER];
#pragma unroll
      for (int k = 0; k < INNER; ++k) published[k] = bits[k];
      if (!GRID) {
        product.publish_shared(local, slot ^ 1, i, published);
      } else if (product.has(i, product.padded - unit0)) {
#pragma unroll
        for (int k = 0; k < INNER; ++k)
          store_relaxed(exchange.at(s, unit) + k * product.padded, product.stored(published[k]));
      }
      // the next step waits for none of what follows
#pragma unroll
      for (int k = 0; k < STORED; ++k) shown[i][k] = bits[k];
      if (!TRAILING) show(i);
    }
    product.note_publication();
    if (MARKS_AHEAD && local + MARKS_AHEAD < a.steps)
      product.prefetch_marks(exchange, MARKS_AHEAD);
    if (local > 0) product.release_sums();
    if (!TRAILING) d_gates.move();
    if (GRID) exchange.move();
  };
  for (int local = 0; local < a.steps; local += AHEAD)
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead)
      if (local + ahead < a.steps) take_step(local + ahead, ahead);
  const int last_slot = (a.steps - 1) & 1;
  undo_product(a.steps - 1, last_slot);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (TRAILING) show(i);
    if (!mine(i)) continue;
    const float h = entering(i, last_slot);
    if (a.d_h0) {
      a.d_h0[state_at(i)] = from_float(h);
      if (CELL == 0) a.d_c0[state_at(i)] = from_float(d_c[i]);
    } else {
      a.d_h_out[state_at(i)] = h;
      if (CELL == 0) a.d_c_out[state_at(i)] = d_c[i];
    }
  }
  product.close_cluster();
}
