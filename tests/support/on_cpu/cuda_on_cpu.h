// As much of CUDA as the persistent kernels use, for a CPU: every thread of a launch is a thread.
//
// Votes, shuffles, products of a warp and barriers are meetings of threads; shared memory is memory
// below 4 GB, so that its addresses are 32 bits wide here as well. Loads that wait for other blocks
// are checked to lie in the exchanged memory.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__

using std::max;
using std::min;

struct uint4 {
  unsigned x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Dim {
  unsigned x, y, z;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

struct Warp {
  std::barrier<> meeting{32};
  unsigned a[32][4], b[32][2];
  unsigned value[2][32];
  const unsigned short* rows[32];
  bool vote[32];
};
struct Cluster {
  std::unique_ptr<std::barrier<>> meeting;
  unsigned char* shared[16];
};
struct Block {
  std::unique_ptr<std::barrier<>> meeting;
  std::atomic<int> votes{0};
  std::vector<std::unique_ptr<Warp>> warps;
  unsigned char* shared;
  Cluster* cluster;
};

static thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
static thread_local Warp* warp_here;
static thread_local Block* block_here;
static thread_local unsigned char* shared;
static std::atomic<int> outside{0};
static uintptr_t exchanged_from[2], exchanged_to[2];

static inline int lane_here() { return threadIdx.x % 32; }
static inline void meet() { warp_here->meeting.arrive_and_wait(); }
static inline void __syncwarp() { meet(); }
static inline void __syncthreads() { block_here->meeting->arrive_and_wait(); }
static inline int votes(bool mine) {
  warp_here->vote[lane_here()] = mine;
  meet();
  const int count = std::count(warp_here->vote, warp_here->vote + 32, true);
  meet();
  return count;
}
static inline bool __all_sync(unsigned, bool mine) { return votes(mine) == 32; }
static inline bool __any_sync(unsigned, bool mine) { return votes(mine) > 0; }
static inline int __syncthreads_or(int mine) {
  block_here->votes += mine != 0;
  __syncthreads();
  const int found = block_here->votes;
  __syncthreads();
  block_here->votes -= mine != 0;
  return found > 0;
}
// One meeting is enough: whoever writes a place again has met all that have read it.
static thread_local unsigned shuffles;
template <class T>
static inline T __shfl_sync(unsigned, T mine, int from) {
  static_assert(sizeof(T) == 4);
  auto& value = warp_here->value[++shuffles % 2];
  std::memcpy(&value[lane_here()], &mine, 4);
  meet();
  T found;
  std::memcpy(&found, &value[from], 4);
  return found;
}
static inline float __shfl_xor_sync(unsigned all, float mine, int mask) {
  return __shfl_sync(all, mine, lane_here() ^ mask);
}
template <class T>
static inline T __ldg(const T* place) {
  return *place;
}
// So fast that what a kernel waits at most, 2^32 cycles, are some seconds.
static double cycles_a_second;
static inline long long clock64() {
  sched_yield();
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<long long>(now.count() * cycles_a_second);
}
static inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float __fdividef(float a, float b) { return a / b; }
static inline size_t __cvta_generic_to_shared(const void* place) { return size_t(place); }

static inline float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
static inline unsigned short to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline float of_f16(unsigned bits) {
  const int exponent = bits >> 10 & 31, rest = bits & 1023;
  float size = exponent ? std::ldexp(1024.0f + rest, exponent - 25) : std::ldexp(float(rest), -24);
  if (exponent == 31) size = rest ? NAN : INFINITY;
  return bits & 0x8000 ? -size : size;
}
// To nearest, ties to even; every NaN becomes the same one.
static inline unsigned short to_f16(float x) {
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000;
  if (x != x) return 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-5f) return sign | unsigned(std::nearbyint(std::ldexp(size, 24)));
  const unsigned bits = __float_as_uint(size) - (112u << 23);
  return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}

// To nearest, ties away from zero. A NaN whose last bits are all it has becomes an infinity, as it
// did on an H200.
static inline unsigned to_tf32_on_cpu(unsigned bits) {
  const bool finite = (bits & 0x7fffffffu) < 0x7f800000u;
  return (finite ? bits + 0x1000u : bits) & 0xffffe000u;
}

// Element by element, as other threads write them.
template <class Element>
static inline uint4 load_exchanged(const void* address) {
  const uintptr_t at = uintptr_t(address);
  bool inside = false;
  for (int d = 0; d < 2; ++d) inside |= at >= exchanged_from[d] && at + 16 <= exchanged_to[d];
  uint4 found{};
  if (at % 16 || !inside) {
    ++outside;
    return found;
  }
  Element each[16 / sizeof(Element)];
  for (unsigned i = 0; i < 16 / sizeof(Element); ++i)
    each[i] = __atomic_load_n(static_cast<const Element*>(address) + i, __ATOMIC_RELAXED);
  std::memcpy(&found, each, 16);
  return found;
}

// What is asked for must be there as well.
template <class Element>
static inline void prefetch_exchanged(const void* address) {
  const uintptr_t at = uintptr_t(address);
  bool inside = false;
  for (int d = 0; d < 2; ++d)
    inside |= at >= exchanged_from[d] && at + sizeof(Element) <= exchanged_to[d];
  outside += !inside;
}

// c[16×8] += a · b over INNER elements, laid out over a warp as the instruction has them.
template <int INNER, bool FLOAT16>
static inline void multiply_on_cpu(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = lane_here(), g = lane / 4, q = lane % 4;
  std::memcpy(warp_here->a[lane], a, 16);
  warp_here->b[lane][0] = b0, warp_here->b[lane][1] = b1;
  meet();
  constexpr int EACH = INNER / 8;  // elements in 32 bits
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * q + i % 2;
    double sum = c[i];
    for (int k = 0; k < INNER; ++k) {
      const int half = k / (4 * EACH), from = k % (4 * EACH) / EACH, part = k % EACH;
      const unsigned left = warp_here->a[row % 8 * 4 + from][row / 8 + 2 * half];
      const unsigned right = warp_here->b[column * 4 + from][half];
      const bool narrow = EACH == 2;
      // of a wide number the last 13 bits are not looked at
      const unsigned seen = 0xffffe000u;
      const auto of_half = FLOAT16 ? of_f16 : of_bf16;
      const float x = narrow ? of_half(left >> 16 * part & 0xffff) : __uint_as_float(left & seen);
      const float y = narrow ? of_half(right >> 16 * part & 0xffff) : __uint_as_float(right & seen);
      sum += double(x) * y;
    }
    c[i] = float(sum);
  }
  meet();
}

// ---- the launch ahead of this one
// Until all threads have awaited it, what it makes is not there, and what stands in the place of this
// one's results is still read.
struct Place {
  unsigned char* bytes;
  size_t size;
  int made;  // or else to be left alone
};
static std::vector<std::pair<Place, std::vector<unsigned char>>> before_launch;
static void end_launch_ahead() noexcept {
  for (auto& [place, held] : before_launch)
    if (place.made)
      std::copy(held.begin(), held.end(), place.bytes);
    else
      outside += !std::equal(held.begin(), held.end(), place.bytes);
}
static std::unique_ptr<std::barrier<void (*)() noexcept>> launch_ahead;
static thread_local bool has_awaited;
static inline void await_launch_ahead_on_cpu() {
  has_awaited = true;
  launch_ahead->arrive_and_wait();
}
static void begin_beside_launch_ahead(const Place* places, int count, int threads) {
  before_launch.clear();
  for (int i = 0; i < count; ++i) {
    const Place& place = places[i];
    before_launch.push_back({place, {place.bytes, place.bytes + place.size}});
  }
  for (auto& [place, held] : before_launch)
    if (place.made) std::memset(place.bytes, 0xff, place.size);  // NaNs
  launch_ahead = std::make_unique<std::barrier<void (*)() noexcept>>(threads, end_launch_ahead);
}

// ---- clusters
struct Barrier {
  int bytes;
  short pending, phase;
};
static std::mutex barriers;
static inline void settle(Barrier* barrier) {
  if (barrier->pending == 0 && barrier->bytes == 0) barrier->pending = 1, barrier->phase ^= 1;
}
static inline Barrier* barrier_at(unsigned address) {
  return reinterpret_cast<Barrier*>(uintptr_t(address));
}

template <class Arguments>
struct Job {
  void (*kernel)(const Arguments);
  const Arguments* arguments;
  Block* block;
  Dim thread, place;
};

// `missing`: so many of the last blocks never run; `seconds`: how long is waited for them. `places`:
// of the launch ahead. The loads that lay outside, the copies that are not aligned and the results
// that were written too early, or -1.
template <class Arguments>
static int launch(void (*kernel)(const Arguments), const Arguments* arguments, Dim grid, int threads,
                  int cluster, int shared_bytes, const uintptr_t* exchanged, int missing,
                  double seconds, const Place* places = nullptr, int count = 0) {
  gridDim = grid;
  cycles_a_second = (1ll << 32) / seconds;
  outside = 0;
  for (int d = 0; d < 2; ++d)
    exchanged_from[d] = exchanged[2 * d], exchanged_to[d] = exchanged[2 * d + 1];
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Job<Arguments>>> jobs;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x - missing; ++x) {
        auto block = std::make_unique<Block>();
        block->meeting = std::make_unique<std::barrier<>>(threads);
        void* const memory = mmap(nullptr, shared_bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
        if (memory == MAP_FAILED) return -1;
        std::memset(memory, 0xa5, shared_bytes);  // nobody may count on zeros
        block->shared = static_cast<unsigned char*>(memory);
        if (x % cluster == 0) {
          clusters.push_back(std::make_unique<Cluster>());
          clusters.back()->meeting = std::make_unique<std::barrier<>>(threads * cluster);
        }
        block->cluster = clusters.back().get();
        block->cluster->shared[x % cluster] = block->shared;
        for (int w = 0; w < threads / 32; ++w) block->warps.push_back(std::make_unique<Warp>());
        for (int t = 0; t < threads; ++t)
          jobs.push_back(std::make_unique<Job<Arguments>>(Job<Arguments>{
              kernel, arguments, block.get(), {unsigned(t), 0, 0}, {x, y, z}}));
        blocks.push_back(std::move(block));
      }
  begin_beside_launch_ahead(places, count, int(jobs.size()));
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 1 << 19);
  std::vector<pthread_t> running;
  for (auto& job : jobs) {
    pthread_t made;
    const auto run = [](void* given) -> void* {
      auto* const own = static_cast<Job<Arguments>*>(given);
      threadIdx = own->thread, blockIdx = own->place;
      block_here = own->block, warp_here = own->block->warps[threadIdx.x / 32].get();
      shared = own->block->shared;
      own->kernel(*own->arguments);
      if (!has_awaited) launch_ahead->arrive_and_drop();
      return nullptr;
    };
    if (pthread_create(&made, &small, run, job.get())) return -1;
    running.push_back(made);
  }
  for (pthread_t thread : running) pthread_join(thread, nullptr);
  for (auto& block : blocks) munmap(block->shared, shared_bytes);
  return outside;
}
