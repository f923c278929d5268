# SPDX-License-Identifier: Apache-2.0
"""Hopper's instructions, one small kernel for each wrapper of ptx/sm90.cuh and for every shape that ptx/wgmma.cuh offers.
Numbers are small integers wherever products are summed, so that every sum is exact and equal is equal.
"""

import math

import pytest
import torch
from small_kernel import DEVICE, TensorMap, normal, poison, run

KINDS = {torch.bfloat16: "Type::kBf16", torch.float16: "Type::kFp16"}
WAIT = "const long long begun = clock64(); while (clock64() - begun < 20000) {}"  # longer than what it must wait for


def hopper(body, *parameters, **options):
    return run(body, *parameters, hopper=True, files=("ptx/sm90.cuh", "ptx/wgmma.cuh", "tile/panels.h", "tile/tile.cuh"), **options)


# ---- barriers ----


def test_a_barrier_counts_its_arrivals():
    """Three warps arrive late, one waits: two phases and their parities. What it reads was written before."""
    got = poison(2, 3, dtype=torch.int32)
    hopper(f"""if (thread.index == 0) {{ barrier_init(shared, 3); barrier_init(shared + 8, 1); barrier_init_fence(); }}
        sync();
        for (int phase = 0; phase < 2; ++phase) {{
          if (thread.warp > 0 && lane == 0) {{
            {WAIT}
            store_shared(shared + 16 + thread.warp * 4, u32(100 * phase + thread.warp));
            barrier_arrive(shared);
            barrier_wait(shared + 8, phase);
          }} else if (thread.warp == 0) {{
            barrier_wait(shared, phase);
            if (lane < 3) p0[phase * 3 + lane] = int(load_shared_word(shared + 20 + lane * 4));
            __syncwarp();
            if (lane == 0) barrier_arrive(shared + 8);
          }}
        }}""", got, threads=128, shared=64)  # fmt: skip
    assert got.tolist() == [[1, 2, 3], [101, 102, 103]]


@pytest.mark.parametrize("bytes_", [16, 1024, 4096])
def test_expected_bytes_and_a_copy(bytes_):
    """Four copies through two buffers; a phase ends when all of its bytes are there."""
    n = bytes_ // 4
    source, got = torch.arange(4 * n, dtype=torch.int32, device=DEVICE), poison(4 * n, dtype=torch.int32)
    hopper(f"""if (lane == 0) {{ barrier_init(shared, 1); barrier_init(shared + 8, 1); barrier_init_fence(); }}
        __syncwarp();
        for (int i = 0; i < 4; ++i) {{
          const u32 barrier = shared + i % 2 * 8, buffer = shared + 128 + i % 2 * {bytes_};
          if (lane == 0) {{
            barrier_expect(barrier, {bytes_});
            bulk_load(buffer, p0 + i * {n}, {bytes_ - 16 if bytes_ > 16 else 16}, barrier);
            if ({bytes_} > 16) bulk_load(buffer + {bytes_ - 16}, p0 + i * {n} + {n - 4}, 16, barrier);
          }}
          barrier_wait(barrier, i / 2 & 1);
          for (int j = lane; j < {n}; j += 32) p1[i * {n} + j] = int(load_shared_word(buffer + j * 4));
          __syncwarp();
        }}""", source, got, shared=128 + 2 * bytes_)  # fmt: skip
    assert torch.equal(got, source)


def test_copies_of_threads_arrive_at_a_barrier():
    source, got = torch.arange(128, dtype=torch.int32, device=DEVICE), poison(128, dtype=torch.int32)
    hopper("""if (lane == 0) { barrier_init(shared, 32); barrier_init_fence(); }
        __syncwarp();
        copy16(shared + 64 + lane * 16, p0 + lane * 4);
        copy_arrive(shared);
        barrier_wait(shared, 0);
        for (int i = lane; i < 128; i += 32) p1[i] = int(load_shared_word(shared + 64 + (127 - i) * 4));""",
        source, got, shared=64 + 512)  # fmt: skip
    assert torch.equal(got, source.flip(0))


def test_arriving_without_waiting():
    """Warp 1 hands on through barrier 1 and goes on; barrier 2 says that its place is free again."""
    got = poison(3, 32, dtype=torch.int32)
    hopper("""for (int i = 0; i < 3; ++i) {
          if (thread.warp == 1) {
            if (i > 0) sync(2, 64);
            store_shared(shared + lane * 4, u32(100 * i + lane));
            arrive(1, 64);
          } else {
            sync(1, 64);
            p0[i * 32 + lane] = int(load_shared_word(shared + (lane ^ 31) * 4));
            if (i < 2) arrive(2, 64);
          }
        }""", got, threads=64, shared=128)  # fmt: skip
    lane = torch.arange(32, device=DEVICE)
    assert torch.equal(got.long(), 100 * torch.arange(3, device=DEVICE)[:, None] + (lane ^ 31))


def test_kernels_before_have_ended():
    """Each launch lets the next begin at once, which waits for what this one writes last of all."""
    got = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    hopper("""let_next_kernel_start();
        wait_for_kernels_before();
        volatile int* const place = p0 + block_index();
        const int found = *place;
        const long long begun = clock64();
        while (clock64() - begun < 100000) {
        }
        *place = found + 1;""", got, threads=1, blocks=4, times=20)  # fmt: skip
    assert got.tolist() == [20] * 4


# ---- clusters ----


def test_ranks_and_barriers_of_a_cluster():
    """Every block arrives at the barrier of the block of rank 1, after it has written; that block reads."""
    ranks, found, flags = poison(8, dtype=torch.int32), poison(8, dtype=torch.int32), poison(8, dtype=torch.int32)
    hopper(f"""const u32 rank = cluster_rank();
        const int first = int(block_index()) / 4 * 4;
        if (lane == 0) {{ barrier_init(shared, 4); barrier_init_fence(); p0[block_index()] = int(rank); }}
        cluster_sync();
        if (lane == 0) {{
          {WAIT}
          *static_cast<volatile int*>(p2 + block_index()) = 10 + int(rank);
          __threadfence();
          barrier_arrive_there(address_of(shared, 1));
        }}
        if (rank == 1) {{
          barrier_wait(shared, 0);
          if (lane < 4) p1[first + lane] = *static_cast<volatile int*>(p2 + first + lane);
        }}
        cluster_sync();""", ranks, found, flags, blocks=8, cluster=4, shared=64)  # fmt: skip
    assert ranks.tolist() == [0, 1, 2, 3] * 2 and found.tolist() == [10, 11, 12, 13] * 2


def test_words_to_the_next_block_of_a_cluster():
    got = poison(8, dtype=torch.int32)
    hopper("""const u32 rank = cluster_rank();
        if (lane == 0) store_there(address_of(shared, (rank + 1) % 4), rank + 100 * block_index());
        cluster_sync();
        if (lane == 0) p0[block_index()] = int(load_shared_word(shared));""", got, blocks=8, cluster=4, shared=64)  # fmt: skip
    assert got.tolist() == [303, 0, 101, 202, 703, 400, 501, 602]


def test_copies_to_the_next_block_of_a_cluster():
    got = poison(4, 64, dtype=torch.int32)
    hopper("""const u32 rank = cluster_rank(), from = shared + 128, to = shared + 512;
        if (lane == 0) { barrier_init(shared, 1); barrier_init_fence(); barrier_expect(shared, 256); }
        for (int i = lane; i < 64; i += 32) {
          store_shared(from + i * 4, rank * 1000 + i);
          store_shared(to + i * 4, 0xdeadu);
        }
        fence_async();
        __syncwarp();
        cluster_sync();
        if (lane == 0) {
          const u32 next = (rank + 1) % 4;
          bulk_copy_there(address_of(to, next), from, 256, address_of(shared, next));
        }
        barrier_wait(shared, 0);
        for (int i = lane; i < 64; i += 32) p0[rank * 64 + i] = int(load_shared_word(to + i * 4));
        cluster_sync();""", got, blocks=4, cluster=4, shared=1024)  # fmt: skip
    rank = (torch.arange(4, device=DEVICE)[:, None] + 3) % 4
    assert torch.equal(got.long(), rank * 1000 + torch.arange(64, device=DEVICE))


def test_floats_to_the_next_block_of_a_cluster_are_counted():
    got = poison(4, 128, dtype=torch.float32)
    hopper("""const u32 rank = cluster_rank(), to = shared + 512;
        if (lane == 0) { barrier_init(shared, 1); barrier_init_fence(); barrier_expect(shared, 512); }
        cluster_sync();
        const u32 next = (rank + 1) % 4;
        float x[4];
        for (int e = 0; e < 4; ++e) x[e] = float(rank * 1000 + lane * 4 + e);
        store_there_counted(address_of(to, next) + lane * 16, x, address_of(shared, next));
        barrier_wait(shared, 0);
        for (int i = lane; i < 128; i += 32) p0[rank * 128 + i] = load_shared(to + i * 4);
        cluster_sync();""", got, blocks=4, cluster=4, shared=1024)  # fmt: skip
    rank = (torch.arange(4, device=DEVICE)[:, None] + 3) % 4
    assert torch.equal(got, (rank * 1000 + torch.arange(128, device=DEVICE)).float())


def test_some_threads_arrive_without_a_branch():
    """Of 32 lanes every third arrives; the phase ends with the last of them."""
    got = poison(1, dtype=torch.int32)
    hopper("""if (lane == 0) { barrier_init(shared, 11); barrier_init_fence(); }
        __syncwarp();
        barrier_arrive_if(lane % 3 == 0, shared);
        barrier_wait(shared, 0);
        if (lane == 0) p0[0] = 1;""", got, shared=64)  # fmt: skip
    assert got.tolist() == [1]


def test_some_threads_add_without_a_branch():
    """Of 32 lanes every third adds four numbers of its own to the same four."""
    got = torch.zeros(8, device=DEVICE)
    hopper("""const float v[4] = {float(lane), 1, 0.5f, float(-lane)};
        reduce4_if(lane % 3 == 0, p0 + 4, v);""", got, shared=64)  # fmt: skip
    total = float(sum(range(0, 32, 3)))
    assert got.tolist() == [0, 0, 0, 0, total, 11, 5.5, -total]


# ---- tensor copies ----


def tensor_and_map(dtype, columns, box_columns, box_rows):
    """2 x 2 x 3 planes of 20 rows, which lie among NaN."""
    storage = poison(2, 2, 3, 24, columns + 16, dtype=dtype)
    tensor = storage[:, :, :, 2:22, 16 // storage.element_size() :][..., :columns]
    return storage, tensor, TensorMap(tensor, (box_columns, box_rows, 1, 1, 1))


def boxed(tensor, column, row, head, batch2, batch1, columns, rows):
    """The box at this place, zero outside of the tensor."""
    want = torch.zeros(rows, columns, dtype=tensor.dtype, device=DEVICE)
    plane = tensor[batch1, batch2, head]
    for r in range(rows):
        for c in range(columns):
            if 0 <= row + r < plane.shape[0] and 0 <= column + c < plane.shape[1]:
                want[r, c] = plane[row + r, column + c]
    return want


@pytest.mark.parametrize("at", [
    (0, 0, 0, 0, 0), (8, 3, 2, 0, 1), (0, 12, 1, 1, 0), (16, -5, 2, 1, 1), (-8, 30, 0, 0, 0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype, box", [
    (torch.bfloat16, 64), (torch.float16, 32), (torch.bfloat16, 16), (torch.float32, 32), (torch.float32, 8),
], ids=str)  # fmt: skip
def test_tensor_load(dtype, box, at):
    """A panel as `swizzled` has it; outside of the tensor, zeros."""
    columns, rows, size = box + 8, 16, 4 if dtype == torch.float32 else 2
    storage, tensor, mapped = tensor_and_map(dtype, columns, box, rows)
    tensor.copy_(normal(*tensor.shape))
    got = poison(rows, box, dtype=dtype)
    kind, load = ("float", "load_shared") if size == 4 else ("u16", "load_shared_half")
    column, row, head, batch2, batch1 = at
    hopper(f"""if (lane == 0) {{ barrier_init(shared, 1); barrier_init_fence(); barrier_expect(shared, {rows * box * size}); }}
        __syncwarp();
        if (lane == 0) tensor_load(shared + 1024, p0, shared, Coordinates{{{column}, {row}, {head}, {batch2}, {batch1}}});
        barrier_wait(shared, 0);
        for (int i = lane; i < {rows * box}; i += 32) {{
          const int row = i / {box}, byte = i % {box} * {size};
          p1[i] = {kind}({load}(shared + 1024 + swizzled<{box * size}>(row, byte / 16) + byte % 16));
        }}""", mapped, got, shared=1024 + rows * box * size)  # fmt: skip
    assert torch.equal(got, boxed(tensor, column, row, head, batch2, batch1, box, rows))


def test_tensor_prefetch():
    """It changes nothing that is read, and a place behind the tensor is no fault."""
    storage, tensor, mapped = tensor_and_map(torch.bfloat16, 72, 64, 16)
    tensor.copy_(normal(*tensor.shape))
    kept = storage.clone()
    got = poison(16, 64, dtype=torch.bfloat16)
    hopper(f"""if (lane == 0) {{
          barrier_init(shared, 1); barrier_init_fence(); barrier_expect(shared, {16 * 64 * 2});
          tensor_prefetch(p0, Coordinates{{8, 3, 2, 0, 1}});
          tensor_prefetch(p0, Coordinates{{8, 60, 2, 0, 1}});
          tensor_load(shared + 1024, p0, shared, Coordinates{{8, 3, 2, 0, 1}});
        }}
        __syncwarp();
        barrier_wait(shared, 0);
        for (int i = lane; i < {16 * 64}; i += 32) {{
          const int row = i / 64, byte = i % 64 * 2;
          p1[i] = u16(load_shared_half(shared + 1024 + swizzled<128>(row, byte / 16) + byte % 16));
        }}""", mapped, got, shared=1024 + 16 * 64 * 2)  # fmt: skip
    assert torch.equal(got, boxed(tensor, 8, 3, 2, 0, 1, 64, 16))
    assert torch.equal(storage.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("box, wait", [
    (64, "bulk_wait()"), (32, "bulk_wait()"), (16, "bulk_wait_read()"), (64, "bulk_wait_read<0>()"),
])  # fmt: skip
@pytest.mark.parametrize("at", [(0, 0, 0, 0, 0), (8, 3, 2, 0, 1), (16, 12, 1, 1, 0), (0, 15, 2, 1, 1)], ids=str)
def test_tensor_store(box, at, wait):
    """What lies outside of the tensor is not written, nor any other of it. (A store from before its beginning is an
    illegal instruction, unlike a load.)"""
    columns, rows = box + 8, 16
    storage, tensor, mapped = tensor_and_map(torch.float16, columns, box, rows)
    source = normal(rows, box, dtype=torch.float16)
    column, row, head, batch2, batch1 = at
    hopper(f"""for (int i = lane; i < {rows * box // 8}; i += 32) {{
          copy16(shared + swizzled<{box * 2}>(i / {box // 8}, i % {box // 8}), p1 + i * 8);
        }}
        copy_commit(); copy_wait<0>(); fence_async(); __syncwarp();
        if (lane == 0) {{
          tensor_store(p0, shared, Coordinates{{{column}, {row}, {head}, {batch2}, {batch1}}});
          bulk_commit();
          {wait};
        }}""", mapped, source, shared=rows * box * 2)  # fmt: skip
    want = torch.full_like(storage, math.nan)
    plane = want[:, :, :, 2:22, 8:][..., :columns][batch1, batch2, head]
    for r in range(rows):
        if 0 <= row + r < plane.shape[0]:
            width = min(box, columns - column)
            plane[row + r, column : column + width] = source[r, :width]
    assert torch.equal(storage.nan_to_num(nan=99), want.nan_to_num(nan=99))


def test_bulk_store():
    """Each of four blocks stores what one warp wrote, in two parts."""
    got = poison(4 * 64)
    hopper("""store_shared(shared + lane * 8, float2{float(lane), float(block_index())});
        fence_async();
        __syncwarp();
        if (lane == 0) {
          bulk_store(p0 + block_index() * 64, shared, 192);
          bulk_store(p0 + block_index() * 64 + 48, shared + 192, 64);
          bulk_commit();
          bulk_wait();
        }""", got, blocks=4, shared=256)  # fmt: skip
    block, lane = torch.meshgrid(torch.arange(4.0, device=DEVICE), torch.arange(32.0, device=DEVICE), indexing="ij")
    assert torch.equal(got.view(4, 32, 2), torch.stack([lane, block], 2))


def test_bulk_add():
    """Eight blocks add 64 tiles each, through two buffers that are filled again when they have been read."""
    got = torch.ones(64, device=DEVICE)
    hopper("""for (int i = 0; i < 64; ++i) {
          const u32 buffer = shared + i % 2 * 256;
          if (lane == 0) bulk_wait_read<1>();
          __syncwarp();
          store_shared(buffer + lane * 8, float2{float(i * lane), float(i)});
          fence_async();
          __syncwarp();
          if (lane == 0) { bulk_add(p0, buffer, 256); bulk_commit(); }
        }
        if (lane == 0) bulk_wait();""", got, blocks=8, shared=512)  # fmt: skip
    lane = torch.arange(32, device=DEVICE).float()
    total = 8 * 64 * 63 / 2
    assert torch.equal(got.view(32, 2), torch.stack([1 + total * lane, torch.full_like(lane, 1 + total)], 1))


def test_what_a_bulk_copy_wrote_is_seen_behind_its_wait():
    """By the thread that waits, of both of its groups."""
    got, places = poison(64, dtype=torch.int32), torch.zeros(128, device=DEVICE)
    hopper("""store_shared(shared + lane * 4, float(lane + 1)); store_shared(shared + 128 + lane * 4, float(lane + 50));
        fence_async(); __syncwarp();
        if (lane == 0) {
          bulk_add(p1, shared, 128); bulk_commit();
          bulk_add(p1 + 32, shared + 128, 128); bulk_commit();
          bulk_wait();
          for (int i = 0; i < 64; ++i) p0[i] = int(*static_cast<volatile float*>(p1 + i));
        }""", got, places, shared=256)  # fmt: skip
    assert got.tolist() == [*range(1, 33), *range(50, 82)]


def test_a_count_that_blocks_hand_on():
    """Each waits for its turn and adds to what the one before it wrote."""
    count, sums = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(32, dtype=torch.int32, device=DEVICE)
    hopper("""u32* const count = reinterpret_cast<u32*>(p0);
        while (load_acquire(count) != block_index()) {
        }
        p1[lane] = p1[lane] * 3 % 1009 + int(block_index()) + lane;
        __syncwarp();
        if (lane == 0) { __threadfence(); add_release(count, 1); }""", count, sums, blocks=64)  # fmt: skip
    want = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    for block in range(64):
        want = want * 3 % 1009 + block + torch.arange(32, dtype=torch.int32, device=DEVICE)
    assert count.item() == 64 and torch.equal(sums, want)


def test_sums_of_many_blocks_are_there_when_all_are_counted():
    """Bulk additions, a fence, a relaxed count; the last block waits for all and reads past its L1."""
    count, sums, got = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(128, device=DEVICE), torch.zeros(128, device=DEVICE)
    hopper("""u32* const count = reinterpret_cast<u32*>(p0);
        for (int i = lane; i < 128; i += 32) store_shared(shared + i * 4, float(block_index() + i));
        fence_async(); __syncwarp();
        if (lane == 0) { bulk_add(p1, shared, 512); bulk_commit(); bulk_wait(); fence_device(); add_relaxed(count, 1); }
        if (block_index() == 99) {
          while (load_relaxed(count) < 100) {
          }
          fence_device();
          const float4 x = load_summed(p1 + lane * 4);
          p2[lane * 4] = x.x; p2[lane * 4 + 1] = x.y; p2[lane * 4 + 2] = x.z; p2[lane * 4 + 3] = x.w;
        }""", count, sums, got, shared=512, blocks=100)  # fmt: skip
    assert torch.equal(got, 4950 + 100 * torch.arange(128, device=DEVICE).float())


def test_what_threads_wrote_is_copied_behind_the_fence():
    """To global memory, from where a bulk copy takes it."""
    place, got = poison(32, 64, dtype=torch.int32), poison(32, 64, dtype=torch.int32)
    hopper("""int* const mine = p0 + block_index() * 64;
        if (lane == 0) { barrier_init(shared, 1); barrier_init_fence(); }
        for (int i = lane; i < 64; i += 32) mine[i] = int(block_index()) * 100 + i;
        fence_async_all();
        __syncwarp();
        if (lane == 0) { barrier_expect(shared, 256); bulk_load(shared + 128, mine, 256, shared); }
        barrier_wait(shared, 0);
        for (int i = lane; i < 64; i += 32) p1[block_index() * 64 + i] = int(load_shared_word(shared + 128 + i * 4));""",
        place, got, blocks=32, shared=128 + 256)  # fmt: skip
    assert torch.equal(got.long(), 100 * torch.arange(32, device=DEVICE)[:, None] + torch.arange(64, device=DEVICE))


# ---- registers and fragments ----


def test_registers_move_between_warpgroups():
    """216 numbers of each thread at once need more than the 168 registers of the launch, where nothing is spilt; the
    second of the consumers gets its registers only when the copying warpgroup has given its own back."""
    source = torch.arange(216 * 256, device=DEVICE).float()
    got = poison(216 * 256)
    loads = "".join(f"v[{i}] = from[{i * 256}];" for i in range(216))
    stores = "".join(f"to[{i * 256}] = v[{i}] + v[{215 - i}];" for i in range(216))
    hopper(f"""if (thread.index < 128) {{
          fewer_registers<24>();
        }} else {{
          more_registers<240>();
          const float* const from = p0 + (thread.index - 128);
          float* const to = p1 + (thread.index - 128);
          float v[216];
          {loads}
          asm volatile("" ::: "memory");
          {stores}
        }}""", source, got, threads=384)  # fmt: skip
    rows = source.view(216, 256)
    assert torch.equal(got.view(216, 256), rows + rows.flip(0))


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(transposed):
    """ldmatrix the other way: lane l's pair of matrix n is elements 2 (l % 4), + 1 of row l / 4."""
    source, got = normal(4, 8, 8, dtype=torch.float16), poison(4, 8, 8, dtype=torch.float16)
    hopper(f"""u32 r[4];
        _Pragma("unroll") for (int n = 0; n < 4; ++n) r[n] = reinterpret_cast<const u32*>(p0)[n * 32 + lane];
        {"stmatrix_trans" if transposed else "stmatrix"}(shared + (lane ^ 9) * 16, r[0], r[1], r[2], r[3]);
        __syncwarp();
        for (int i = 0; i < 8; ++i) p1[lane * 8 + i] = load_shared_half(shared + (lane ^ 9) * 16 + i * 2);""",
        source, got, shared=512)  # fmt: skip
    assert torch.equal(got, source.transpose(1, 2) if transposed else source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pack_positive(dtype):
    x = torch.cat([normal(58) * 100, torch.tensor([0.0, -0.0, 1e-9, -1e-9, 3e4, -3e4], device=DEVICE)])
    packed = poison(64, dtype=dtype)
    hopper(f"reinterpret_cast<u32*>(p1)[lane] = pack_positive<{KINDS[dtype]}>(p0[2 * lane], p0[2 * lane + 1]);",
           x, packed)  # fmt: skip
    assert torch.equal(packed, x.clamp(min=0).to(dtype))
    assert not packed[x < 0].signbit().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_largest_or_nan(dtype):
    x, y = normal(64).to(dtype), normal(64).to(dtype)
    x[3], y[10], x[21], y[21] = float("nan"), float("nan"), float("inf"), -float("inf")
    got = poison(64, dtype=dtype)
    hopper(f"""reinterpret_cast<u32*>(p2)[lane] =
          largest_or_nan<{KINDS[dtype]}>(reinterpret_cast<u32*>(p0)[lane], reinterpret_cast<u32*>(p1)[lane]);""",
           x, y, got)  # fmt: skip
    torch.testing.assert_close(got, torch.maximum(x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threshold", [0, 1, 0x3FF, 0x400, 0x6789, 0x7BFF, 0x7C00])
def test_halves_at_least(threshold):
    """Every half, at both places at once."""
    got = poison(65536, dtype=torch.int32)
    hopper(f"""for (int i = lane; i < 65536; i += 32)
          p0[i] = int(halves_at_least(u32(i) | u32(65535 - i) << 16, {threshold}u | {threshold}u << 16));""", got)  # fmt: skip
    x = torch.arange(65536, device=DEVICE)
    want = (x >= threshold) * 0xFFFF + (65535 - x >= threshold) * 0xFFFF0000
    assert torch.equal(got.long() & 0xFFFFFFFF, want)


# ---- products of warpgroups ----

PRODUCT = """
// A matrix as panels of columns, each row swizzled, by 128 threads.
template <int kRows, int kColumns, int kPanel>
__device__ void load_panels(u32 to, const u16* from, int thread) {
  for (int i = thread; i < kRows * kColumns / 8; i += 128) {
    const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
    copy16(to + column / kPanel * kRows * kPanel * 2 + swizzled<kPanel * 2>(row, column % kPanel / 8), from + i * 8);
  }
}

// 64 x kN (+)= 64 x kInner x kInner x kN with the operands in the order that the flags name.
template <Type kType, int kN, int kInner, bool kRowsInside, bool kColumns>
__device__ void product(float (&d)[kN / 2], u32 a_at, const u16* a, u32 b_at, const u16* b, int thread) {
  constexpr int kPanelA = kColumns ? 64 : panel_columns(kInner);
  constexpr int kPanelB = panel_columns(kRowsInside ? kN : kInner);
  if constexpr (kColumns) load_panels<kInner, 64, kPanelA>(a_at, a, thread);
  else load_panels<64, kInner, kPanelA>(a_at, a, thread);
  if constexpr (kRowsInside) load_panels<kInner, kN, kPanelB>(b_at, b, thread);
  else load_panels<kN, kInner, kPanelB>(b_at, b, thread);
  copy_commit(); copy_wait<0>(); fence_async(); sync();
  const u32 a_low = descriptor_low(a_at, kColumns ? kInner * 128 : 16);
  const u32 b_low = descriptor_low(b_at, kRowsInside ? kInner * kPanelB * 2 : 16);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    const int panel_a = k / (kPanelA / 16), panel_b = k / (kPanelB / 16);
    const u32 a_step = kColumns ? k * 128 : panel_a * (64 * kPanelA * 2 / 16) + k % (kPanelA / 16) * 2;
    const u32 b_step = kRowsInside ? k * kPanelB * 2 : panel_b * (kN * kPanelB * 2 / 16) + k % (kPanelB / 16) * 2;
    wgmma_shared<kType, kRowsInside, kColumns>(d, descriptor(a_low + a_step, descriptor_high(kPanelA * 2)),
                                               descriptor(b_low + b_step, descriptor_high(kPanelB * 2)), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  sync();
}
"""


def integers(*shape, dtype):
    return torch.randint(-4, 5, shape, device=DEVICE).to(dtype)


def accumulators(values, columns):
    """What 128 threads have of 64 rows, as a matrix."""
    thread = torch.arange(128, device=DEVICE)
    row = thread // 32 * 16 + thread % 32 // 4
    matrix = poison(64, columns)
    for j in range(columns // 8):
        for e in range(4):
            matrix[row + 8 * (e >> 1), j * 8 + thread % 4 * 2 + (e & 1)] = values[:, 4 * j + e]
    return matrix


WIDTHS = list(range(16, 257, 16))


# Every width, and every swizzle of rows along the inner dimension, which does not know of the width.
SHAPES = [*((width, 64) for width in WIDTHS), *((width, inner) for width in (16, 80, 96, 128, 256) for inner in (80, 96, 128))]


@pytest.mark.parametrize("width, inner", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wgmma_of_shared_memory(width, inner, dtype):
    """Both operands in either order; what was in the accumulator does not matter to the first step (it is NaN)."""
    a, b = integers(64, inner, dtype=dtype), integers(width, inner, dtype=dtype)
    got = poison(4, 128, width // 2)
    orders = [(False, False), (True, False), (False, True), (True, True)]
    of_a, of_b = (a, a.T.contiguous()), (b, b.T.contiguous())
    calls = "".join(
        f"""{{ float d[{width // 2}];
          _Pragma("unroll") for (int i = 0; i < {width // 2}; ++i) d[i] = nanf("");
          product<{KINDS[dtype]}, {width}, {inner}, {str(rows).lower()}, {str(columns).lower()}>(
              d, shared, p{int(columns)}, shared + 16384, p{2 + int(rows)}, thread.index);
          _Pragma("unroll") for (int i = 0; i < {width // 2}; ++i) p4[({n} * 128 + thread.index) * {width // 2} + i] = d[i]; }}"""
        for n, (rows, columns) in enumerate(orders)
    )
    hopper(calls, *of_a, *of_b, got, threads=128, shared=16384 + width * inner * 2, before=PRODUCT)
    want = a.double() @ b.double().T
    for n, order in enumerate(orders):
        assert torch.equal(accumulators(got[n], width).double(), want), order


def rows_in_registers(inner):
    """`a` of p0's 64 rows, as mma has it."""
    return f"""u32 a[{inner // 4}];
        _Pragma("unroll") for (int k = 0; k < {inner // 16}; ++k) _Pragma("unroll") for (int e = 0; e < 4; ++e) {{
          const int row = thread.warp * 16 + g + e % 2 * 8, column = k * 16 + e / 2 * 8 + t * 2;
          a[4 * k + e] = *reinterpret_cast<const u32*>(p0 + row * {inner} + column);
        }}"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_wgmma_of_registers(width, dtype):
    """Adds to what is there: a in registers as mma has it, b's rows are the inner dimension."""
    inner = 64
    a, b = integers(64, inner, dtype=dtype), integers(inner, width, dtype=dtype)
    got = poison(128, width // 2)
    hopper(f"""constexpr int kPanel = panel_columns({width});
        load_panels<{inner}, {width}, kPanel>(shared, p1, thread.index);
        {rows_in_registers(inner)}
        float d[{width // 2}];
        _Pragma("unroll") for (int i = 0; i < {width // 2}; ++i) d[i] = float(i);
        copy_commit(); copy_wait<0>(); fence_async(); sync();
        const u32 low = descriptor_low(shared, {inner} * kPanel * 2);
        wgmma_fence();
        _Pragma("unroll") for (int k = 0; k < {inner // 16}; ++k)
          wgmma_registers<{KINDS[dtype]}>(d, a + 4 * k, descriptor(low + k * kPanel * 2, descriptor_high(kPanel * 2)));
        wgmma_commit(); wgmma_wait<0>(); pin(d);
        _Pragma("unroll") for (int i = 0; i < {width // 2}; ++i) p2[thread.index * {width // 2} + i] = d[i];""",
        a, b, got, threads=128, shared=inner * width * 2, before=PRODUCT)  # fmt: skip
    started = torch.arange(width // 2, device=DEVICE).float().expand(128, -1)
    want = a.double() @ b.double() + accumulators(started, width)
    assert torch.equal(accumulators(got, width).double(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_wgmma_of_registers_and_columns(width, dtype):
    """The inner dimension is b's columns; what was in the accumulator does not matter to the first step (it is NaN)."""
    inner = 64
    a, b = integers(64, inner, dtype=dtype), integers(width, inner, dtype=dtype)
    got = poison(128, width // 2)
    hopper(f"""load_panels<{width}, {inner}, {inner}>(shared, p1, thread.index);
        {rows_in_registers(inner)}
        float d[{width // 2}];
        _Pragma("unroll") for (int i = 0; i < {width // 2}; ++i) d[i] = nanf("");
        copy_commit(); copy_wait<0>(); fence_async(); sync();
        const u32 low = descriptor_low(shared, 16);
        wgmma_fence();
        _Pragma("unroll") for (int k = 0; k < {inner // 16}; ++k)
          wgmma_registers<{KINDS[dtype]}, false>(d, a + 4 * k, descriptor(low + k * 2, descriptor_high({inner} * 2)), k > 0);
        wgmma_commit(); wgmma_wait<0>(); pin(d);
        _Pragma("unroll") for (int i = 0; i < {width // 2}; ++i) p2[thread.index * {width // 2} + i] = d[i];""",
        a, b, got, threads=128, shared=inner * width * 2, before=PRODUCT)  # fmt: skip
    assert torch.equal(accumulators(got, width).double(), a.double() @ b.double().T)


def test_wgmma_waits_for_the_older_groups():
    """The first of two groups is read while the second may still run; then the second."""
    a, b = integers(64, 64, dtype=torch.bfloat16), integers(64, 64, dtype=torch.bfloat16)
    got = poison(2, 128, 32)
    hopper("""load_panels<64, 64, 64>(shared, p0, thread.index); load_panels<64, 64, 64>(shared + 8192, p1, thread.index);
        copy_commit(); copy_wait<0>(); fence_async(); sync();
        const u32 a = descriptor_low(shared, 16), b = descriptor_low(shared + 8192, 16), high = descriptor_high(128);
        float d[32], e[32];
        wgmma_fence();
        _Pragma("unroll") for (int k = 0; k < 4; ++k)
          wgmma_shared<Type::kBf16>(d, descriptor(a + k * 2, high), descriptor(b + k * 2, high), k > 0);
        wgmma_commit();
        _Pragma("unroll") for (int k = 0; k < 4; ++k)
          wgmma_shared<Type::kBf16>(e, descriptor(b + k * 2, high), descriptor(a + k * 2, high), k > 0);
        wgmma_commit();
        wgmma_wait<1>(); pin(d);
        _Pragma("unroll") for (int i = 0; i < 32; ++i) p2[thread.index * 32 + i] = d[i];
        wgmma_wait<0>(); pin(e);
        _Pragma("unroll") for (int i = 0; i < 32; ++i) p2[4096 + thread.index * 32 + i] = e[i];""",
        a, b, got, threads=128, shared=16384, before=PRODUCT)  # fmt: skip
    want = a.double() @ b.double().T
    assert torch.equal(accumulators(got[0], 64).double(), want)
    assert torch.equal(accumulators(got[1], 64).double(), want.T)
