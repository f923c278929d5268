// SPDX-License-Identifier: Apache-2.0
//
// src/cuda/device/ptx/sm90.cuh for a kernel that runs on the CPU. See there.
#pragma once

#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/sm90/args.h"

namespace fovea::cuda {

// ---- barriers in shared memory ----

inline void barrier_init(u32 barrier, int count) { emulated::barrier_init(barrier, count); }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 barrier, int bytes) { emulated::barrier_expect(barrier, bytes); }
inline void barrier_arrive(u32 barrier) { emulated::barrier_arrive(barrier); }
inline void barrier_arrive_if(bool may, u32 barrier) {
  if (may) {
    barrier_arrive(barrier);
  }
}
inline void reduce4_if(bool may, float* to, const float (&v)[4]) {
  if (may) {
    reduce4<90>(to, v);
  }
}
inline void barrier_wait(u32 barrier, u32 parity) { emulated::barrier_wait(barrier, parity); }
inline void copy_arrive(u32 barrier) { emulated::thread_copy_arrive(barrier); }
inline void arrive(int id, int threads) { emulated::arrive(u32(id), u32(threads)); }
inline void wait_for_kernels_before() {}
inline void let_next_kernel_start() {}

// ---- clusters of blocks ----

inline u32 cluster_rank() { return emulated::cluster_rank(); }
inline u32 address_of(u32 address, u32 rank) { return address | (rank + 1) << 24; }
inline void cluster_sync() { emulated::cluster_sync(); }
inline void barrier_arrive_there(u32 barrier) { emulated::barrier_arrive_there(barrier); }
inline void store_there(u32 address, u32 value) { emulated::write_shared(address, &value, 4); }
inline void store_there_counted(u32 to, const float (&x)[4], u32 barrier) {
  emulated::store_there_counted(to, x, barrier);
}
inline void bulk_copy_there(u32 to, u32 from, int bytes, u32 barrier) {
  emulated::bulk_copy_there(to, from, bytes, barrier);
}

// ---- copies by the tensor memory accelerator ----

struct Coordinates {
  int column, row, head, batch2, batch1;
};
inline emulated::Place place_of(const Coordinates& at) { return {{at.column, at.row, at.head, at.batch2, at.batch1}}; }
inline void tensor_load(u32 to, const TensorMap& map, u32 barrier, const Coordinates& at) {
  emulated::tensor_load(to, &map, barrier, place_of(at));
}
inline void tensor_prefetch(const TensorMap&, const Coordinates&) {}
inline void tensor_store(const TensorMap& map, u32 from, const Coordinates& at) {
  emulated::tensor_store(&map, from, place_of(at));
}
inline void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  emulated::bulk_load(to, from, bytes, barrier);
}
inline void bulk_commit() { emulated::bulk_commit(); }
template <int kPending = 0>
inline void bulk_wait_read() {
  emulated::bulk_wait(kPending, true);
}
inline void bulk_store(void* to, u32 from, int bytes) { emulated::bulk_store(to, from, bytes, false); }
inline void bulk_add(float* to, u32 from, int bytes) { emulated::bulk_store(to, from, bytes, true); }
inline void bulk_wait() { emulated::bulk_wait(0, false); }

inline u32 load_acquire(const u32* from) {
  emulated::looked(from, *from);
  return *from;
}
inline u32 load_relaxed(const u32* from) { return load_acquire(from); }
inline void add_release(u32* to, u32 value) { *to += value; }
inline void fence_device() {}
inline void add_relaxed(u32* to, u32 value) { *to += value; }
inline void fence_async_all() {}
inline void fence_async() {}

// ---- registers and fragments ----

template <int kRegisters>
inline void more_registers() {}
template <int kRegisters>
inline void fewer_registers() {}

inline void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) { emulated::store_matrices(address, a, b, c, d, false); }
inline void stmatrix_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  emulated::store_matrices(address, a, b, c, d, true);
}

template <Type kType>
inline u32 pack_positive(float x, float y) {
  return pack<kType>(x < 0 ? 0.f : x, y < 0 ? 0.f : y);
}

template <Type kType>
inline u32 largest_or_nan(u32 x, u32 y) {
  const auto of = [](float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; };
  return pack<kType>(of(low<kType>(x), low<kType>(y)), of(high<kType>(x), high<kType>(y)));
}

inline u32 halves_at_least(u32 x, u32 threshold) {
  u32 mask = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    mask |= (x >> shift & 0xffff) >= (threshold >> shift & 0xffff) ? 0xffffu << shift : 0;
  }
  return mask;
}

}  // namespace fovea::cuda
