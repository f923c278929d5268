# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a machine can check: a formula stands once, in src/math; every source file names its
licence and begins by saying what it is; src/math needs no header.
"""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What the definition is made of: transcendental functions, Philox and dropout's numbers, softcap, ALiBi's distance.
FORMULAS = {
    "function": re.compile(r"(?<![\w.>])(?:std::|__builtin_)?(?:(?:exp|exp2|expm1|log|log2|log1p|tanh)[fl]?|ex2|lg2|rcp)\s*\((?!\s*\))"),
    "tanh": re.compile(r"0\.3333|0\.1333|0\.1327|2\.8853|tanh\.approx"),
    "Philox": re.compile(r"0x(?:D2511F53|CD9E8D57|D256D193|9E3779B9|BB67AE85|666F7665)", re.IGNORECASE),
    "dropout": re.compile(r"65536|0x10000\b|2\.328306"),
    "softcap": re.compile(r"softcap\w*\s*\*|/\s*\w*softcap|\*\s*\w*softcap(?!_?\))"),
    "ALiBi": re.compile(r"slope\w*\s*\*|\*\s*-?\(?-?\w*slope"),
}

# (file, formula): why it may stand there. An entry that is not needed any more is an error, too.
ALLOWED = {
    ("src/cpu/isa/simd.h", "function"): "exp and tanh of a vector, which the formulas call by name",
    ("src/check/numbers.h", "function"): "random numbers: Box and Muller's method",
    ("src/check/numbers.h", "Philox"): "random numbers: SplitMix64 adds the golden ratio, as Philox does",
    ("src/check/naive.cpp", "softcap"): "the error of a score whose tanh errs by one unit",
    ("src/check/run.cpp", "Philox"): "signs without a pattern, by the golden ratio",
    ("cli/buffers.cpp", "function"): "random numbers: Box and Muller's method",
    ("src/cuda/device/ptx/sm80.cuh", "function"): "the instructions: ex2, lg2, rcp",
    ("src/cuda/device/score/approximation.cuh", "function"): "the number that math's formulas take on a GPU: exp2 and the "
                                                             "reciprocal by an instruction, tanh by math's two",
    ("src/cuda/device/score/sm90_softmax.cuh", "function"): "weights of a row's end by instructions; why there is no "
                                                            "single score layer: docs/design/options.md",
}  # fmt: skip

# Lines of a file with kernels, comments included, and of any other device header. Longer files of the host are listed
# with the length that they may have at most: one that becomes shorter gets a smaller number here.
KERNEL_LINES, HEADER_LINES, KERNEL_FUNCTION_LINES = 450, 300, 320
LONGER_ON_THE_HOST = {
    "src/cuda/jit/driver.h": 358,
    "src/python/fast.c": 1425,
}

# From Python to where a forward on Hopper adds it to the scores. It was 27.
MOST_FILES_OF_A_BIAS = 22


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the list of files is git's")
    return [name for name in listed.stdout.split() if (ROOT / name).exists()]


def code_of(path):
    """A C++ file without comments and strings."""
    text = path.read_text()
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


def strays(name):
    code = code_of(ROOT / name)
    return {(name, formula) for formula, pattern in FORMULAS.items() if pattern.search(code)}


def test_a_formula_stands_only_in_math():
    files = [name for name in tracked("src/*.h", "src/*.cpp", "src/*.cuh", "cli/*.h", "cli/*.cpp") if not name.startswith("src/math/")]
    assert len([name for name in files if name.endswith(".cuh")]) > 20
    found = set().union(*(strays(name) for name in files))
    assert found - set(ALLOWED) == set(), "use what src/math has, or say here why not"
    assert set(ALLOWED) - found == set(), "no longer needed"


def test_the_patterns_find_the_definition():
    """They would be of no use if they did not match where the formulas are."""
    found = set().union(*(strays(name) for name in tracked("src/math/*.h")))
    assert {formula for _, formula in found} == set(FORMULAS)


def test_the_running_softmax_of_a_gpu_stands_once():
    """The maximum of a row, which it is made with, is formed in score/softmax.cuh; sm90_softmax guesses a first one."""
    found = {name for name in tracked("src/cuda/device/*") if "quad_max(" in code_of(ROOT / name)}
    assert found == {f"src/cuda/device/{name}" for name in
                     ("tile/tile.cuh", "score/softmax.cuh", "score/sm90_softmax.cuh")}  # fmt: skip


def test_a_term_of_positions_is_one_device_file():
    """What is computed from a query's and a key's positions is named in score/position_terms.h and nowhere else on a GPU."""
    file = "src/cuda/device/score/position_terms.h"
    body = re.search(r"struct PositionTerms \{(.*?)\n\};", code_of(ROOT / file), re.DOTALL)[1]
    terms = re.findall(r"^  bool (\w+) = false;\s*$", body, re.MULTILINE)
    assert terms
    for name in tracked("src/cuda/device/*"):
        assert name == file or not re.search(rf"\b({'|'.join(terms)})\b", code_of(ROOT / name)), f"{name} names one of {terms}"


def test_every_list_of_features_is_named_for_developers():
    """Functions that choose a GPU kernel, or a faster way of one, and list features one by one: a new feature may belong there.
    hacking.md names them, as the host and the sizes of kernels have them."""
    listed = re.search(r"^### On the GPU$(.*?)^## ", (ROOT / "docs/hacking.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    function = re.compile(r"^[A-Za-z_][^\n;{}]*?\b(\w+)\((?:[^;{}]|\{\})*?\) (?:const )?\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
    found = {}
    for name in tracked("src/cuda/device/*sizes.h", "src/cuda/kernels/*.cpp"):
        for match in function.finditer(code_of(ROOT / name)):
            if re.search(r"\.softcap\b", match[2]) and re.search(r"\.positions\b", match[2]):
                found.setdefault(match[1], []).append(name)
    assert len(found) > 8 and "natural_scores" in found and len(found["features_of"]) == 3
    assert {name: files for name, files in found.items() if f"`{name}()`" not in listed and name != "why_not"} == {}


def test_math_includes_nothing_but_itself():
    own = {f'"{Path(name).name}"' for name in tracked("src/math/*.h")}
    for name in tracked("src/math/*.h"):
        included = re.findall(r"^\s*#\s*include\s+(\S+)", (ROOT / name).read_text(), re.MULTILINE)
        assert set(included) <= own, name


def test_the_cpu_is_asked_for_what_its_kernels_are_compiled_with():
    text = "".join(re.findall(r"set\(FOVEA_ISA_FLAGS_\w+ [^)]*\)", (ROOT / "src/CMakeLists.txt").read_text()))
    assert set(re.findall(r"-m(?:cpu|arch)=(\S+)", text)) == {"generic+bf16", "armv8.2-a+bf16"}  # Hwcap::neon_bf16() asks for both
    flags = re.findall(r"-m([\w-]+)[ )]", text)
    text = (ROOT / "src/cpu/processor.cpp").read_text()
    asked = [*re.findall(r"bit_(\w+)", text), *(name.upper() for name in re.findall(r"uint32_t k(\w+) = std::uint32_t\{1\}", text))]
    assert len(flags) > 8
    assert [name for name in flags if name.replace("-", "").upper() not in asked] == []


def test_folders_are_read_by_what_does_not_throw():
    """The iterator of a range-based `for` throws where reading on fails."""
    names = [name for name in tracked("src/*.h", "src/*.cpp", "cli/*.h", "cli/*.cpp") if "directory_iterator" in code_of(ROOT / name)]
    assert names == ["src/cuda/jit/folder.h"]


def includes_of(name):
    """The tracked files that a source includes, by its own folder, by src and by src/cuda/device."""
    found = re.findall(r'^\s*#\s*include\s+"([^"]+)"', (ROOT / name).read_text(), re.MULTILINE)
    for text in found:
        for base in (Path(name).parent, Path("src"), Path("src/cuda/device")):
            path = Path(os.path.normpath(base / text))
            if (ROOT / path).exists():
                yield str(path)
                break


def folder_of(name):
    """cuda and its folders are apart; what lies below those is one."""
    return "/".join(Path(name).parent.parts[1:3])


def test_folders_depend_on_one_another_one_way():
    """No folder of src includes one that includes it, over however many others: what is below knows nothing of what is above."""
    below = {}
    for name in tracked("src/*.h", "src/*.cpp", "src/*.cuh"):
        below.setdefault(folder_of(name), set()).update(map(folder_of, includes_of(name)))
    below = {folder: its - {folder} for folder, its in below.items()}
    assert below["math"] == set() and below["core"] == {"math"} and below["cuda/device"] == {"math"}
    assert below["cuda/jit"] == {"core"}, "run-time compilation knows nothing of attention"
    order = []
    while below:
        free = sorted(folder for folder, its in below.items() if its <= set(order))
        assert free, f"folders in a circle: {below}"
        order += free
        below = {folder: its for folder, its in below.items() if folder not in order}
    assert order.index("dispatch") > max(order.index(name) for name in ("cpu", "cuda", "reference"))


def imported(name):
    """The modules of the package that one of its files imports, also within functions, by the dots of their names."""
    module = Path(name).with_suffix("").parts[1:]
    package = module[:-1]
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            start += tuple(node.module.split(".")) if node.module else ()
            yield from (".".join((*start, *rest)) for rest in ((), *((alias.name,) for alias in node.names)))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_modules_import_one_another_one_way():
    """No module of the package imports one that imports it, over however many others. A package's __init__ is apart: it imports what
    users see."""
    modules = {".".join(Path(name).with_suffix("").parts[1:]): name for name in tracked("python/fovea/*.py") if "__init__" not in name}
    assert len(modules) > 40
    left = {module: set(imported(name)) & set(modules) - {module} for module, name in modules.items()}
    while left:
        free = [module for module, its in left.items() if not its & set(left)]
        assert free, f"modules in a circle: {sorted(left)}"
        for module in free:
            del left[module]


SOURCES = ("*.h", "*.cpp", "*.cuh", "*.c", "*.py", "*.pyi", "*.sh", "*.cmake", "*CMakeLists.txt", "Makefile", "*.map")


def test_every_source_names_its_licence_first():
    for name in tracked(*SOURCES):
        lines = (ROOT / name).read_text().splitlines()
        first = lines[1] if lines and lines[0].startswith("#!") else lines[0] if lines else ""
        assert "SPDX-License-Identifier: Apache-2.0" in first, name


def test_every_source_of_the_library_begins_by_saying_what_it_is():
    """Or its header does."""
    for name in tracked("src/*.h", "src/*.cpp", "src/*.cuh", "include/*.h"):
        if name.endswith(".cpp") and (ROOT / name).with_suffix(".h").exists():
            continue
        lines = (ROOT / name).read_text().splitlines()
        assert re.match(r"(//| \*)", lines[1]) and len(" ".join(lines[1:5])) > 60, name


def test_sizes():
    """The reference is short enough to be read at one sitting, and a header's design is seen from one place."""
    for name in ("src/reference/forward.cpp", "src/reference/backward.cpp"):
        assert len((ROOT / name).read_text().splitlines()) < 150
    for name in tracked("src/math/*.h"):
        assert len((ROOT / name).read_text().splitlines()) < 300, name


def test_sizes_of_host_files():
    """As device files: 450 lines of code, 300 of a header. The headers of src/cpu/isa are kernels."""
    over = {}
    for name in tracked("src/*.cpp", "src/*.c", "src/*.h", "cli/*.cpp", "cli/*.h"):
        if not name.startswith("src/cuda/device/"):
            lines = (ROOT / name).read_text().count("\n")
            code = not name.endswith(".h") or name.startswith("src/cpu/isa/")
            if lines > (KERNEL_LINES if code else HEADER_LINES):
                over[name] = lines
    assert {name: lines for name, lines in over.items() if lines > LONGER_ON_THE_HOST.get(name, 0)} == {}
    assert set(LONGER_ON_THE_HOST) - set(over) == set(), "short enough now: not to be listed any more"


def test_sizes_of_device_files():
    over = {}
    for name in tracked("src/cuda/device/*"):
        text = (ROOT / name).read_text()
        limit = KERNEL_LINES if "__global__" in text else HEADER_LINES
        if text.count("\n") > limit:
            over[name] = text.count("\n")
    assert over == {}, "too long for one sitting"


@pytest.mark.parametrize("page", ["docs/hacking.md", "docs/cuda.md"])
def test_what_a_page_for_developers_names_exists(page):
    """Files, by the end of their paths, and functions, by a name that the sources have. 10.0 is hacking.md's example."""
    text = (ROOT / page).read_text()
    names = tracked()
    files = {name for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:h|cpp|cuh|c|py|txt|sh|md))`", text) if "sm100" not in name}
    assert len(files) > 5
    assert {name for name in files if not any(f"/{one}".endswith(f"/{name}") for one in names)} == set()
    sources = "".join((ROOT / name).read_text() for name in names if re.match(r"(src|tools|tests/cpp)/.*\.(h|cpp|cuh|py)$", name))
    functions = set(re.findall(r"`(\w+)\(\)`", text))
    assert {name for name in functions if not re.search(rf"\b{name}\(", sources)} == set()


def test_the_way_of_a_bias_is_as_hacking_says():
    """Its files exist and have the functions that are named, and a forward takes no more files than it did."""
    text = (ROOT / "docs/hacking.md").read_text()
    forward, backward = re.search(r"^## The way of a bias$(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1].split("What is new")
    rows = {part: re.findall(r"^\| `([\w./]+)` \| (`.*?`) \| .*\|$", part, re.MULTILINE) for part in (forward, backward)}
    assert min(len(found) for found in rows.values()) > 10
    for name, functions in rows[forward] + rows[backward]:
        code = (ROOT / name).read_text()
        for function in re.findall(r"`(\w+)`", functions):
            defined = (
                rf"(?:def|class|struct) {function}\b",  # Python, a type of C++
                rf"(?!return)\w[^=;]*[\w>&*] [*&]?(?:\w+::)?{function}\(",  # a function of C++, with the type of its result
                rf"(?:{function}::)?{function}\((?:const __grid_constant__|const Call)",  # a kernel, a constructor
            )
            assert any(re.search("^ *" + one, code, re.MULTILINE) for one in defined), f"{name}: {function}"
    files = [name for name, _ in rows[forward]]
    assert len(files) == len(set(files)) <= MOST_FILES_OF_A_BIAS


def test_every_option_of_a_kernel_is_in_the_table():
    """docs/design/options.md names each field of a kernel's tiles that is on or off, and no other."""
    specs = {"ForwardTiles": "generic_forward", "WideForwardTiles": "generic_wide_forward", "BackwardTiles": "generic_backward",
             "Sm90ForwardTiles": "sm90_forward", "Sm90BackwardTiles": "sm90_backward", "Sm90BiasTiles": "sm90_bias_gradient",
             "Sm90SmallTiles": "sm90_small_backward"}  # fmt: skip
    options = set()
    for name in ("generic/spec.h", "sm90/spec.h"):
        for tiles, body in re.findall(r"^struct (\w+Tiles) \{(.*?)^\};", (ROOT / "src/cuda/device" / name).read_text(),
                                      re.MULTILINE | re.DOTALL):  # fmt: skip
            options |= {(specs[tiles], field) for field in re.findall(r"^  bool (\w+) = ", body, re.MULTILINE)}
    rows = re.findall(r"^\| (`.*?) \| `(\w+)` \|", (ROOT / "docs/design/options.md").read_text(), re.MULTILINE)
    listed = {(kernel, option) for kernels, option in rows for kernel in re.findall(r"`(\w+)`", kernels)}
    assert len(options) > 20
    assert {(kernel, option) for kernel, option in listed if kernel != "sm90_wide_backward"} == options


def test_lines_of_device_text():
    """docs/design/options.md counts them."""
    files = [ROOT / name for suffix in ("h", "cuh") for name in tracked(f"src/cuda/device/*.{suffix}")]
    lines = sum(file.read_text().count("\n") for file in files)
    said = re.search(r"It has ([\d,]+) lines in (\d+) files", (ROOT / "docs/design/options.md").read_text())
    assert (int(said[1].replace(",", "")), int(said[2])) == (lines, len(files)), "docs/design/options.md, Where the lines are"
    limits = (ROOT / "docs/design/limits.md").read_text()
    assert f"| fewer than 9,000 lines | {lines:,} |" in limits, "docs/design/limits.md, The text of the kernels"


def test_lengths_of_kernels():
    """Of functions of device text, kernels and what they call, to the closing brace."""
    lengths = {}
    for name in tracked("src/cuda/device/*.cuh"):
        text = (ROOT / name).read_text()
        for found in re.finditer(r"^(?:__global__|__device__)([^;{]*)\{$.*?^}$", text, re.MULTILINE | re.DOTALL):
            head = re.sub(r"__(?:launch_bounds|cluster_dims)__\((?:[^()]|\([^()]*\))*\)", "", found[1])
            lengths[name, re.search(r"(\w+)\(", head)[1]] = found.group().count("\n") + 1
    kernels = {kernel for _, kernel in lengths}
    assert len(lengths) > 250 and {"sm90_forward", "sm90_small_backward", "generic_backward", "small_bias_sum"} <= kernels
    assert max(lengths.values()) > 250 and not any(kernel.startswith("__") for kernel in kernels)
    assert {name: lines for name, lines in lengths.items() if lines > KERNEL_FUNCTION_LINES} == {}


@pytest.mark.parametrize("file, function", [("cuda/plan/plan.cpp", "plan_for"), ("cpu/dispatch.cpp", "")])
def test_backends_refuse_fields_that_they_do_not_know(file, function):
    """tests/cpp/fields_test.cpp plants such a field; the call itself is looked for here."""
    text = (ROOT / "src" / file).read_text()
    body = text[text.index(f"{function}(") :] if function else text
    assert re.search(r"unknown = unknown_fields<Problem>\(kKnownFields\);\n  refuse_fields\(call\.problem, unknown\);", body)


@pytest.mark.parametrize("header, tests", [
    ("ptx/sm80.cuh", ["small_kernel.py", "test_device.py"]), ("ptx/sm90.cuh", ["test_device_sm90.py"]),
    ("ptx/wgmma.cuh", ["test_device_sm90.py"]),
])  # fmt: skip
def test_every_wrapper_of_an_instruction_has_its_test(header, tests):
    code = code_of(ROOT / "src" / "cuda" / "device" / header)
    wrappers = set(re.findall(r"(?:__forceinline__|constexpr) (?:void|int|u16|u32|u64|float|float2|uint4) (\w+)\(", code))
    assert len(wrappers) >= 8
    text = "".join((ROOT / "tests" / "gpu" / name).read_text() for name in tests)
    assert {name for name in wrappers if not re.search(rf"\b{name}\b", text)} == set()
