# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels on the CPU: `fovea check` with a driver and a compiler that play a GPU (docs/testing.md).

Every case is a problem, forward and backward, with the kernels that the host plans for it, against the fp64 reference.
It names fields of those kernels' Specs, so that a case stays one of them when plans change. Then faults are planted
into the kernels' text and must be found.

    FOVEA_BUILD        the build directory (build)
    EMULATED_SEEDS     how many schedules of each case (2)
    EMULATED_TABLE     reduced or full: every row of the case table as well
    EMULATED_RANDOM    so many random problems as well
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = (ROOT / os.environ.get("FOVEA_BUILD", "build")).resolve()
PLAYED, FOVEA = BUILD / "tests/emulated", BUILD / "cli/fovea"
SEEDS = range(1, 1 + int(os.environ.get("EMULATED_SEEDS", "2")))

# A problem, and what its kernels' Specs must say.
CASES = [
    ("b=1 hq=2 hk=1 sq=100 sk=130 d=64 bf16",
     "sm90_forward ctas guess; sm90_backward direct delay key_parts; sm90_backward_parts"),
    ("b=1 hq=1 sq=1500 sk=600 d=64 bf16", "sm90_backward bulk key_parts last_parts"),
    ("b=1 hq=6 hk=1 sq=200 sk=600 d=128 fp16", "sm90_backward stores_first converts last_parts"),
    ("b=1 hq=1 sq=1000 sk=600 d=128 bf16", "sm90_backward same_step stores_first converts last_parts"),
    ("b=1 hq=1 sq=2100 sk=600 d=128 bf16", "sm90_backward step=80 last_parts"),
    ("b=1 hq=1 sq=600 sk=350 d=256 bf16", "sm90_wide_backward last_parts"),
    ("b=2 hq=4 hk=2 sq=1 sk=200 d=64 bf16", "sm90_forward"),
    ("b=2 hq=4 hk=2 sq=150 sk=200 d=128 bf16 causal",
     "sm90_schedule; sm90_forward banded resident ahead; sm90_backward banded bulk halves delay converts"),
    ("b=2 hq=2 sq=2048 sk=200 d=128 bf16", "sm90_backward step=80 converts"),
    ("b=2 hq=2 sq=2170 sk=200 d=128 fp16", "sm90_backward step=80 stores_first; backward_convert turned_dq"),
    ("b=3 hq=2 d=128 bf16 causal seqs_q=200,0,230 seqs_k=190,60,350", "sm90_backward banded ragged halves delay"),
    ("b=1 hq=4 hk=2 sq=150 sk=300 d=128 bf16 causal wide=k,v", "sm90_backward halves same_step fp32_results"),
    ("b=2 hq=2 sq=200 sk=300 d=128 bf16 causal", "sm90_backward banded bulk stores_first converts"),
    ("b=2 hq=2 sq=150 sk=200 d=64 bf16 window=30,10", "sm90_forward left_edge; sm90_backward tiles left_edge direct"),
    ("b=3 hq=2 sq=150 sk=200 d=64 bf16 used_q=150,10,60 used_k=30,20,200",
     "sm90_forward ragged; sm90_backward ragged bulk longest_first"),
    ("b=3 hq=2 d=128 bf16 causal seqs_q=150x3 seqs_k=250x3 used_k=250,100,0", "sm90_backward banded ragged halves converts"),
    ("b=2 hq=2 sq=150 sk=200 d=96 bf16 used_k=150,60 window=40,0",
     "sm90_forward banded ragged left_edge; sm90_backward ragged stores_first"),
    ("b=3 hq=2 hk=1 d=80 fp16 causal seqs_q=100,0,130 seqs_k=90,60,150 alibi=h sink",
     "sm90_forward banded ragged alibi; reduce_sink"),
    ("b=1 hq=1 sq=64 sk=1100 d=64 bf16 mask=b,1,1,k",
     "sm90_mask; sm90_forward key_mask prepared; sm90_backward key_term key_mask"),
    ("b=2 hq=2 sq=150 sk=200 d=64 bf16 bias=b,h,q,k mask=b,1,q,k",
     "sm90_mask; sm90_forward bias mask; sm90_backward_mask; sm90_backward bias mask dbias_store"),
    ("b=2 hq=2 sq=100 sk=90 d=64 bf16 bias=b,h,q,k mask=b,1,q,1 values=nan_where_masked",
     "sm90_forward bias query_term; sm90_backward bias query_term"),
    ("b=1 hq=2 sq=50 sk=90 d=64 bf16 causal align=tl bias=b,h,1,k values=nan_where_masked",
     "sm90_backward banded key_term column_sum"),
    ("b=2 hq=1 sq=50 sk=190 d=256 fp16 causal align=tl bias=b,1,1,k need=q,k,v values=nan_where_masked", "sm90_wide_backward banded key_term"),
    ("b=3 hq=2 hk=1 sq=65 sk=260 d=192 bf16 window=-1,40 align=tl softcap=20 bias=1,h,1,k:fp32 values=nan_where_masked",
     "generic_backward banded key_term"),
    ("b=2 hq=2 sq=100 sk=90 d=64 bf16 used_q=50,0 bias=b,h,1,k mask=b,1,q,k values=nan_where_masked", "sm90_backward ragged mask key_term"),
    ("b=2 hq=2 sq=70 sk=90 d=32 fp32 bias=b,h,q,1 bias2=b,h,1,k mask=b,h,q,1 values=nan_where_masked",
     "generic_forward key_term query_term; generic_backward key_term query_term"),
    ("b=2 hq=1 sq=100 sk=90 d=64 bf16 bias=1,h,q,k bias2=b,1,1,k mask=b,1,q,1 values=nan_where_masked",
     "sm90_backward bias key_term query_term; sm90_bias_gradient bias key_term query_term bias_outside"),
    ("b=2 hq=1 sq=100 sk=190 d=256 fp16 bias=b,1,q,1 mask=b,h,1,k values=nan_where_masked", "generic_backward key_term query_term"),
    ("b=2 hq=1 sq=100 sk=70 d=32 fp32 used_q=30,100 causal align=tl bias=1,1,q,k bias2=b,1,1,k values=nan_where_masked",
     "generic_bias_gradient ragged banded key_term"),
    ("b=2 hq=1 sq=100 sk=70 d=640 dv=16 bf16 used_q=30,100 causal align=tl bias=1,1,q,k:fp32 bias2=b,1,1,k need=bias values=nan_where_masked",
     "generic_chunked_bias_gradient ragged banded key_term"),
    ("b=1 hq=2 sq=130 sk=200 d=256 bf16 bias=b,h,q,k:fp32 bias2=1,h,q,k",
     "sm90_forward bias bias2 planes=1; generic_backward; sm90_bias_gradient bias2"),
    ("b=4 hq=2 sq=49 sk=49 d=32 bf16 bias=1,h,q,k", "sm90_forward bias ctas; sm90_small_backward; small_bias_sum"),
    ("b=2 hq=2 sq=150 sk=200 d=64 fp16 dropout=0.2 softcap=20",
     "sm90_forward softcap dropout early; sm90_backward dropout bulk"),
    ("b=2 hq=1 sq=100 sk=150 d=128 bf16 dropout=0.7", "sm90_forward dropout often; sm90_backward dropout stores_first"),
    ("b=1 hq=2 sq=200 sk=300 d=64 bf16 causal det", "sm90_backward bulk ordered stores_first; backward_convert"),
    ("b=2 hq=2 hk=1 sq=300 sk=400 d=128 bf16 causal det", "sm90_backward banded bulk ordered converts"),
    ("b=2 hq=2 sq=150 sk=300 d=64 bf16 bias=1,h,q,k det", "sm90_backward warps=12 bias planes=3 ordered; sm90_bias_gradient bias"),
    ("b=2 hq=2 sq=200 sk=300 d=64 bf16 bias=b,h,q,k det", "sm90_backward bias ordered dbias_store"),
    ("b=2 hq=2 sq=300 sk=300 d=64 bf16 mask=b,1,q,k", "sm90_backward mask step=128 bulk"),
    ("b=1 hq=2 hk=1 sq=150 sk=200 d=256 bf16 causal", "sm90_forward banded; sm90_wide_backward roles"),
    ("b=2 hq=2 sq=150 sk=200 d=64 bf16 causal pos=300,250", "sm90_forward shifted; sm90_backward shifted"),
    ("b=1 hq=2 sq=1 sk=3000 d=64 bf16", "generic_forward split; generic_combine"),
    ("b=2 hq=2 sq=150 sk=200 d=128 bf16 bias=1,h,q,k", "sm90_summed_backward same_step summed=2"),
    ("b=4 hq=1 sq=150 sk=200 d=64 bf16 bias=1,h,q,k dropout=0.1 causal",
     "sm90_summed_backward banded dropout planes=3 summed=2; bias_gradient_sum"),
    ("b=2 hq=2 sq=150 sk=201 d=128 bf16 bias=1,h,q,k", "sm90_summed_backward same_step odd_sums"),
    ("b=2 hq=4 hk=2 sq=170 sk=174 d=96 fp16 bias=1,h,q,k causal dropout=0.2", "sm90_summed_backward banded dropout odd_sums"),
    ("b=1x16 hq=4 sq=100 sk=500 d=64 bf16 bias=1,1,h,q,k:fp32 causal softcap=5 dropout=0.1",
     "added_bias_clear; sm90_backward softcap banded adds_bias; added_bias_sum"),
    ("b=16 hq=4 sq=300 sk=301 d=64 bf16 bias=1,h,q,k mask=b,1,1,k values=nan_where_masked",
     "added_bias_clear; sm90_backward key_term adds_bias; added_bias_sum"),
    ("b=2x16 hq=4 sq=130 sk=131 d=128 fp16 bias=b1,1,h,q,k bias2=b1,b2,1,1,k mask=b1,1,1,q,k",
     "sm90_backward mask column_sum adds_bias; added_bias_sum"),
    ("b=1 hq=2 sq=150 sk=200 d=512 bf16 causal", "sm90_wide_forward banded pairs step=48; sm90_split_backward banded"),
    ("b=2 hq=2 sq=160 sk=200 d=512 bf16 alibi=h causal sink softcap=20 dropout=0.1 bias=b,h,q,k bias2=1,1,1,k",
     "sm90_wide_forward softcap bias dropout pairs step=32"),
    ("b=3 hq=2 hk=1 seqs_q=150,20,300 seqs_k=170,33,260 d=320 fp16 window=40,5", "sm90_wide_forward ragged left_edge pairs step=64"),
    ("b=1 hq=2 sq=150 sk=300 d=64 dv=264 bf16 wide=out", "sm90_wide_forward fp32_results pairs dv=144"),
    ("b=2 hq=2 sq=130 sk=200 d=384 dv=128 bf16 mask=b,1,1,k dropout=0.2 rng=torch_mem_efficient", "sm90_wide_forward mask dropout pairs"),
    ("b=1 hq=1 sq=100 sk=2200 d=512 bf16 sink", "sm90_schedule; sm90_wide_forward pairs joins"),
    ("b=1 hq=2 sq=128 sk=128 d=335 fp16 layout=strided", "sm90_wide_forward pairs"),
    ("b=2 hq=2 sq=63 sk=263 d=512 dv=192 bf16 layout=qkv3 skew=4 causal window=70,-1", "sm90_wide_forward pairs left_edge"),
    ("b=3 hq=4 sq=500 sk=300 d=128 bf16", "sm90_forward"),  # every block takes its tiles in turn
    ("b=4 hq=2 seqs_q=512x4 seqs_k=512x4 d=128 bf16 bias=1,h,q,k dropout=0.2", "sm90_backward ragged dropout adds_bias"),
    ("b=1 hq=1 sq=64 sk=2200 d=64 bf16", "sm90_forward split; generic_combine"),
    ("b=1 hq=2 sq=100 sk=2200 d=64 bf16 sink wide=out", "sm90_schedule; sm90_forward fp32_results joins"),
    ("b=1 hq=5 sq=100 sk=1500 d=64 fp16 layout=strided skew=1", "sm90_schedule; sm90_forward joins"),
    ("b=2 hq=1 seqs_q=100,64 seqs_k=2300,1000 d=128 bf16 causal", "sm90_forward ragged banded joins"),
    ("b=1 hq=1 sq=600 sk=1500 d=128 bf16 mask=b,1,1,k dropout=0.1", "sm90_forward mask dropout joins"),
    ("b=2 hq=2 sq=200 sk=77 d=64 bf16", "sm90_backward direct makes_rows"),
    ("b=1 hq=2 sq=300 sk=300 d=256 bf16 causal bias=b,h,q,k:fp32", "sm90_forward banded bias planes=1"),
    ("b=2 hq=2 sq=199 sk=201 d=64 bf16 bias=b,h,q,k", "sm90_backward bias dbias_store odd_rows outer=2"),
    ("b=1 hq=3 sq=250 sk=389 d=80 fp16 bias=b,h,q,k need=q,k,v skew=1", "sm90_backward bias odd_rows"),
    ("b=2x2 hq=2 hk=1 sq=163 sk=262 d=128 bf16 bias=b1,b2,h,q,k dropout=0.2 mask=b,1,q,k", "sm90_backward dbias_store odd_rows"),
    ("b=1 hq=2 sq=50 sk=60 d=24 fp32", "generic_forward; generic_backward"),
    ("b=1 hq=2 sq=50 sk=60 d=300 fp32 bias=b,h,q,k",
     "generic_wide_forward bias; generic_backward; generic_bias_gradient bias"),
]  # fmt: skip

# What is wrong, the file, what stands there and what is put in its place, a problem, and what the report says.
FAULTS = {
    "V is released before the product that reads it has ended": (
        "sm90/forward_step.cuh",
        "      wgmma_wait<0>();\n      pin(o);\n      if (!first) {\n        v_pipe.release();\n      }",
        "      if (!first) {\n        v_pipe.release();\n      }\n      wgmma_wait<0>();\n      pin(o);",
        "b=1 hq=2 sq=100 sk=1500 d=128 bf16", "wgmma reads shared memory at [0-9]+, which a copy is filling"),
    "K is read before it is there": (
        "tile/pipe.cuh", "      barrier_wait(barriers + kAt + 8 * ring.buffer(), ring.parity());", "",
        "b=1 hq=1 sq=100 sk=300 d=64 bf16", "reads shared memory at [0-9]+, which a copy is filling"),
    "an arrival is missing": (
        "tile/pipe.cuh", "if (leader) {", "if (leader && threadIdx.x / 32 != 5) {",
        "b=1 hq=1 sq=100 sk=700 d=64 bf16", "deadlock(.|\n)* 1 of [0-9]+ arrivals and 0 bytes are missing"),
    "more bytes are expected than come": (
        "sm90/forward_copy.cuh", "barrier_expect(v_full, kKeys * sm90_forward_panels(S.dv) * kPanelV * 2);",
        "barrier_expect(v_full, kKeys * sm90_forward_panels(S.dv) * kPanelV * 2 + 16);",
        "b=1 hq=1 sq=100 sk=300 d=64 bf16", "deadlock(.|\n)* 0 of 1 arrivals and 16 bytes are missing"),
    "a wrong swizzle": (
        "sm90/forward.cuh", "swizzled<kPanelK * 2>(c * 64 + fragment_row, chunk)",
        "swizzled<kPanelK>(c * 64 + fragment_row, chunk)",
        "b=1 hq=2 hk=1 sq=100 sk=300 d=128 bf16 causal", "FAILED(.|\n)*out"),
    "sums are written while the copy of those before reads them": (
        "sm90/backward_add.cuh", "            bulk_wait_read();\n", "",
        "b=2 hq=2 sq=200 sk=300 d=128 bf16 causal", "writes shared memory at [0-9]+, which a copy is reading"),
    "a product is used before it has ended": (
        "sm90/forward_step.cuh", "  wgmma_wait<kParts - 1 + kLater>();\n", "", "b=1 hq=1 sq=100 sk=700 d=128 bf16 causal", "FAILED(.|\n)*out"),
    "a block's share of dS is summed before the others have sent it": (
        "sm90/backward_summed.cuh", "    barrier_wait(barriers.sums_full(ring.buffer()), ring.parity());\n", "",
        "b=2 hq=2 sq=150 sk=200 d=128 bf16 bias=1,h,q,k", "reads shared memory at [0-9]+, which a copy is filling|FAILED(.|\n)*grad_bias:"),
    "the next share comes before the sums of the last are made": (
        "sm90/backward_summed.cuh", "    barrier_wait(barriers.sums_taken(), parity);\n", "",
        "b=4 hq=1 sq=400 sk=200 d=64 bf16 bias=1,h,q,k dropout=0.1", "fault: |FAILED(.|\n)*grad_[a-z]+:"),
    "a block of a cluster ends before the others have read its share": (
        "sm90/backward_copy_bias.cuh",
        "ring.next()) {\n    barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);\n", "ring.next()) {\n",
        "b=2 hq=2 sq=150 sk=200 d=128 bf16 bias=1,h,q,k", "of a block that has ended|in a block that has ended"),
    "queries that meet no key of a cluster are not cleared": (
        "sm90/backward.cuh", "      summed.clear_unmet(a, m.summed, block);\n", "",
        "b=4 hq=1 sq=400 sk=200 d=64 bf16 bias=1,h,q,k dropout=0.1 causal", "FAILED(.|\n)*grad_bias"),
    "a row that begins anywhere is stored beyond its end": (
        "sm90/backward_summed.cuh", "    if (columns < 4) {\n", "    if (false) {\n",
        "b=2 hq=2 sq=150 sk=201 d=128 bf16 bias=1,h,q,k", "FAILED(.|\n)*grad_bias"),
    "parts of the keys are put together before the last has come": (
        "tile/pipe.cuh", "before + 1 == u32(count)", "before + 2 == u32(count)",
        "b=1 hq=5 sq=100 sk=1500 d=64 bf16", "FAILED(.|\n)*out:"),
    "the reference of a part is left out": (
        "sm90/forward_join.cuh", "softmax.factor_of_part(end.x, end.z, top[0])", "1.f",
        "b=1 hq=5 sq=100 sk=1500 d=64 bf16", "FAILED(.|\n)*out:"),
    "parts are added before the last has come": (
        "tile/pipe.cuh", "before + 1 == u32(count)", "before + 2 == u32(count)",
        "b=1 hq=1 sq=1500 sk=600 d=64 bf16", "FAILED(.|\n)*grad_[kv]:"),
    "a part is counted with the rows of the whole block": (
        "sm90/backward_convert.cuh", "S.last_parts ? block.steps_of_head(i).count : block.count", "block.count",
        "b=1 hq=1 sq=1000 sk=600 d=128 bf16", "FAILED(.|\n)*grad_q:|deadlock"),
    "counters of parts are not cleared": (
        "sm90/schedule.cuh", "    to.joined[i] = 0;\n", "    to.joined[i] = 1;\n",
        "b=1 hq=5 sq=100 sk=1500 d=64 bf16", "FAILED(.|\n)*out:"),
    "a part has the steps of another": (
        "work/sm90_key_block.cuh", "      begin = within(begin + from * S.step, count);\n      steps = own;", "      steps = own;",
        "b=1 hq=1 sq=1500 sk=600 d=64 bf16", "FAILED(.|\n)*grad_[kv]:|deadlock"),
    "blocks of other heads are passed over beside one outside of its sequence": (
        "work/sm90_key_block.cuh", "if (kByTurns && whole >=", "if (false && whole >=",
        "b=4 hq=1 d=128 bf16 causal seqs_q=150x4 seqs_k=250x4 used_k=0,250,100,250", "FAILED(.|\n)*grad_[kv]:|deadlock"),
    "sums are counted before they have arrived": (
        "sm90/backward_add.cuh", "            bulk_wait();\n            if constexpr (kShared", "            if constexpr (kShared",
        "b=2 hq=2 hk=1 sq=300 sk=400 d=128 bf16 causal det", "FAILED(.|\n)*grad_q:"),
    "a thread that adds is not waited for": (
        "sm90/backward_barriers.cuh", "S.bulk ? sm90_adding_warps(S) :", "S.bulk ? 1 :",
        "b=2 hq=2 hk=1 sq=300 sk=400 d=128 bf16 causal det", "fault: |deadlock|FAILED(.|\n)*grad_[a-z]+:"),
    "sums are written while the copy before the last reads them": (
        "sm90/backward_add.cuh", "bulk_wait_read<1>();", "bulk_wait_read<2>();",
        "b=2 hq=2 sq=300 sk=300 d=64 bf16 mask=b,1,q,k", "writes shared memory at [0-9]+, which a copy is reading"),
    "sums of a bias are not cleared": (
        "sm90/added_bias_sum.cuh", "    store_global(to + i + threadIdx.x * 4, uint4{});\n", "",
        "b=16 hq=4 sq=256 sk=256 d=64 bf16 bias=1,h,q,k", "FAILED(.|\n)*grad_bias"),
    "sums of a bias lie in another order": (
        "sm90/added_bias.h", "thread / 32 * 16 + thread % 32 / 4", "thread / 32 * 16 + thread % 32 / 8",
        "b=16 hq=4 sq=256 sk=256 d=64 bf16 bias=1,h,q,k", "FAILED(.|\n)*grad_bias"),
    "sums of columns come before the last were read": (
        "sm90/split_backward.cuh",
        "    barrier_wait(barriers.may_send(c), turn ^ 1);\n    wgmma_wait<1>();", "    wgmma_wait<1>();",
        "b=1 hq=2 sq=150 sk=200 d=512 bf16", "fault: |FAILED(.|\n)*grad_[a-z]+:"),
    "a block of two that split columns ends before the other": (
        "sm90/split_backward.cuh",
        "nothing more in this one.\n  barrier_wait(barriers.may_send(c), turn ^ 1);\n", "nothing more in this one.\n",
        "b=1 hq=2 sq=150 sk=200 d=512 bf16", "of a block that has ended|in a block that has ended"),
    "row vectors are made before O is there": (
        "sm90/backward_rows.cuh", "      barrier_wait(barriers.inputs_full(ring.buffer()), ring.parity());\n", "",
        "b=2 hq=2 sq=200 sk=77 d=64 bf16", "reads shared memory at [0-9]+, which a copy is filling"),
    "a bias with odd rows is moved before it is there": (
        "sm90/backward_odd_rows.cuh", "      barrier_wait(barriers.outer_full(ring_outer.buffer()), ring_outer.parity());\n", "",
        "b=2 hq=2 sq=199 sk=201 d=64 bf16 bias=b,h,q,k", "reads shared memory at [0-9]+, which a copy is filling"),
    "the next bias comes before the last is moved": (
        "sm90/backward_odd_rows.cuh",
        "          barrier_wait(barriers.outer_empty(ring_later.buffer()), ring_later.parity() ^ 1);\n", "",
        "b=2 hq=2 sq=499 sk=201 d=64 bf16 bias=b,h,q,k", "fault: |FAILED(.|\n)*grad_[a-z]+:|reads shared memory at [0-9]+, which a copy is filling"),
    "the gradient of odd rows has rows of the next head": (
        "sm90/odd_rows.cuh", "if (k < lines && here >= 0", "if (here >= 0",
        "b=2 hq=2 sq=199 sk=201 d=64 bf16 bias=b,h,q,k", "FAILED(.|\n)*grad_bias:|outside of every allocation|fault: "),
    "the other block's weights are read before they are there": (
        "sm90/forward_pair.cuh", "    barrier_wait(barrier, weights.parity());\n", "",
        "b=1 hq=2 sq=150 sk=200 d=512 bf16", "reads shared memory at [0-9]+, which a copy is filling|FAILED(.|\n)*out:"),
    "rows have the largest score of half of their keys": (
        "sm90/forward_step.cuh", "fmaxf(largest[0], told.x)", "largest[0]",
        "b=1 hq=2 sq=150 sk=200 d=512 bf16", "FAILED(.|\n)*out:"),
    "numbers of rows have one place": (
        "sm90/forward_pair.cuh", "  Ring<2> rows{};", "  Ring<1> rows{};",
        "b=1 hq=2 sq=150 sk=400 d=512 bf16 wide=out", "fault: |deadlock|writes shared memory|FAILED(.|\n)*(out|lse):"),
    "a block of a cluster ends before the other has sent it all": (
        "sm90/wide_backward.cuh", "    cluster_sync();  // what the other block", "    // what the other block",
        "b=1 hq=2 hk=1 sq=150 sk=200 d=256 bf16 causal", "of a block that has ended|in a block that has ended"),
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def built():
    if not (PLAYED / "libcuda.so.1").exists():
        pytest.skip(f"{PLAYED} has no emulated driver: it is built with GCC, without sanitizers")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def run(command, seed, cache, **variables):
    """The exit code, and everything that was printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FOVEA_", "EMULATED_"))}
    env.update(LD_LIBRARY_PATH=str(PLAYED), FOVEA_NVRTC=str(PLAYED / "libnvrtc.so.13"), FOVEA_CACHE_DIR=str(cache),
               EMULATED_SEED=str(seed), EMULATED_LOG="1", **variables)  # fmt: skip
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1000)
    return done.returncode, done.stdout


def check(line, seed, cache, *arguments, **variables):
    return run([FOVEA, "check", "--device", "cuda", "--limit", "900", *arguments, line], seed, cache, **variables)


def specs(output):
    """Kernels that were launched: name and the text of the Spec."""
    return re.findall(r"^emulated: [^:]* bytes: fovea::cuda::(\w+)<(.*)>$", output, re.MULTILINE)


def has(spec, words):
    name, *fields = words.split()
    return spec[0] == name and all(re.search(rf"\.{field.replace('=', ' = ')}\b", spec[1]) for field in fields)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("line, wanted", CASES, ids=[line for line, _ in CASES])
def test_a_problem(line, wanted, seed, cache):
    code, output = check(f"bwd {line}", seed, cache)
    assert code == 0, output
    launched = specs(output)
    missing = [words for words in wanted.split("; ") if not any(has(spec, words) for spec in launched)]
    assert not missing, f"no kernel has {missing} any more: {launched}"


def plant(folder, name, text, other):
    """A copy of the device text, in which `text` is replaced."""
    for part in ("math", "cuda/device"):
        shutil.copytree(ROOT / "src" / part, folder / part)
    file = folder / "cuda/device" / name
    assert text in file.read_text(), "the text has changed: plant the fault elsewhere"
    file.write_text(file.read_text().replace(text, other))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, cache, tmp_path):
    name, text, other, line, report = FAULTS[fault]
    plant(tmp_path, name, text, other)
    found = []
    for seed in (1, 2, 3):
        code, output = check(f"bwd {line}", seed, cache, FOVEA_KERNEL_TEXT=str(tmp_path))
        if code != 0:
            found.append(output)
        if re.search(report, output):
            return
    pytest.fail(f"not reported by three seeds: {found}")


def bits_in_order(d, cache, **variables):
    """dq's bits, by three schedules, of a deterministic call."""
    found = set()
    for seed in (1, 2, 3):
        script = Path(__file__).with_name("gradient_bits.py")
        code, output = run([sys.executable, script, str(d)], seed, cache, FOVEA_LIBRARY=str(BUILD / "libfovea.so"), **variables)
        assert code == 0, output
        assert any(has(spec, "sm90_backward ordered") for spec in specs(output)), output
        found.add(re.search("^bits (.*)$", output, re.MULTILINE)[1])
    return found


@pytest.mark.parametrize("d", [64, 128])
def test_bits_in_order(d, cache, tmp_path):
    """The same in every schedule; not so where a block waits for the first alone of those before it."""
    assert len(bits_in_order(d, cache)) == 1
    plant(tmp_path, "sm90/backward_add.cuh", "load_acquire(turn) < before)", "load_acquire(turn) < min(before, 1u))")
    assert len(bits_in_order(d, cache, FOVEA_KERNEL_TEXT=str(tmp_path))) > 1


def merged(d, seed, cache, **variables):
    script = Path(__file__).with_name("merged_out.py")
    return run([sys.executable, script, str(d)], seed, cache, FOVEA_LIBRARY=str(BUILD / "libfovea.so"), **variables)


@pytest.mark.parametrize("d, kernel", [(64, "sm90_forward fp32_results"), (512, "sm90_wide_forward fp32_results pairs")])
def test_a_merged_out(d, kernel, cache):
    for seed in (1, 2, 3):
        code, output = merged(d, seed, cache)
        assert code == 0, output
        assert any(has(spec, kernel) for spec in specs(output)), output


def test_a_merged_out_of_a_pair_is_read_once(cache, tmp_path):
    """Found: the second block reads a logsumexp that the first has replaced, or none."""
    plant(tmp_path, "sm90/forward_pair.cuh", "    x[0] = rank == 0 ? x[0] : told.x;\n", "")
    code, output = merged(512, 1, cache, FOVEA_KERNEL_TEXT=str(tmp_path))
    assert code != 0 and "differs" in output, output


def test_clusters_of_eight(cache):
    """Eight entries of a batch sum the gradient of a bias, in two rounds."""
    line = "bwd b=16 hq=1 sq=100 sk=260 d=64 bf16 bias=1,h,q,k dropout=0.1 causal"
    code, output = check(line, 1, cache, EMULATED_MULTIPROCESSORS="16")
    assert code == 0, output
    assert any(has(spec, "sm90_summed_backward summed=8") for spec in specs(output)), output


# Packed sequences that fill the tensors are taken for ones of one length: their last 16 heads begin blocks by turns.
FULL = "seqs_q=130x9 seqs_k=260x9"
SHORTENED = f"{FULL} used_k=0,260,100,1,128,129,260,256,5"
UNEQUAL = "seqs_q=10,130,0,70,130,64,1,130,129 total_q=1170 seqs_k=260,0,100,1,128,129,260,256,5 total_k=2340"
ONE_LENGTH = [
    *(f"hq=2 d=128 bf16 {lengths}" for lengths in (FULL, SHORTENED, UNEQUAL)),
    *(f"hq=4 hk=2 d=64 fp16 {lengths}" for lengths in (SHORTENED, UNEQUAL)),
    *(f"hq=2 d=80 bf16 {lengths}" for lengths in (SHORTENED, UNEQUAL)),
    f"hq=2 d=96 bf16 {FULL} used_k=0x9",
    f"hq=6 hk=2 d=128 bf16 {UNEQUAL} dropout=0.2 sink",
    f"hq=2 d=64 bf16 {SHORTENED} window=-1,60 softcap=20",
    "hq=5 hk=5 d=64 bf16 seqs_q=200 seqs_k=900 used_k=400",
]


@pytest.mark.parametrize("seed", [*SEEDS, 4])
@pytest.mark.parametrize("line", ONE_LENGTH)
def test_packed_sequences_of_one_length(line, seed, cache):
    code, output = check(f"bwd causal {line}", seed, cache, EMULATED_MULTIPROCESSORS="16")
    assert code == 0, output
    main = [spec for spec in specs(output) if has(spec, "sm90_backward ragged banded")]
    assert main and not any(has(spec, "sm90_backward longest_first") for spec in main), output


@pytest.mark.parametrize("line", ["d=320 dv=8 bf16 sink wide=out", "d=64 dv=264 bf16 layout=strided causal"])
def test_parts_of_pairs(line, cache):
    """Four parts of the keys and more, which generic_combine puts together."""
    code, output = check(f"bwd b=1 hq=1 sq=70 sk=2100 {line}", 1, cache, EMULATED_MULTIPROCESSORS="16")
    assert code == 0, output
    assert any(has(spec, "sm90_wide_forward pairs split") for spec in specs(output)), output


@pytest.mark.parametrize("family", ["sm90", "generic"])
def test_lengths_that_lie(family, cache):
    """Nothing outside of results and workspace is written (lying_lengths.cpp)."""
    code, output = run([PLAYED / "lying_lengths"], 1, cache, FOVEA_KERNEL=family)
    assert code == 0 and "\n0 trespasses" in output, output
    assert any(name.startswith(family) for name, _ in specs(output)), output


# ---- more, where it is asked for ----

TABLE, RANDOM = os.environ.get("EMULATED_TABLE"), int(os.environ.get("EMULATED_RANDOM", "0"))

if TABLE:
    LISTED = subprocess.run([FOVEA, "cases", "--table", TABLE], text=True, capture_output=True, check=True)

    @pytest.mark.parametrize("row", LISTED.stdout.splitlines())
    def test_a_row_of_the_table(row, cache):
        code, output = check(row, SEEDS[-1], cache)
        assert code == 0, output


if RANDOM:

    @pytest.mark.parametrize("number", range(1, 1 + RANDOM))
    def test_a_random_problem(number, cache):
        code, output = check("", number, cache, "--random", "1", "--seed", str(number))
        assert code == 0, output
