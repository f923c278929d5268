# SPDX-License-Identifier: Apache-2.0
"""The device layer, one small kernel for each wrapper of ptx/sm80.cuh and each part of tile/tile.cuh and of score/, compiled
by NVRTC and compared with PyTorch. An error in one of them is an error of every kernel.
"""

import math

import pytest
import torch
from small_kernel import DEVICE, architecture, fragment, normal, poison, run


# ---- copies, shared memory ----


@pytest.mark.parametrize("count", [0, 2, 8, 14, 16])
def test_copy16(count):
    source, got = torch.arange(16, dtype=torch.uint8, device=DEVICE) + 1, poison(16, dtype=torch.uint8)
    run(f"""store_shared(shared, uint4{{9, 9, 9, 9}});
        copy16(shared, p0, {count}); copy_commit(); copy_wait<0>();
        *reinterpret_cast<uint4*>(p1) = load_shared4(shared);""", source, got, threads=1, shared=64)  # fmt: skip
    want = torch.where(torch.arange(16, device=DEVICE) < count, source, 0)
    assert torch.equal(got, want)


def test_copy4_and_groups_of_copies():
    source, got = torch.arange(64, dtype=torch.int32, device=DEVICE), poison(64, dtype=torch.int32)
    run("""copy4(shared + lane * 4, p0 + lane, lane % 3 != 0 ? 4 : 0); copy_commit();
        copy4(shared + 128 + lane * 4, p0 + 32 + lane, 4); copy_commit();
        copy_wait<1>(); p1[lane] = int(load_shared_word(shared + lane * 4));
        copy_wait<0>(); p1[32 + lane] = int(load_shared_word(shared + 128 + lane * 4));""", source, got, shared=256)  # fmt: skip
    want = source.clone()
    want[:32:3] = 0
    assert torch.equal(got, want)


def test_barriers():
    """Of the block, and of half of its warps at a barrier of their own."""
    got = poison(128, dtype=torch.int32)
    run("""store_shared(shared + thread.index * 4, u32(thread.index)); sync();
        int sum = int(load_shared_word(shared + (127 - thread.index) * 4));
        sync(); store_shared(shared + thread.index * 4, u32(1000 + thread.index));
        sync(1 + thread.warp / 2, 64);
        sum += int(load_shared_word(shared + (thread.index ^ 63) * 4));
        p0[thread.index] = sum;""", got, threads=128, shared=512)  # fmt: skip
    n = torch.arange(128, dtype=torch.int32, device=DEVICE)
    assert torch.equal(got, 127 - n + 1000 + (n ^ 63))


def test_kernels_that_overlap_wait_for_each_other():
    """Each adds 1 to what the one before it wrote last of all."""
    got = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    run(f"""begin_kernel<{architecture()}>();
        volatile int* const place = p0 + block_index();
        const int found = *place;
        const long long begun = clock64();
        while (clock64() - begun < 100000) {{
        }}
        *place = found + 1;""", got, threads=1, blocks=4, times=20)  # fmt: skip
    assert got.tolist() == [20] * 4


def test_shared_loads_and_stores():
    got = poison(10)
    run("""if (lane == 0) {
          store_shared(shared, 1.5f); store_shared(shared + 4, __float_as_uint(2.5f));
          store_shared(shared + 8, float2{3.5f, 4.5f});
          p0[0] = load_shared(shared); p0[1] = __uint_as_float(load_shared_word(shared + 4));
          const float2 two = load_shared2(shared + 8); p0[2] = two.x; p0[3] = two.y;
          const uint4 four = load_shared4(shared);
          p0[4] = __uint_as_float(four.x); p0[5] = __uint_as_float(four.w);
          store_shared(shared + 16, 0x40203F80u);
          p0[6] = __uint_as_float(u32(load_shared_half(shared + 16)) << 16);
          p0[7] = __uint_as_float(u32(load_shared_half(shared + 18)) << 16);
          store_global(p0 + 8 - 8 % 4, four);
        }""", got, shared=64)  # fmt: skip
    assert got.tolist()[:8] == [1.5, 2.5, 3.5, 4.5, 1.5, 4.5, 1.0, 2.5]


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    source, got = torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.float16), poison(32, 8)
    run(f"""for (int i = lane; i < 32; i += 32) copy16(shared + i * 16, p0 + i * 8);
        copy_commit(); copy_wait<0>(); sync();
        u32 r[4]; {"ldmatrix_trans" if transposed else "ldmatrix"}(r, shared + lane * 16);
        for (int n = 0; n < 4; ++n) {{
          p1[lane * 8 + n * 2] = low<Type::kFp16>(r[n]); p1[lane * 8 + n * 2 + 1] = high<Type::kFp16>(r[n]);
        }}""", source, got, shared=512)  # fmt: skip
    lane = torch.arange(32, device=DEVICE)
    for n in range(4):
        matrix = torch.arange(n * 64, n * 64 + 64, device=DEVICE).view(8, 8)
        matrix = matrix.T if transposed else matrix
        for e in range(2):
            assert torch.equal(got[:, n * 2 + e], matrix[lane // 4, lane % 4 * 2 + e].float())


# ---- arithmetic ----


def test_uniform_and_opaque():
    got = poison(32, dtype=torch.int32)
    run("p0[lane] = opaque(int(uniform(0x12345678u))) + opaque(lane);", got)
    assert torch.equal(got, 0x12345678 + torch.arange(32, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("name, function, error", [("ex2", torch.exp2, 3e-7), ("lg2", torch.log2, 3e-7), ("rcp", torch.reciprocal, 2e-7)])  # fmt: skip
def test_functions(name, function, error):
    x = torch.linspace(-20, 20, 4096, device=DEVICE)
    x = x if name == "ex2" else x.abs() + 0.01
    got = poison(4096)
    run(f"for (int i = lane; i < 4096; i += 32) p1[i] = {name}(p0[i]);", x, got)
    want = function(x.double())
    assert ((got - want).abs() <= error * want.abs().clamp(min=1 if name == "lg2" else 0)).all()
    edges = torch.tensor([-math.inf, math.nan], device=DEVICE)
    got = poison(2)
    run("for (int i = 0; i < 2; ++i) p1[i] = ex2(p0[i]);", edges, got)
    assert got[0] == 0 and got[1].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pack_low_high(dtype):
    kind = "Type::kBf16" if dtype == torch.bfloat16 else "Type::kFp16"
    x, packed, back = normal(64), poison(64, dtype=dtype), poison(64)
    run(f"""const u32 v = pack<{kind}>(p0[2 * lane], p0[2 * lane + 1]);
        reinterpret_cast<u32*>(p1)[lane] = v; p2[2 * lane] = low<{kind}>(v); p2[2 * lane + 1] = high<{kind}>(v);""",
        x, packed, back)  # fmt: skip
    assert torch.equal(packed, x.to(dtype)) and torch.equal(back, x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 128])
def test_product_of_tiles(dtype, columns):
    """load_tile, Tile's exchange, both orders of ldmatrix, mma and what a fragment is: A B^T, A^T's and B's too."""
    kind = "Type::kBf16" if dtype == torch.bfloat16 else "Type::kFp16"
    a, b, v = normal(16, columns, dtype=dtype), normal(32, columns, dtype=dtype), normal(32, columns, dtype=dtype)
    s, o = poison(32, 1, 4, 4), poison(32, 1, columns // 8, 4)
    tile = f"Tile<{columns}>"
    run(f"""using T = {tile};
        const u32 sa = shared, sb = sa + 16 * T::kRowBytes, sv = sb + 32 * T::kRowBytes;
        load_tile<T, 16, 32>(sa, p0, T::kRowBytes, 16, T::kRowBytes, lane);
        load_tile<T, 32, 32>(sb, p1, T::kRowBytes, 32, T::kRowBytes, lane);
        load_tile<T, 32, 32>(sv, p2, T::kRowBytes, 32, T::kRowBytes, lane);
        copy_commit(); copy_wait<0>(); sync();
        const T::Lane rows(0, lane), columns_first(0, lane, true);
        float s[4][4] = {{}}, o[{columns // 8}][4] = {{}};
        for (int kk = 0; kk < {columns // 16}; ++kk) {{
          u32 a[4]; ldmatrix(a, sa + rows.at(0, kk));
          for (int j = 0; j < 2; ++j) {{
            u32 b[4]; ldmatrix(b, sb + columns_first.at(j * 16, kk));
            mma<{kind}>(s[2 * j], a, b[0], b[1]); mma<{kind}>(s[2 * j + 1], a, b[2], b[3]);
          }}
        }}
        for (int j = 0; j < 4; ++j) for (int e = 0; e < 4; ++e) p3[(lane * 4 + j) * 4 + e] = s[j][e];
        for (int kk = 0; kk < 2; ++kk) {{
          u32 p[4]; operand<{kind}>(p, s, kk);
          for (int j = 0; j < {columns // 16}; ++j) {{
            u32 b[4]; ldmatrix_trans(b, sv + rows.at(kk * 16, j));
            mma<{kind}>(o[2 * j], p, b[0], b[1]); mma<{kind}>(o[2 * j + 1], p, b[2], b[3]);
          }}
        }}
        for (int j = 0; j < {columns // 8}; ++j) for (int e = 0; e < 4; ++e)
          p4[(lane * {columns // 8} + j) * 4 + e] = o[j][e];""",
        a, b, v, s, o, shared=80 * columns * 2)  # fmt: skip
    want = a.double() @ b.double().T
    assert torch.allclose(fragment(s).double(), want, atol=1e-4, rtol=1e-5)
    want = want.to(dtype).double() @ v.double()
    assert torch.allclose(fragment(o).double(), want, atol=0.05 * math.sqrt(columns), rtol=2e-2)


def test_reduce4():
    got, values = torch.zeros(8, device=DEVICE), torch.arange(8, dtype=torch.float32, device=DEVICE)
    for arch in {80, 90 if architecture() >= 90 else 80}:
        got.zero_()
        run(f"""const float v[4] = {{p1[lane % 2 * 4], p1[lane % 2 * 4 + 1], p1[lane % 2 * 4 + 2], p1[lane % 2 * 4 + 3]}};
            reduce4<{arch}>(p0 + lane % 2 * 4, v);""", got, values)  # fmt: skip
        assert torch.equal(got, values * 16)


# ---- tiles ----


@pytest.mark.parametrize("columns", [16, 48, 64, 80, 128])
@pytest.mark.parametrize("rows, bytes_", [(32, 1), (17, 1), (0, 1), (-3, 1), (32, 0), (20, 0.5)])
def test_load_tile_ends_where_the_tensor_ends(columns, rows, bytes_):
    """What lies beyond is NaN and must not come in."""
    existing = int(columns * bytes_) // 8 * 8
    source = torch.full((40, columns + 8), math.nan, dtype=torch.float16, device=DEVICE)
    source[: max(rows, 0), :existing] = 1 + torch.arange(max(rows, 0) * existing, device=DEVICE).view(max(rows, 0), existing) % 99
    got = poison(32, columns, dtype=torch.float16)
    run(f"""using T = Tile<{columns}>;
        load_tile<T, 32, 128>(shared, p0, {(columns + 8) * 2}, {rows}, {existing * 2}, thread.index);
        copy_commit(); copy_wait<0>(); sync();
        for (int i = thread.index; i < 32 * {columns}; i += 128) {{
          const int row = i / {columns}, column = i % {columns};
          p1[i] = load_shared_half(shared + T::offset(row, column / 8) + column % 8 * 2);
        }}""", source, got, threads=128, shared=32 * columns * 2)  # fmt: skip
    want = torch.zeros(32, columns, dtype=torch.float16, device=DEVICE)
    want[: max(rows, 0), :existing] = source[: max(min(rows, 32), 0), :existing]
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout, element", [("Tile", 2), ("Tile32", 4)])
@pytest.mark.parametrize("bytes_", [0, 2, 38, 64, 100])
def test_load_tile_of_a_bias(layout, element, bytes_):
    """Rows that end within a chunk of 16 bytes."""
    columns, bytes_ = 64, bytes_ // element * element
    dtype = torch.float16 if element == 2 else torch.float32
    source = torch.full((16, 80), math.nan, dtype=dtype, device=DEVICE)
    source[:, : bytes_ // element] = normal(16, bytes_ // element, dtype=dtype)
    got = poison(16, columns, dtype=dtype)
    kind = "u16" if element == 2 else "float"
    load = "load_shared_half" if element == 2 else "load_shared"
    run(f"""using T = {layout}<{columns}>;
        load_tile<T, 16, 32, false>(shared, p0, {80 * element}, 16, {bytes_}, lane);
        copy_commit(); copy_wait<0>(); sync();
        for (int i = lane; i < 16 * {columns}; i += 32) {{
          const int row = i / {columns}, byte = i % {columns} * {element};
          reinterpret_cast<{kind}*>(p1)[i] = {load}(shared + T::offset(row, byte / 16) + byte % 16);
        }}""", source, got, shared=16 * columns * element)  # fmt: skip
    want = torch.zeros(16, columns, dtype=dtype, device=DEVICE)
    want[:, : bytes_ // element] = source[:, : bytes_ // element]
    assert torch.equal(got, want)


def banks(offsets):
    """How often the fullest bank of a shared memory access of 16 bytes a lane is met, eight lanes at a time."""
    worst = 0
    for first in range(0, len(offsets), 8):
        part = [o // 16 % 8 for o in offsets[first : first + 8]]
        worst = max(worst, max(part.count(x) for x in part))
    return worst


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
def test_exchange_keeps_banks_apart(columns):
    got = poison(64, columns // 8, dtype=torch.int32)
    run(f"""for (int i = lane; i < 64 * {columns // 8}; i += 32)
          p0[i] = int(Tile<{columns}>::offset(i / {columns // 8}, i % {columns // 8}));""", got)  # fmt: skip
    offsets = got.tolist()
    flat = sorted(x for row in offsets for x in row)
    assert flat == list(range(0, 64 * columns * 2, 16)), "every chunk has a place of its own"
    for chunk in range(columns // 8):
        assert banks([offsets[row][chunk] for row in range(8)]) == 1, "eight rows of a chunk, as ldmatrix reads them"


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("exist", [40, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_store_rows(vectors, exist, dtype):
    """By 16 bytes where that is allowed, what is left of a row one by one."""
    columns, rows = 48, 11
    values = normal(16, columns, dtype=dtype)
    got = poison(16, 64, dtype=dtype)
    width = columns * (2 if dtype == torch.float32 else 1)  # in numbers of 16 bits
    size = values.element_size()
    run(f"""using T = Tile<{width}>;
        load_tile<T, 16, 32>(shared, p0, {columns * size}, 16, {columns * size}, lane);
        copy_commit(); copy_wait<0>(); sync();
        store_rows<T, {size}, 16>(p1, math::Strides{{0, 0, 0, 64, 1}}, shared, {rows}, {exist}, {str(vectors).lower()}, lane);""",
        values, got, shared=16 * columns * size)  # fmt: skip
    assert torch.equal(got[:rows, :exist], values[:rows, :exist])
    assert got[rows:].isnan().all() and got[:, exist:].isnan().all()


def test_split_into_pairs():
    x = torch.cat([normal(60) * 1000, torch.tensor([0.0, 1e-3, -16384.0, 6e4], device=DEVICE)])
    got = poison(64)
    run("""u32 hi, lo; split(p0[2 * lane], p0[2 * lane + 1], hi, lo);
        p1[2 * lane] = low<Type::kFp16>(hi) + low<Type::kFp16>(lo);
        p1[2 * lane + 1] = high<Type::kFp16>(hi) + high<Type::kFp16>(lo);""", x, got)  # fmt: skip
    assert ((got - x).abs() <= x.abs() * 2.0**-21 + 2.0**-24).all()


def test_scale_exponent():
    x = torch.tensor([0.0, 1.0, 3e-5, 12345.0, 1e30, 1e-38, 1e-45], device=DEVICE)
    got = poison(7, dtype=torch.int32)
    run("for (int i = 0; i < 7; ++i) p1[i] = scale_exponent(__float_as_uint(p0[i]));", x, got)
    scaled = x.double() * 2.0 ** got.double()
    assert got[0] == 0 and (scaled < 2.0**15).all()
    assert ((scaled[1:5] >= 2.0**14)).all()


# ---- scores ----


def test_tanh_near_zero():
    x = torch.linspace(-0.7, 0.7, 4096, device=DEVICE)
    got = poison(4096)
    run("for (int i = lane; i < 4096; i += 32) p1[i] = tanh(ApproxOfSmall(p0[i])).x;", x, got)
    want = torch.tanh(x.double())
    assert ((got - want).abs() <= 1.5e-7 * want.abs()).all()


def test_approximate_tanh():
    """An absolute error that a score can have, and no surprise at the ends."""
    x = torch.cat([torch.linspace(-12, 12, 4093, device=DEVICE), torch.tensor([-math.inf, math.inf, math.nan], device=DEVICE)])
    got = poison(4096)
    run("for (int i = lane; i < 4096; i += 32) p1[i] = tanh(Approx(p0[i])).x;", x, got)
    assert ((got - torch.tanh(x.double())).abs()[:-1] < 4e-7).all() and got[-1].isnan()


@pytest.mark.parametrize("transposed", [False, True])
def test_keep_is_the_rule(transposed):
    """Decisions of a fragment against math/dropout.h's, element by element, for S and for S transposed."""
    got, want = poison(32, 2, 8, 4), poison(32, 2, 8, 4)
    run(f"""constexpr Features S{{.dropout = DropoutRule::kFovea}};
        constexpr bool kTransposed = {str(transposed).lower()};
        Keep<S, kTransposed, 2, 8> keep;
        keep.head = math::DropoutHead::make(77, 5, 3); keep.limit = 20000u << 16;
        const int row0 = 32, column0 = 128;
        keep.start_rows(row0, g); keep.prepare(thread, row0, column0);
        for (int i = 0; i < 2; ++i) for (int jj = 0; jj < 4; ++jj) {{
          bool kept[2][4]; keep.decide(kept, thread, i, jj, row0, column0);
          for (int half = 0; half < 2; ++half) for (int n = 0; n < 4; ++n) {{
            const int at = ((lane * 2 + i) * 8 + 2 * jj + half) * 4 + n;
            const int row = row0 + i * 16 + g + (n >> 1) * 8, column = column0 + (2 * jj + half) * 8 + t * 2 + (n & 1);
            p0[at] = kept[half][n];
            p1[at] = math::dropout_value(keep.head, kTransposed ? column : row, kTransposed ? row : column) >= 20000u;
          }}
        }}""", got, want)  # fmt: skip
    assert torch.equal(got, want) and 0.6 < got.mean() < 0.8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", ["kBf16", "kFp16", "kFp32"])
def test_bias_reaches_its_scores(transposed, bias):
    """A tile of 32 queries x 64 keys; the fragment begins inside of it."""
    dtype = {"kBf16": torch.bfloat16, "kFp16": torch.float16, "kFp32": torch.float32}[bias]
    plane = normal(32, 64, dtype=dtype)
    size, layout = plane.element_size(), "Tile32<64>" if bias == "kFp32" else "Tile<64>"
    # S: rows are queries 16..31, columns all keys. Transposed: rows are keys 32..63, columns queries 16..31.
    tiles, columns = (2, 2) if transposed else (1, 8)
    got = poison(32, tiles, columns, 4)
    place = "32, 16, 32, 16" if transposed else "16, 0, 16, 0"
    run(f"""constexpr Features S{{.bias = BiasTile::{bias}}};
        constexpr bool kTransposed = {str(transposed).lower()};
        using Inputs = ScoreInputs<S, kTransposed, 32, 64, 32>;
        load_tile<{layout}, 32, 32>(shared, p0, {64 * size}, 32, {64 * size}, lane);
        copy_commit(); copy_wait<0>(); sync();
        Args a; a.scale = 1; const Place place;
        const Scores<S, kTransposed, {tiles}> scores(a, place, 0, 1, 0, 0);
        float s[{tiles}][{columns}][4] = {{}};
        scores.add<Inputs, 64>(s, thread, shared, {place});
        for (int i = 0; i < {tiles}; ++i) for (int j = 0; j < {columns}; ++j) for (int e = 0; e < 4; ++e)
          p1[((lane * {tiles} + i) * {columns} + j) * 4 + e] = s[i][j][e];""",
        plane, got, shared=32 * 64 * size)  # fmt: skip
    want = plane[16:32, 32:64].T if transposed else plane[16:32]
    assert torch.equal(fragment(got), want.float())


@pytest.mark.parametrize("transposed", [False, True])
def test_mask_bits_reach_their_scores(transposed):
    words = torch.randint(-(2**31), 2**31, (32, 2), dtype=torch.int64, device=DEVICE).to(torch.int32)
    bits = (words.to(torch.int64)[:, torch.arange(64, device=DEVICE) // 32] >> (torch.arange(64, device=DEVICE) % 32)) & 1
    tiles, columns = (2, 2) if transposed else (1, 8)
    got = poison(32, tiles, columns, 4)
    place = "32, 16, 32, 16" if transposed else "16, 0, 16, 0"
    run(f"""constexpr Features S{{.mask = true}};
        constexpr bool kTransposed = {str(transposed).lower()};
        using Inputs = ScoreInputs<S, kTransposed, 32, 64, 32>;
        for (int i = lane; i < 64; i += 32) store_shared(shared + i * 4, u32(p0[i]));
        sync();
        Args a; a.scale = 1; const Place place;
        const Scores<S, kTransposed, {tiles}> scores(a, place, 0, 1, 0, 0);
        float s[{tiles}][{columns}][4] = {{}};
        scores.add<Inputs, 64>(s, thread, shared, {place});
        for (int i = 0; i < {tiles}; ++i) for (int j = 0; j < {columns}; ++j) for (int e = 0; e < 4; ++e)
          p1[((lane * {tiles} + i) * {columns} + j) * 4 + e] = s[i][j][e];""",
        words, got, shared=1024)  # fmt: skip
    allowed = bits[16:32, 32:64].T if transposed else bits[16:32]
    assert torch.equal(fragment(got) == 0, allowed == 1) and torch.equal(fragment(got) == -math.inf, allowed == 0)


@pytest.mark.parametrize("keys, words, want", [
    (0.0, [-1, -1], "kFull"), (-math.inf, [-1, -1], "kEmpty"), (0.0, [0, 0], "kEmpty"),
    (0.0, [-1, -2], "kEdge"), (0.0, [0, 1], "kEdge"), ("one", [-1, -1], "kEdge"), ("one", [0, 0], "kEmpty"),
])  # fmt: skip
def test_steps_that_masks_hide_or_leave_alone(keys, words, want):
    """Of 16 queries and 64 keys; what other queries' words say does not matter."""
    bits = torch.tensor([[5, 5]] * 16 + [words] * 16, dtype=torch.int32, device=DEVICE)
    vector = torch.zeros(64, device=DEVICE)
    if keys == "one":
        vector[37] = -math.inf
    else:
        vector[:] = keys
    got = poison(32, dtype=torch.int32)
    run("""constexpr Features S{.mask = true, .key_term = true, .key_mask = true};
        using Inputs = ScoreInputs<S, false, 32, 64, 32>;
        for (int i = lane; i < 64; i += 32) {
          store_shared(shared + Inputs::kMask + i * 4, u32(p0[i]));
          store_shared(shared + Inputs::kVector + i * 4, p1[i]);
        }
        sync();
        p2[lane] = int(Scores<S, false, 1>::classify<Inputs, 64>(thread, shared, 16));""",
        bits, vector, got, shared=1024)  # fmt: skip
    assert (got == ["kEmpty", "kFull", "kEdge"].index(want)).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_edge_of_the_band(transposed):
    """Keys outside of a window and past the end, against Band::allowed."""
    got, want = poison(32, 2, 4, 4), poison(32, 2, 4, 4)
    run(f"""constexpr Features S{{.banded = true}};
        constexpr bool kTransposed = {str(transposed).lower()};
        const auto band = math::Band<int>::make(80, 75, false, 20, 9, false);
        const int row0 = 48, column0 = 56 / 16 * 16;
        float s[2][4][4] = {{}};
        mask_edge<S, kTransposed>(s, thread, band, row0, column0);
        for (int i = 0; i < 2; ++i) for (int j = 0; j < 4; ++j) for (int e = 0; e < 4; ++e) {{
          const int row = row0 + i * 16 + g + (e >> 1) * 8, column = column0 + j * 8 + t * 2 + (e & 1);
          const int query = kTransposed ? column : row, key = kTransposed ? row : column;
          const bool counts = query < 80;  // rows past the last query are nobody's
          p0[((lane * 2 + i) * 4 + j) * 4 + e] = counts ? s[i][j][e] : 0;
          p1[((lane * 2 + i) * 4 + j) * 4 + e] = counts && !band.allowed(query, key) ? -kInfinity : 0;
        }}""", got, want)  # fmt: skip
    assert torch.equal(got, want) and (got == 0).any() and (got < 0).any()
