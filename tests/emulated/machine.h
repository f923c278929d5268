// SPDX-License-Identifier: Apache-2.0
//
// What the text of a kernel calls when it runs on the CPU: a GPU that is played. text/ has the instructions' wrappers
// (ptx/*.cuh) and CUDA's own words in terms of these functions; machine.cpp, synchronise.cpp, copies.cpp and
// matrices.cpp have the functions. Every kernel is compiled with this, so it includes little.
//
// Each thread of a block is a fiber: it runs until it must wait. Which one runs next, how long a warp stands still and
// when a copy arrives is drawn by the seed. The machine ends the process with a report when it sees a fault.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

struct Index {
  u32 x, y, z;
};

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// ---- where a thread is ----

Index thread_index();
Index block_index();
Index grid_size();
Index block_size();
u32 cluster_rank();

// ---- shared memory ----
// An address is an offset in the block's memory, as on a GPU. Bits 24 and up are the block's number in its cluster
// plus one where the address came from mapa; 0 is the block's own. Below kFirst nothing lies, so that 0 is no address.

constexpr u32 kFirst = 1024;

unsigned char* shared_memory();
u32 shared_address(const void* pointer);
// Fails where a copy is filling these bytes.
void read_shared(u32 address, void* to, u32 bytes);
// Fails where a copy is filling them, or is reading them.
void write_shared(u32 address, const void* from, u32 bytes);

// ---- threads wait for threads ----

void sync(u32 id, u32 threads);
void arrive(u32 id, u32 threads);
int sync_or(int mine);
void cluster_sync();
// Others run; where nobody can, this thread goes on.
void pause();
// A thread has read a number in global memory. One that reads the same again is taken to wait until it changes.
void looked(const u32* at, u32 value);

void barrier_init(u32 barrier, int count);
void barrier_arrive(u32 barrier);
void barrier_arrive_there(u32 barrier);
void barrier_expect(u32 barrier, int bytes);
void barrier_wait(u32 barrier, u32 parity);

// ---- copies: they arrive later, in any order ----

// Of a tensor, by the map that the driver made.
struct Place {
  int of[5];
};
void tensor_load(u32 to, const void* map, u32 barrier, const Place& place);
void tensor_store(const void* map, u32 from, const Place& place);
void store_there_counted(u32 to, const float (&x)[4], u32 barrier);
void bulk_load(u32 to, const void* from, int bytes, u32 barrier);
void bulk_copy_there(u32 to, u32 from, int bytes, u32 barrier);
void bulk_store(void* to, u32 from, int bytes, bool adds);
void bulk_commit();
void bulk_wait(int pending, bool only_read);
// The first `bytes` of `size`, the rest zero.
void thread_copy(u32 to, const void* from, u32 bytes, u32 size);
void thread_copy_commit();
void thread_copy_wait(int pending);
void thread_copy_arrive(u32 barrier);

// ---- a warp's lanes meet ----

void warp_sync();
u32 shuffle(u32 value, int from_lane);
u32 ballot(bool mine);
u32 any_bits(u32 mine);
void load_matrices(u32 (&to)[4], u32 address, bool transposed);
void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d, bool transposed);
void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16);

// wgmma of a warp's 16 rows: done at once or, by the seed, when it is waited for.
struct Wgmma {
  float* d;
  const u32* registers;  // a, or null
  u64 a, b;              // descriptors
  int columns;
  bool accumulate, rows_inside, a_columns, bf16;
};
void wgmma(const Wgmma& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

// ---- numbers of 16 bits ----

u16 to_bf16(float x);
u16 to_fp16(float x);
float of_fp16(u16 x);
inline float of_bf16(u16 x) { return __builtin_bit_cast(float, u32{x} << 16); }

}  // namespace emulated
