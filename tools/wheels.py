#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds what goes to PyPI: the source distribution, and from it a wheel each for x86-64 and aarch64.

`make wheels` calls this in an environment that has tools/wheels.txt. The compiler is zig c++, which needs nothing of
this machine: it compiles for any processor and for glibc 2.28, with LLVM's C++ library linked statically. The headers
of Highway, fmt, CLI11 and nlohmann json are Debian's, copied to a folder of their own, so that no other header of
/usr/include is seen. Every wheel is checked: its tag by auditwheel, what its library exports and needs, its size, its
licences. The same commit gives the same bits. Both wheels bring along the GPU kernels of tools/wheel_kernels.txt, which
the command of this machine's wheel compiles.
"""

import argparse
import base64
import contextlib
import hashlib
import io
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
MOST_BYTES = 8_000_000
KERNELS_FOR = "sm_90"  # Hopper: what was measured there
KERNELS = "fovea/libfovea.kernels"  # src/cuda/jit/cache.h
HEADERS = {"hwy": "libhwy-dev", "fmt": "libfmt-dev", "CLI": "libcli11-dev", "nlohmann": "nlohmann-json3-dev"}
SYSTEM = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-.*\.so\.\d")  # glibc's


def fail(message):
    sys.exit(f"wheels: {message}")


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], **options)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))} ended with {done.returncode}")


@contextlib.contextmanager
def inside(folder, **variables):
    """In this folder and with these variables of the environment."""
    here, before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def epoch():
    """The time that every file of an archive gets: SOURCE_DATE_EPOCH, else that of the last commit."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        fail("this is no git checkout; set SOURCE_DATE_EPOCH to the time of the release in seconds since 1970")
    return done.stdout.strip()


def stage(work):
    """A copy of what git tracks, with metadata for strangers: project URLs, and a README whose links are absolute."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        fail(f"{ROOT} is no git checkout; `pip wheel .` builds a wheel for this machine from any copy")
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    project = (tree / "pyproject.toml").read_text()
    repository = re.search(r'(?m)^repository = "(.*)"', project)[1]
    readme = (tree / "README.md").read_text()
    (tree / "README.md").write_text(with_absolute_links(readme, repository and f"{repository}/{{}}/v{version()}"))
    if repository:
        urls = {"Homepage": "", "Documentation": f"/tree/v{version()}/docs", "Changelog": f"/blob/v{version()}/CHANGELOG.md",
                "Issues": "/issues"}  # fmt: skip
        lines = "".join(f'{name} = "{repository}{path}"\n' for name, path in urls.items())
        (tree / "pyproject.toml").write_text(project.replace("[project.scripts]", f"[project.urls]\n{lines}\n[project.scripts]"))
    return tree


def with_absolute_links(markdown, base):
    """`base` is "https://.../{}/v1.2.3", with blob or raw for {}; where it is "" there is nothing to link to: the words
    of a link stay, an image goes."""
    def link(match):
        image, words, target = match.groups()
        if re.match(r"[a-z]+://|#", target):
            return match[0]
        if not base:
            return "" if image else words
        return f"{image}[{words}]({base.format('raw' if image else 'blob')}/{target})"

    return re.sub(r"(!?)\[([^\]\[]*)\]\(([^)\s]+)\)", link, markdown)


def version():
    text = (ROOT / "include" / "fovea" / "c.h").read_text()
    return ".".join(re.search(rf"FOVEA_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def build_sdist(tree, out):
    from scikit_build_core.build import build_sdist as build

    with inside(tree):
        return out / build(str(out))


def unpack(sdist, work):
    """The folder with its sources. Objects of other sources are removed: all files are of the same time."""
    source, written = work / sdist.name[: -len(".tar.gz")], work / "sources.sha256"
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if not (source.is_dir() and written.is_file() and written.read_text() == digest):
        for old in (source, *(work / f"cmake-{arch}" for arch in ARCHITECTURES)):
            shutil.rmtree(old, ignore_errors=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(work)
        written.write_text(digest)
    return source


def copy_headers(work):
    """The only headers beside zig's that the compiler sees; returns the folder above include/."""
    for name, package in HEADERS.items():
        if not (Path("/usr/include") / name).is_dir():
            fail(f"/usr/include/{name} is missing; tools/deps.sh installs {package}")
        shutil.copytree(Path("/usr/include") / name, work / "root" / "include" / name, dirs_exist_ok=True)
    return work / "root"


def copy_licenses(work, zig):
    """Of everything that is in the binaries beside fovea."""
    folder = work / "licenses"
    folder.mkdir(exist_ok=True)
    files = {package: Path("/usr/share/doc") / package / "copyright" for package in HEADERS.values()}
    files.update({f"llvm-{name}": zig.parent / "lib" / name / "LICENSE.TXT" for name in ("libcxx", "libcxxabi", "libunwind")})
    files["zig-compiler-rt"] = zig.parent / "LICENSE"
    files["glibc-startup"] = zig.parent / "lib" / "libc" / "glibc" / "LICENSES"
    for name, file in files.items():
        if not file.is_file():
            fail(f"{file}, the licence of {name}, is missing")
        shutil.copyfile(file, folder / f"{name}.txt")
    return folder


def compiler(work, zig, arch):
    """A folder with cc, c++, ar and ranlib, as CMake wants them."""
    folder = work / f"zig-{arch}"
    folder.mkdir(exist_ok=True)
    target = f"-target {arch}-linux-gnu.{GLIBC}"
    # LLVM 18 to 20 want AVX-512's 512 bits named, where zig has named a processor without them.
    wide = 'case " $* " in *" -mavx512f "*) set -- "$@" -mevex512 ;; esac\n'
    for name, does in {"cc": f"cc {target}", "c++": f"c++ {target}", "ar": "ar", "ranlib": "ranlib"}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\n{wide if name == "c++" else ""}exec "{zig}" {does} "$@"\n')
        script.chmod(0o755)
    return folder


def build_wheel(source, arch, work, zig, jobs):
    from scikit_build_core.build import build_wheel as build

    definitions = {
        "CMAKE_TOOLCHAIN_FILE": source / "cmake" / "zig.cmake",
        "FOVEA_ZIG": compiler(work, zig, arch),
        "FOVEA_ZIG_TARGET": f"{arch}-linux-gnu.{GLIBC}",
        "CMAKE_FIND_ROOT_PATH": copy_headers(work),
        "CMAKE_PREFIX_PATH": "/",
        "FOVEA_COMMAND": "ON",
        "FOVEA_LICENSES": copy_licenses(work, zig),
    }
    settings = {f"cmake.define.{name}": str(value) for name, value in definitions.items()}
    settings["build-dir"] = str(work / f"cmake-{arch}")
    built = work / f"built-{arch}"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    with inside(source, CMAKE_BUILD_PARALLEL_LEVEL=str(jobs), _PYTHON_HOST_PLATFORM=f"linux-{arch}"):
        return built / build(str(built), settings)


def compile_kernels(wheel, source, work, jobs):
    """A folder of GPU kernels, compiled by the command of `wheel`, which is for this machine. They depend on the text in
    the library and on NVRTC, not on this processor."""
    import nvidia.cu13

    folder, unpacked = work / "kernels", work / "command"
    for old in (folder, unpacked):
        shutil.rmtree(old, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        command = Path(archive.extract("fovea/bin/fovea", unpacked))
    command.chmod(0o755)
    (nvrtc,) = (Path(next(iter(nvidia.cu13.__path__))) / "lib").glob("libnvrtc.so.*")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("FOVEA_")}
    run(command, "precompile", "--arch", KERNELS_FOR, "--file", source / "tools" / "wheel_kernels.txt", "--jobs", jobs,
        env={**settings, "FOVEA_CACHE_DIR": str(folder), "FOVEA_NVRTC": str(nvrtc)})  # fmt: skip
    return folder


def pack(wheel, kernels, system, out):
    """The same files, and the kernels, under the system's name; in order, all of the same time, so that the bits are the same."""
    name, version, python, abi, _ = wheel.stem.split("-")
    tag = f"{python}-{abi}-{system}"
    date = time.gmtime(max(int(epoch()), 315532800))[:6]  # zip begins in 1980
    with zipfile.ZipFile(wheel) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist() if not entry.endswith("/")}
        programs = {entry.filename for entry in archive.infolist() if entry.external_attr >> 16 & stat.S_IXUSR}
    (record,) = (entry for entry in content if entry.endswith(".dist-info/RECORD"))
    content.update({f"{KERNELS}/{file.name}": file.read_bytes() for file in kernels.iterdir()})
    information = record.rpartition("/")[0]
    about = content[f"{information}/WHEEL"].decode()
    content[f"{information}/WHEEL"] = re.sub(r"(?m)^Tag: .*\n", "", about).rstrip("\n").encode() + f"\nTag: {tag}\n".encode()
    del content[record]
    lines = []
    for entry in sorted(content):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content[entry]).digest()).rstrip(b"=").decode()
        lines.append(f"{entry},sha256={digest},{len(content[entry])}\n")
    content[record] = ("".join(lines) + f"{record},,\n").encode()
    result = out / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(result, "w") as archive:
        for entry in [*sorted(set(content) - {record}), record]:
            about = zipfile.ZipInfo(entry, date)
            about.external_attr = (stat.S_IFREG | (0o755 if entry in programs else 0o644)) << 16
            about.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(about, content[entry], compresslevel=9)
    return result


def check(wheel, arch):
    """What makes it unfit to be installed by strangers ends the program."""
    from elftools.elf.elffile import ELFFile

    size = wheel.stat().st_size
    if size >= MOST_BYTES:
        fail(f"{wheel.name} has {size} bytes; accepted: less than {MOST_BYTES}")
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True)
    tag = re.search(r'following platform tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"', shown.stdout)
    if tag is None or (int(tag[1]), int(tag[2])) > tuple(map(int, GLIBC.split("."))) or tag[3] != arch:
        fail(f"auditwheel does not accept {wheel.name}:\n{shown.stdout}{shown.stderr}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        symbols = set((ROOT / "src/capi/symbols.txt").read_text().split())
        handlers = {f"fovea_xla_{direction}_{device}" for direction in ("forward", "backward") for device in ("cpu", "cuda")}
        for name, exports in (("fovea/libfovea.so", symbols), ("fovea/_fast.abi3.so", {"PyInit__fast"}),
                              ("fovea/_xla.so", {"fovea_xla_connect", *handlers}), ("fovea/bin/fovea", None)):
            if name not in names:
                fail(f"{wheel.name}: {name} is missing")
            elf = ELFFile(io.BytesIO(archive.read(name)))
            if elf.get_machine_arch() != {"x86_64": "x64", "aarch64": "AArch64"}[arch]:
                fail(f"{wheel.name}: {name} is for {elf.get_machine_arch()}")
            needed = [part.needed for part in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
            if foreign := [library for library in needed if not SYSTEM.fullmatch(library)]:
                fail(f"{wheel.name}: {name} needs {', '.join(foreign)}; accepted: glibc's libraries")
            exported = {
                symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
                if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK")
            }
            if exports is not None and exported != exports:
                fail(f"{wheel.name}: {name} exports {', '.join(sorted(exported)[:20])}; accepted: "
                     f"{', '.join(sorted(exports)[:3])} and so on")
            if elf.get_section_by_name(".debug_info") or elf.get_section_by_name(".symtab"):
                fail(f"{wheel.name}: {name} is not stripped")
        if not any(name.startswith(KERNELS) for name in names):
            fail(f"{wheel.name} has no GPU kernels")
        licenses = [name for name in names if ".dist-info/licenses/" in name]
        if len(licenses) < 1 + len(HEADERS) + 4:
            fail(f"{wheel.name} has the licences {', '.join(licenses)} alone")
    print(f"{wheel.name}: {size / 1e6:.2f} MB, by auditwheel manylinux_{tag[1]}_{tag[2]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where they go (dist)")
    parser.add_argument("--work", type=Path, default=ROOT / "build-wheels", help="what is kept between runs (build-wheels)")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="this one alone (both)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel jobs (all cores)")
    arguments = parser.parse_args()
    try:
        import ziglang
    except ImportError:
        fail(f"{sys.executable} has no ziglang; `make wheels` makes an environment that has it")
    zig = Path(ziglang.__file__).resolve().parent / "zig"
    if platform.machine() not in (arguments.arch or ARCHITECTURES):
        fail(f"--arch {platform.machine()} is missing: the command of this machine's wheel compiles the GPU kernels of all")
    out, work = arguments.out.resolve(), arguments.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    os.environ["SOURCE_DATE_EPOCH"] = epoch()
    for scope in ("GLOBAL", "LOCAL"):  # zig keeps every object; what was built elsewhere must not decide about the bits
        os.environ[f"ZIG_{scope}_CACHE_DIR"] = str(work / "zig-cache")
    for scope in ("C", "CXX"):  # the scripts of compiler() are all alike to a compiler cache
        os.environ.pop(f"CMAKE_{scope}_COMPILER_LAUNCHER", None)
    for old in [*out.glob("fovea_attention-*.whl"), *out.glob("fovea_attention-*.tar.gz")]:
        old.unlink()
    sdist = build_sdist(stage(work), out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    source = unpack(sdist, work)
    own = platform.machine()
    kernels = None
    for arch in sorted(arguments.arch or ARCHITECTURES, key=lambda arch: arch != own):
        start = time.monotonic()
        wheel = build_wheel(source, arch, work, zig, arguments.jobs)
        compiled = time.monotonic()
        if arch == own:
            kernels = compile_kernels(wheel, source, work, arguments.jobs)
        check(pack(wheel, kernels, f"manylinux_{GLIBC.replace('.', '_')}_{arch}", out), arch)
        print(f"  compiled in {compiled - start:.0f} s, kernels and checks {time.monotonic() - compiled:.0f} s", flush=True)


if __name__ == "__main__":
    main()
