// SPDX-License-Identifier: Apache-2.0
//
// Wrappers of the PTX instructions that Hopper (compute capability 9.0) has beyond ptx/sm80.cuh, but for wgmma
// (ptx/wgmma.cuh): barriers in shared memory, tensor copies, registers that move between warpgroups. One instruction
// each; named are the instruction and its section in the PTX ISA manual.
#pragma once

#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/sm90/args.h"

namespace fovea::cuda {

// ---- barriers in shared memory: a phase ends when `count` arrivals and all expected bytes are there ----

// mbarrier.init (Parallel Synchronization: mbarrier).
__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// fence.mbarrier_init (membar/fence): what was initialised is seen by copies, too.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// mbarrier.arrive.expect_tx: one arrival, and so many bytes more.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// mbarrier.arrive.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same, of the threads that may: an instruction that is predicated, no branch.
__device__ __forceinline__ void barrier_arrive_if(bool may, u32 barrier) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
               "r"(int(may))
               : "memory");
}
// red.global.add: four neighbouring floats added in L2, by the threads that may.
__device__ __forceinline__ void reduce4_if(bool may, float* to, const float (&v)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n}" ::"l"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(int(may))
      : "memory");
}
// mbarrier.try_wait.parity: until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}
// cp.async.mbarrier.arrive.noinc (Data Movement: cp.async): arrives once this thread's cp.async copies have.
__device__ __forceinline__ void copy_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// bar.arrive (Parallel Synchronization: bar): counts at barrier `id` and goes on; the others are in sync(id, threads).
__device__ __forceinline__ void arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// griddepcontrol.wait (Parallel Synchronization: griddepcontrol): until the kernels that this one was launched behind
// have ended and their writes are seen; nothing where it was launched as usual.
__device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents (Parallel Synchronization: griddepcontrol): the kernel behind this one may start.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- clusters of blocks ----

// %cluster_ctarank (Special Registers): this block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// mapa (Data Movement: mapa): where another block of the cluster has what lies at this address here.
__device__ __forceinline__ u32 address_of(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// barrier.cluster (Parallel Synchronization: barrier.cluster): all threads of the cluster that have not ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
// mbarrier.arrive at a barrier of any block of the cluster (address_of): this thread has read. What it has written the
// other block need not see: .release.cluster would wait until all of memory does, sums in L2 included.
__device__ __forceinline__ void barrier_arrive_there(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// st.shared::cluster (Data Movement: st): a word to shared memory of any block of the cluster (address_of).
__device__ __forceinline__ void store_there(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
// st.async (Data Movement: st.async): four floats to shared memory of another block; their bytes are counted at a
// barrier of that block. Both by addresses in the cluster (address_of).
__device__ __forceinline__ void store_there_counted(u32 to, const float (&x)[4], u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}
// cp.async.bulk (Data Movement: cp.async.bulk) to shared memory of another block; its bytes are counted there.
__device__ __forceinline__ void bulk_copy_there(u32 to, u32 from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// ---- copies by the tensor memory accelerator ----

// Of a tensor's five dimensions, innermost first: column, row, head, batch2, batch1.
struct Coordinates {
  int column, row, head, batch2, batch1;
};

// cp.async.bulk.tensor (Data Movement: cp.async.bulk.tensor): a box into shared memory, zero outside of the tensor;
// its bytes are counted at `barrier`.
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap& map, u32 barrier, const Coordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch2), "r"(at.batch1)
      : "memory");
}
// cp.async.bulk.prefetch.tensor (Data Movement: cp.async.bulk.prefetch.tensor): a box into L2.
__device__ __forceinline__ void tensor_prefetch(const TensorMap& map, const Coordinates& at) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map), "r"(at.column),
               "r"(at.row), "r"(at.head), "r"(at.batch2), "r"(at.batch1)
               : "memory");
}
// The other way; what lies outside of the tensor is not written.
__device__ __forceinline__ void tensor_store(const TensorMap& map, u32 from, const Coordinates& at) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(from), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch2), "r"(at.batch1)
               : "memory");
}
// cp.async.bulk (Data Movement: cp.async.bulk): contiguous bytes, a multiple of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// cp.async.bulk.commit_group, cp.async.bulk.wait_group.read (Data Movement): this thread's stores have read all that
// they write, but for the newest kPending groups.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk from shared to global memory.
__device__ __forceinline__ void bulk_store(void* to, u32 from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
// cp.reduce.async.bulk (Data Movement: cp.reduce.async.bulk): contiguous floats of shared memory are added to global
// memory.
__device__ __forceinline__ void bulk_add(float* to, u32 from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// cp.async.bulk.wait_group: what this thread's bulk copies write has been written.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ld.acquire, red.release (Data Movement: ld; Parallel Synchronization: red): a count that blocks hand on, with what
// was written before.
__device__ __forceinline__ u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ u32 load_relaxed(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(u32* to, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// fence.acq_rel (Parallel Synchronization: membar): releases before a relaxed addition, acquires after a relaxed load.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// red.relaxed (Parallel Synchronization: red).
__device__ __forceinline__ void add_relaxed(u32* to, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// fence.proxy.async: of all memory.
__device__ __forceinline__ void fence_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// fence.proxy.async (membar/fence): what this thread wrote to shared memory is seen by wgmma and by copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers and fragments ----

// setmaxnreg (Miscellaneous: setmaxnreg): of the warpgroup, for each thread. The sum over the warpgroups must not
// exceed what the launch had, or the first waits for ever.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// stmatrix (Warp-level Matrix Store: stmatrix): ldmatrix the other way.
__device__ __forceinline__ void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// cvt.rn.relu (Data Movement: cvt): as pack(), negative numbers become 0.
template <Type kType>
__device__ __forceinline__ u32 pack_positive(float x, float y) {
  u32 r;
  if constexpr (kType == Type::kBf16) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  }
  return r;
}

// max.NaN (Half Precision Comparison: max): of both halves, NaN where either is.
template <Type kType>
__device__ __forceinline__ u32 largest_or_nan(u32 x, u32 y) {
  u32 r;
  if constexpr (kType == Type::kBf16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  }
  return r;
}

// min.u16x2, set.eq.f16x2 (Integer: min; Half Precision Comparison: set): all ones in each half of x that is at least
// the half of `threshold`, which is at most 0x7c00 (the halves are compared as numbers, and beyond lie those that are
// none).
__device__ __forceinline__ u32 halves_at_least(u32 x, u32 threshold) {
  u32 mask;
  asm("{\n.reg .b32 least;\nmin.u16x2 least, %1, %2;\nset.eq.u32.f16x2 %0, least, %2;\n}"
      : "=r"(mask)
      : "r"(x), "r"(threshold));
  return mask;
}

}  // namespace fovea::cuda
