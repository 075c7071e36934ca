// A block's shared memory: what stands where.
#pragma once
#include "items.cuh"

// In this order; the host computes the same sum (see SHARED_BYTES below).
constexpr int WEIGHT_BYTES = (ROW_TILES * CHUNKS - IN_REGISTERS) * 2 * THREADS * 16;
// a row of v; rows start 64 bytes apart modulo 128, so that the 16-byte loads of 8 lanes do not
// meet
constexpr int INNER_BYTES = K_WARPS * CHUNKS * 64;
constexpr int VECTOR_ROW = INNER_BYTES + (INNER_BYTES % 128 == 0 ? 64 : 0);
constexpr int VECTOR_BYTES = GRID ? 0 : SEQUENCES * VECTOR_ROW;
// rows of partial sums: 4 apart modulo 16, so that neither the products' writes nor the reads meet
constexpr int PARTIAL_ROW = BLOCK_ROWS + 4;
constexpr int PARTIAL_BYTES = DIRECT ? 0 : K_WARPS * SEQUENCES * PARTIAL_ROW * 4;
constexpr int RECEIVED_BYTES = OWNERS > 1 ? OWNERS * SEQUENCES * OWN_ROWS * 4 : 0;
constexpr int STAGE_BYTES = !GRID && CLUSTER > 1 ? WARPS * INNER * 32 * int(sizeof(Exchanged)) : 0;
// what a step reads from memory; see stream.cuh
constexpr int STREAM_BYTES = AHEAD * ITEMS * PARTS * THREADS * int(sizeof(Element));
constexpr int LAID_OUT_BYTES = WEIGHT_BYTES + 2 * VECTOR_BYTES + PARTIAL_BUFFERS * PARTIAL_BYTES +
                               2 * RECEIVED_BYTES + STREAM_BYTES + STAGE_BYTES + 16;
// Before all that, where weights are staged, they pass through: a tile of each warp to a slot, and as
// many slots at least as STAGED_BYTES have; see staging.cuh.
constexpr int SLOT_BYTES = 2 * THREADS * 16, MOST_SLOTS = STAGED_BYTES / SLOT_BYTES;
constexpr int LEAST_SLOTS = IN_REGISTERS < MOST_SLOTS ? IN_REGISTERS : MOST_SLOTS;
static_assert(SHARED_BYTES == (LAID_OUT_BYTES > LEAST_SLOTS * SLOT_BYTES + 16
                                   ? LAID_OUT_BYTES
                                   : LEAST_SLOTS * SLOT_BYTES + 16),
              "the host reckons another size of shared memory");
static_assert(STAGED_BYTES == 0 || LEAST_SLOTS > 0, "no tile can pass");
constexpr int ROOM = (SHARED_BYTES - 16) / SLOT_BYTES;
constexpr int SLOTS = ROOM < IN_REGISTERS ? ROOM : IN_REGISTERS;

extern __shared__ __align__(16) u8 shared[];

__device__ __forceinline__ u32 shared_address(const void* p) {
  return u32(__cvta_generic_to_shared(p));
}

// ---- copies from memory to shared memory, under way while others are
// What this thread has copied since it last said so goes together.
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all of this thread's have come but the last COUNT that go together.
template <int COUNT>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

struct Memory : Items {
  using Items::Items;

  __device__ __forceinline__ uint4* weights() const { return reinterpret_cast<uint4*>(shared); }
  __device__ __forceinline__ u8* vectors(int slot) const {
    return shared + WEIGHT_BYTES + slot * VECTOR_BYTES;
  }
  __device__ __forceinline__ float* partial(int slot) const {
    return reinterpret_cast<float*>(shared + WEIGHT_BYTES + 2 * VECTOR_BYTES +
                                    (PARTIAL_BUFFERS == 2 ? slot : 0) * PARTIAL_BYTES);
  }
  __device__ __forceinline__ float* received(int slot) const {
    return reinterpret_cast<float*>(shared + WEIGHT_BYTES + 2 * VECTOR_BYTES +
                                    PARTIAL_BUFFERS * PARTIAL_BYTES + slot * RECEIVED_BYTES);
  }
  __device__ __forceinline__ Element* streams() const {
    return reinterpret_cast<Element*>(shared + SHARED_BYTES - 16 - STAGE_BYTES - STREAM_BYTES) +
           warp * 32;
  }
  __device__ __forceinline__ Exchanged* stage() const {
    return reinterpret_cast<Exchanged*>(shared + SHARED_BYTES - 16 - STAGE_BYTES) +
           warp * INNER * 32;
  }
  __device__ __forceinline__ u32 barrier(int slot) const {
    return shared_address(shared + SHARED_BYTES - 16 + slot * 8);
  }
};
