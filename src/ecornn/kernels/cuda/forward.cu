// One recurrent layer forwards, its recurrent weights on chip for all time steps; see product.cuh.
//
// blockIdx: x the block's units, y the group of sequences, z the direction. A launch runs `steps`
// steps from `first_step` on, so that a long sequence can be cut into pieces.
//
// CELL 0 lstm, 1 gru, 2 tanh, 3 relu. FEATURES 1: there are lengths or resets. RAGGED 1: warps have
// more of the inner dimension than there is.
#define BACKWARD 0
#define GATES (CELL == 0 ? 4 : CELL == 1 ? 3 : 1)
#define OUTER GATES
#define INNER 1
#define PARTS GATES
#include "biases.cuh"
#include "launches.cuh"
#include "stream.cuh"

// Whether the input's share is read after the product, where registers are short. Measured both
// ways: steps are 4 to 15 % shorter at most of these sizes, and up to 5 % longer at the others.
constexpr bool LATE = GRID && IN_REGISTERS >= 16 && (BATCH_TILES > 1 || ROW_TILES >= 8);

// Pointers to per-direction tensors come in pairs; the states are (directions, batch, hidden).
struct ForwardArguments {
  const Element* gates[2];    // (steps, batch, GATES · hidden): the input's share, without bias
  const Element* weights[2];  // (GATES · hidden, hidden)
  const Element* b_ih[2];     // (GATES · hidden), both or neither null
  const Element* b_hh[2];
  Exchanged* exchange[2];  // (total, batch, exchange_row): marked before; may be the output
  Element* output[2];      // (total, batch, output_row)
  Element* cells[2];       // (total, batch, output_row) or null
  Element* kept[2];        // (total, batch, 4 · hidden) or null: pre-activations
  const Element* h0;       // the initial states
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
  await_launches_ahead();  // the input's share comes from the one before

  // what a thread keeps of its (unit, sequence) pairs
  float cell[ITEMS], h[ITEMS], initial_sum[ITEMS][GATES], bias[ITEMS][PRE];
  int length[ITEMS];
  auto unit_of = [&](int i) { return unit0 + product.unit_of(i); };
  auto sequence_of = [&](int i) { return product.sequence_of(i); };
  auto mine = [&](int i) { return product.has(i, hidden - unit0); };
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
  // The group's rows of a step. They move with time alike in all threads; what an item adds to them
  // stays.
  const int t0 = d ? a.total - 1 - a.first_step : a.first_step;
  const size_t row0 = size_t(t0) * a.batch + first;
  const int a_step = d ? -a.batch : a.batch;
  const Rows<const Element> shares(a.gates[d], size_t(d ? a.steps - 1 : 0) * a.batch + first,
                                   GATES * hidden, a_step);
  Rows<Element> output(a.output[d], row0, a.output_row, a_step);
  Rows<Exchanged> exchange(a.exchange[d], row0, a.exchange_row, a_step);
  Rows<Element> cells(a.cells[d], row0, a.output_row, a_step);
  Rows<Element> kept(a.kept[d], row0, PRE * hidden, a_step);
  const bool output_is_exchanged = GRID && static_cast<const void*>(a.output[d]) == a.exchange[d];

  // the input's share of the gates
  Stream stream(product, hidden % ELEMENTS == 0 && begins_a_vector(a.gates[d]), [&](int gate) {
    Rows<const Element> rows = shares;
    rows.first += gate * hidden;
    return rows;
  });
  auto copy_share = [&](int local, int slot) {
    stream.copy(slot, [&](int) { return local < a.steps; });
  };
#pragma unroll
  for (int ahead = 0; ahead < AHEAD; ++ahead) copy_share(ahead, ahead);

  // h from memory, unpadded; or as it was published
  auto multiply_given = [&](const Element* rows, float* to) {
    if (GRID)
      product.begin_given();
    else
      product.expect_given();
    do {
      product.multiply(to, [&](int c, int n) {
        if (!GRID) return product.from_shared(0, c, n);
        const int s = product.column_of(n);
        return s < sequences ? product.gather(rows + size_t(s) * hidden, product.k_of(c))
                             : make_uint4(0, 0, 0, 0);
      });
    } while (GRID && product.given_again());
    product.expect_published();
  };
  if (!GRID) {
    product.clear_vectors();
    __syncthreads();
    product.fill_vectors(0, (FEATURES ? a.h0 : a.h_in) + states);
  }
  product.open_cluster();
  if (FEATURES) {
    // the product of the initial state, for sequences that begin or are reset to it later
    multiply_given(a.h0 + states, product.partial(0));
    product.collect(0);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (mine(i)) product.read_sums(0, i, initial_sum[i]);
    __syncthreads();
    if (!GRID) product.fill_vectors(0, a.h_in + states);
    __syncthreads();
  }

  // what a step leaves for others than the next one
  struct Shown {
    Element h;
    float cell, pre[PRE];
  };
  auto show = [&](int i, const Shown& shown) {
    if (!mine(i)) return;
    const int unit = unit_of(i), s = sequence_of(i);
    if (!output_is_exchanged) *output.at(s, unit) = shown.h;
    if (CELL == 0 && cells.there) *cells.at(s, unit) = from_float(shown.cell);
    if (kept.there)
#pragma unroll
      for (int gate = 0; gate < PRE; ++gate)
        kept.at(s, unit)[gate * hidden] = from_float(shown.pre[gate]);
  };
  Shown before[ITEMS];  // where TRAILING
  auto move_on = [&] {
    output.move(), kept.move();
    if (GRID) exchange.move();
    if (CELL == 0) cells.move();
  };

  // `slot`: whether the step is an odd one, known where this is inlined
  auto take_step = [&](int local, int slot) {
    Element share[ITEMS][GATES];
    auto read_shares = [&] {
      stream.await();
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) share[i][gate] = stream.read(slot, i, gate);
      copy_share(local + AHEAD, slot);
    };
    auto show_before = [&] {
      if (!TRAILING || local == 0) return;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) show(i, before[i]);
      move_on();
    };
    if (!LATE && !TRAILING) read_shares();
    const int step = a.first_step + local, t = d ? a.total - 1 - step : step;
    const int count = local + FEATURES, sums_slot = (slot + FEATURES) & 1;
    float* const partial = product.partial(sums_slot);
    if (TRAILING) {
      product.await_vectors(local - 1);
      uint4 v[CHUNKS];
      product.load_vectors(v, slot);
      if (!PRODUCT_FIRST) show_before(), read_shares();
      product.multiply(partial, [&](int c, int) { return v[c]; });
      product.expect_published();
      if (PRODUCT_FIRST) read_shares(), show_before();
    } else if (local > 0 && GRID) {
      product.multiply_published(partial, {exchange.before(), a.exchange_row});
    } else if (local > 0) {
      product.await_vectors(local - 1);
      product.multiply(partial, [&](int c, int n) { return product.from_shared(slot, c, n); });
    }
    product.collect(count);
    if (local > 0) product.rearm_vectors(local - 1);
    if (LATE) read_shares();

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (product.warp_sequence(i) >= sequences) continue;
      const int unit = unit_of(i), s = sequence_of(i);
      Element bits[1] = {0};
      Shown shown;
      float(&pre)[PRE] = shown.pre, state = 0.0f;
      // a branch would come between the sums and what can be reckoned before them
      if (mine(i) || (TRAILING && !FEATURES)) {
        float sum[GATES];
        product.read_sums(sums_slot, i, sum);
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
        bits[0] = unmarked(from_float(active ? h_new : h[i]));
        h[i] = to_float(bits[0]);
        if (active) cell[i] = c_new;
        state = cell[i];
        if (!active && !(a.flags & FROZEN_AFTER_END)) bits[0] = 0, state = 0.0f;
      }
      if (!GRID) {
        // nobody waits for the last step's, and a push must not come after its block has left
        if (ALONE || local + 1 < a.steps) product.publish_shared(local, slot ^ 1, i, bits);
      } else if (product.has(i, product.padded - unit0)) {
        store_relaxed(exchange.at(s, unit), product.stored(bits[0]));
      }
      // the next step waits for none of what follows
      shown.h = bits[0], shown.cell = state;
      if (TRAILING)
        before[i] = shown;
      else
        show(i, shown);
    }
    product.note_publication();
    if (MARKS_AHEAD && local + MARKS_AHEAD < a.steps)
      product.prefetch_marks(exchange, MARKS_AHEAD);
    product.release_sums();
    if (!TRAILING) move_on();
  };
  // the first step's product, by itself: it would stand in the loop for nothing
  if (TRAILING)
    product.expect_given();
  else
    multiply_given(a.h_in + states, product.partial(FEATURES));
  for (int local = 0; local < a.steps; local += AHEAD)
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead)
      if (local + ahead < a.steps) take_step(local + ahead, ahead);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (TRAILING) show(i, before[i]);
    if (!mine(i)) continue;
    a.h_out[state_at(i)] = from_float(h[i]);
    if (CELL == 0 && a.c_n) a.c_n[state_at(i)] = from_float(cell[i]);
    if (CELL == 0 && a.c_out) a.c_out[state_at(i)] = cell[i];
  }
  product.close_cluster();
}
