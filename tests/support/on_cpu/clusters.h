// A cluster's pushes and barriers; in the place of those in exchange.cuh.
#if CLUSTER > 1
static inline u32 cluster_rank() { return blockIdx.x % CLUSTER; }
static inline void cluster_sync() { block_here->cluster->meeting->arrive_and_wait(); }
static inline u32 remote(u32 address, u32 rank) {
  const u32 own = u32(uintptr_t(shared));
  return address - own + u32(uintptr_t(block_here->cluster->shared[rank]));
}
template <class T>
static inline void push(u32 address, u32 barrier, T value) {
  std::lock_guard<std::mutex> guard(barriers);
  std::memcpy(reinterpret_cast<void*>(uintptr_t(address)), &value, sizeof value);
  barrier_at(barrier)->bytes -= sizeof value;
  settle(barrier_at(barrier));
}
static inline void barrier_init(u32 barrier) { *barrier_at(barrier) = {0, 1, 0}; }
static inline void barrier_expect(u32 barrier, u32 bytes) {
  std::lock_guard<std::mutex> guard(barriers);
  barrier_at(barrier)->bytes += bytes;
  barrier_at(barrier)->pending -= 1;
  settle(barrier_at(barrier));
}
static inline bool barrier_passed(u32 barrier, u32 phase) {
  std::lock_guard<std::mutex> guard(barriers);
  return barrier_at(barrier)->phase != short(phase);
}
#endif
