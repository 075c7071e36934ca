// Asynchronous copies, and loads of matrices. A copy arrives when it is awaited (COPIES_ARRIVE_LATE),
// and its place is spoilt until then, or at once: what is read too soon shows by the one, what is
// overwritten too soon by the other.
#pragma once
#include "cuda_on_cpu.h"

struct Copy {
  void* to;
  const void* from;
  int size, there;
  void arrive() const {
    std::memset(to, 0, size);
    std::memcpy(to, from, there);
  }
};
static thread_local std::vector<std::vector<Copy>> copies_under_way;
static thread_local std::vector<Copy> copies_begun;

// `size` bytes, the first `there` of them from memory, the others zeros; both ends must be multiples
// of the size.
static inline void copy_on_cpu(void* to, const void* from, int size, int there) {
  outside += (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size != 0;
  const Copy copy{to, from, size, there};
  if (!COPIES_ARRIVE_LATE) return copy.arrive();
  std::memset(to, 0x5a, size);
  copies_begun.push_back(copy);
}
static inline void commit_on_cpu() {
  copies_under_way.push_back(std::move(copies_begun));
  copies_begun.clear();
}
// Until all but so many of what was committed have arrived.
static inline void await_on_cpu(unsigned left) {
  for (; copies_under_way.size() > left; copies_under_way.erase(copies_under_way.begin()))
    for (const Copy& copy : copies_under_way.front()) copy.arrive();
}

// Four matrices of 8 x 8, transposed: each lane gives the address of a row.
static inline uint4 ldmatrix_on_cpu(const void* row) {
  auto& rows = warp_here->rows;
  const int lane = lane_here();
  meet();
  rows[lane] = static_cast<const unsigned short*>(row);
  meet();
  unsigned short found[8];
  for (int i = 0; i < 8; ++i) found[i] = rows[i / 2 * 8 + lane % 4 * 2 + i % 2][lane / 4];
  meet();
  uint4 all;
  std::memcpy(&all, found, 16);
  return all;
}
