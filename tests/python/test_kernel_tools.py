# SPDX-License-Identifier: Apache-2.0
"""tools/same_code.py and tools/kernels.py on kernels of a few instructions: what counts as the same text, what as the
same code, and that the check of the manifest fails where it should."""

import copy
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import kernels  # noqa: E402
import machine_code  # noqa: E402
import nvrtc  # noqa: E402
import same_code  # noqa: E402
from machine_code import Listing  # noqa: E402

COMMON = """// of both
#ifndef COMMON_H
#define COMMON_H
namespace fovea::cuda {
__device__ inline float twice(float x) { return 5 * x; }
}  // namespace fovea::cuda
#endif
"""
TINY = """#ifndef TINY_CUH
#define TINY_CUH
#include "common.h"
namespace fovea::cuda {
template <int N>
__global__ void tiny(float* x) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[threadIdx.x + 32 * i] = twice(x[threadIdx.x]);
  }
}
}  // namespace fovea::cuda
#endif
"""
OTHER = TINY.replace("TINY", "OTHER").replace("tiny", "other")


def listed(**texts):
    names = {"tiny": TINY, "other": OTHER, "common": COMMON, **texts}
    files = {"tiny.cuh": 0, "other.cuh": 1, "common.h": 2, "math/common.h": 2}
    one = {"architecture": "sm_80", "options": [], "registers": 256, "spill": 0, "local": 0}
    return Listing(
        {
            "texts": list(names.values()),
            "files": files,
            "options": ["--std=c++20", "-default-device", "--ptxas-options=-v"],
            "kernels": [
                {"file": "tiny.cuh", "kernel": "fovea::cuda::tiny", "argument": "1", **one},
                {"file": "other.cuh", "kernel": "fovea::cuda::other", "argument": "2", **one},
            ],
            "uses": [["sm_80", "fwd d=1", [0]], ["sm_80", "bwd d=1", [0, 1]]],
        }
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    machine_code.compiler(), machine_code.disassembler()  # where they are kept otherwise
    monkeypatch.setattr(machine_code, "CACHE", tmp_path)


@pytest.mark.parametrize(
    "texts, same",
    [
        ({"tiny": TINY.replace("  for", "  // a comment\n  for")}, True),
        ({"tiny": TINY.replace("(float* x)", "(\n    float *x)")}, True),
        ({"tiny": TINY.replace("TINY_CUH", "RENAMED_CUH")}, True),
        ({"tiny": TINY.replace('"common.h"', '"math/common.h"')}, True),
        ({"tiny": COMMON.replace("#endif\n", "").replace("COMMON_H", "TINY_CUH") + TINY.split('common.h"\n')[1]}, True),
        ({"other": OTHER.replace("32", "64")}, True),  # of another kernel
        ({"tiny": TINY.replace("32", "64")}, False),
        ({"tiny": TINY.replace("#pragma unroll\n", "")}, False),
        ({"common": COMMON.replace("5 * x", "3 * x")}, False),
        ({"common": COMMON.replace("5 * x", "5 * x // * 3\n")}, True),
        ({"tiny": TINY.replace("twice(x", "twice(\"//\"[0] + x")}, False),
    ],
)
def test_what_is_the_same_text(texts, same):
    assert (listed().key(0) == listed(**texts).key(0)) == same


def test_kernels_are_paired_by_problem_and_place():
    old, new = listed(), copy.deepcopy(listed())
    new.kernels[1]["kernel"] = "fovea::cuda::renamed"
    pairs, alone = same_code.pairs_of(old, new, ["sm_80"])
    assert set(pairs) == {(0, 0), (1, 1)} and not alone
    assert pairs[0, 0] == [("sm_80", "fwd d=1"), ("sm_80", "bwd d=1")]
    new.uses[1][2] = [0]
    pairs, alone = same_code.pairs_of(old, new, ["sm_80"])
    assert set(pairs) == {(0, 0)}
    assert alone == [("sm_80 bwd d=1", "other, only before")]


def test_same_code(tmp_path, capsys, monkeypatch):
    def compared(*more, **texts):
        old, new = tmp_path / "old.gz", tmp_path / "new.gz"
        listed().save(old), listed(**texts).save(new)
        monkeypatch.setattr(sys, "argv", ["same_code.py", "--old", str(old), "--new", str(new), "--jobs", "1", *more])
        return same_code.main(), capsys.readouterr().out

    code, said = compared(tiny=TINY.replace("i < N", "i < N + 0"))
    assert code == 0 and "1 same machine code" in said, said
    code, said = compared(common=COMMON.replace("5 * x", "3 * x"))  # another constant
    assert code == 0 and "2 same opcodes" in said, said
    code, said = compared(common=COMMON.replace("5 * x", "2 / x"))
    assert code == 1 and "2 different" in said and "+MUFU.RCP" in said.replace("+ ", "+"), said
    code, said = compared(common=COMMON.replace("5 * x", "5 * y"))
    assert code == 1 and "does not compile" in said and '"y" is undefined' in said, said
    code, said = compared("--spec", "^2", common=COMMON.replace("5 * x", "2 / x"))  # the argument of `other`
    assert code == 1 and "1 pairs of kernels" in said and "different: sm_80 other" in said, said
    with pytest.raises(SystemExit, match="no kernel's Spec matches 'softcap'"):
        compared("--spec", "softcap")


def test_manifest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "MANIFEST", tmp_path / "manifest.txt")

    def checked(listing, rows):
        these = kernels.Kernels(listing)
        failed = kernels.check(these, rows, kernels.current_of(these, rows), 1, most=400, agree=60, seed=1)
        return failed, capsys.readouterr().out

    assert kernels.refresh(kernels.Kernels(listed()), {}, set(), 1) == 0
    rows = kernels.read()
    assert set(rows) == {("sm_80", "tiny", "fwd d=1"), ("sm_80", "other", "bwd d=1")}
    tiny = "sm_80", "tiny", "fwd d=1"
    assert rows[tiny][0][:4][1:] == (0, 0, 0) and 0 < rows[tiny][0][0] < 64

    failed, said = checked(listed(), rows)
    assert failed == 0 and "every kernel has a current row" in said and "2 with a current row compiled again" in said

    failed, said = checked(listed(common=COMMON.replace("5 * x", "2 / x")), rows)
    assert failed == 0 and "without a current row: 2; 2 of them compiled, 0 left" in said

    wrong = {**rows, tiny: ((*rows[tiny][0][:-1], "0" * 16), rows[tiny][1])}
    failed, said = checked(listed(), wrong)
    assert failed == 1 and "rows that do not agree: 1 faults" in said

    limited = listed()
    limited.kernels[0]["registers"] = 1
    failed, said = checked(limited, rows)
    assert failed == 1 and "registers a thread; its blocks have 1" in said

    failed, said = checked(limited, {})
    assert failed == 1 and "kernels without a current row: 1 faults" in said

    # What was compiled is not compiled again, nor lost where the rest fails.
    these = kernels.Kernels(listed(other=OTHER.replace("twice", "missing")))
    assert kernels.refresh(these, dict(rows), kernels.current_of(these, rows), 1) == 1
    assert kernels.read() == rows
    assert "1 of 2 kernels are current" in capsys.readouterr().out


def test_a_kernel_s_spec_from_the_command_line(monkeypatch, capsys):
    """tools/nvrtc.py: what print() of the library writes, for every kernel that there is; options stand anywhere."""
    golden = (ROOT / "tests/cpp/golden/cuda_plans.txt").read_text()
    texts = dict.fromkeys(re.findall(r"^  (\w+)<(fovea::cuda::\w+\{.*\})> ", golden, re.MULTILINE))
    assert len({kernel for kernel, _ in texts}) > 15
    for kernel, text in texts:
        assert nvrtc.spec_text(kernel, dict(re.findall(r"\.(\w+) = ([\w:]+)", text))) == text
    for path in nvrtc.DEVICE.rglob("*.cuh"):
        for kernel in re.findall(r"__global__[^;{]*?\b([a-z]\w+)\(const __grid_constant__", path.read_text()):
            assert nvrtc.spec_text(kernel, {"arch": 90}).startswith("fovea::cuda::"), kernel
    with pytest.raises(ValueError, match="ForwardSpec has no planes; it has arch, type, "):
        nvrtc.spec_text("generic_forward", {"planes": 2})
    built = []
    monkeypatch.setattr(nvrtc, "build", lambda *given, **fields: built.append((given, fields)) or nvrtc.Built(b"", "", "", b"", 0))
    monkeypatch.setattr(sys, "argv", ["nvrtc.py", "generic_forward", "--arch", "80", "d=128", "lazy=true"])
    assert nvrtc.main() == 0
    assert built == [(("generic_forward", "80", None), {"d": "128", "lazy": "true"})]
    assert "generic_forward d=128 lazy=true" in capsys.readouterr().out


def test_serialised_products_of_a_kernel_are_printed(monkeypatch, capsys):
    """tools/nvrtc.py: what ptxas says of wgmma is in the line and in the exit code."""
    log = ("ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources\n"
           "ptxas info    : Used 168 registers, used 1 barriers\n")  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["nvrtc.py", "sm90_backward", "--arch", "90a", "d=112"])
    for text, code in ((log, 1), (log.splitlines(keepends=True)[1], 0)):
        monkeypatch.setattr(nvrtc, "build", lambda *given, text=text, **fields: nvrtc.Built(b"", "", text, b"", 0))
        assert nvrtc.main() == code
        assert ("serialised or ignored: C7512" in capsys.readouterr().out) == bool(code)
