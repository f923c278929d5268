# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the kernels: each is a named error, never a crash, each in a process of its own."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
HERE = Path(__file__).resolve().parent

COMPUTE = """
import sys
sys.path[:0] = [{here!r}]
import torch
from fovea.torch import attention
torch.manual_seed(0)
q = torch.randn(1, 2, 40, 64, device="cuda", dtype=torch.bfloat16)
def compute():
    out = attention(q, q, q, softcap=7.0)
    s = 7 * torch.tanh(q.double() @ q.double().mT / 8 / 7)
    right = torch.softmax(s, -1) @ q.double()
    torch.testing.assert_close(out.double(), right, rtol=0.02, atol=0.02)
    print("RIGHT", flush=True)
def refused(call=compute):
    try:
        call()
    except Exception as error:
        print("REFUSED", type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""


def command(code):
    return [sys.executable, "-c", COMPUTE.format(here=str(HERE)) + code]


def run(code, mounted="", **environment):
    """In a process of its own; `mounted`: a shell command that mounts something first, seen by that process alone."""
    process = command(code)
    if mounted:
        process = ["unshare", "--mount", "sh", "-c", f'{mounted} && exec "$@"', "sh", *process]
    done = subprocess.run(process, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout


BESIDE = """
import threading
side, x, said = torch.cuda.Stream(), torch.zeros(8, device="cuda"), []
with torch.cuda.stream(side):
    held = torch.zeros(8, device="cuda")  # keeps a segment of PyTorch's memory: a capture begins with giving back others
def call(softcap):
    try:
        with torch.cuda.stream(side):
            said.append(attention(q, q, q, softcap=softcap))
    except Exception as error:
        said.append(error)
call(7.5 if {loaded} else 0.0)
torch.cuda.synchronize()
said.clear()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    x.add_(1)
    other = threading.Thread(target=call, args=(7.5,))
    other.start()
    other.join()
    x.add_(1)
graph.replay()
torch.cuda.synchronize()
assert x.tolist() == [2.0] * 8
assert torch.is_tensor(said[0]), said
assert torch.equal(said[0], attention(q, q, q, softcap=7.5))
print("RIGHT")
"""


@pytest.mark.parametrize("loaded", [True, False])
def test_calls_beside_the_capture_of_another_thread(loaded):
    """A capture of the usual mode forbids every thread to load code; the library's goes into no graph."""
    assert "RIGHT" in run(BESIDE.replace("{loaded}", str(loaded)))


def test_no_nvrtc(tmp_path):
    said = run("refused()", FOVEA_NVRTC="/nonexistent/libnvrtc.so.13", FOVEA_CACHE_DIR=str(tmp_path / "cache"))
    assert "REFUSED" in said and "NVRTC" in said and "/nonexistent" in said, said


@pytest.mark.parametrize("mode", ["cache", "off"])
def test_never_compile(mode, tmp_path):
    said = run("refused()", FOVEA_JIT=mode, FOVEA_CACHE_DIR=str(tmp_path / "cache"))
    assert "REFUSED" in said and "FOVEA_JIT" in said, said


def test_folder_is_made_for_its_user_alone(tmp_path):
    folder = tmp_path / "not" / "there"
    tmp_path.chmod(0o700)
    assert "RIGHT" in run("compute()", FOVEA_CACHE_DIR=str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.iterdir())
    # And once more from it, without compiling.
    assert "RIGHT" in run("compute()", FOVEA_CACHE_DIR=str(folder), FOVEA_JIT="cache")


def test_folder_that_others_may_write_to(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    said = run("refused()", FOVEA_CACHE_DIR=str(folder))
    assert "REFUSED" in said and str(folder) in said, said


def test_folder_that_cannot_be_made(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    said = run("refused()", FOVEA_CACHE_DIR=str(file / "cache"))
    assert "REFUSED" in said and str(file) in said, said


@pytest.fixture
def mounts():
    """Skips where a process may not mount: root everywhere, others where the kernel lets them."""
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")


def test_folder_that_is_read_only(mounts, tmp_path):
    """What is not there cannot be compiled, and the error names the folder; what is there is read all the same."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    read_only = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    said = run("refused()", mounted=read_only, FOVEA_CACHE_DIR=str(folder))
    assert "REFUSED" in said and str(folder) in said and "read-only" in said.lower(), said
    assert "RIGHT" in run("compute()", FOVEA_CACHE_DIR=str(folder))
    assert "RIGHT" in run("compute()", mounted=read_only, FOVEA_CACHE_DIR=str(folder))


def test_folder_that_is_full(mounts, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    full = f"mount -t tmpfs -o size=4k,mode=700 tmpfs {folder} && (head -c 4096 /dev/zero >{folder}/other)"
    said = run("refused()", mounted=full, FOVEA_CACHE_DIR=str(folder))
    assert "REFUSED" in said and str(folder) in said and "space" in said, said


def test_no_folder_at_all(tmp_path):
    assert "RIGHT" in run("compute()", FOVEA_CACHE_DIR="none", HOME="/nonexistent", XDG_CACHE_HOME="")


def test_nvrtc_newer_than_the_driver(tmp_path):
    """It would compile what the driver cannot load: told by its name, before anything is compiled."""
    for name in ("libnvrtc.so.99", "libnvrtc-builtins.so.99.1"):  # names say the version; nothing is loaded
        (tmp_path / name).touch()
    said = run("refused()", FOVEA_NVRTC=str(tmp_path), FOVEA_CACHE_DIR=str(tmp_path / "cache"))
    assert "REFUSED" in said and "99.1: newer than the driver's" in said, said


def test_no_gpu_that_is_visible():
    """As on a machine whose GPU another program was given, or none is supported."""
    said = subprocess.run(
        [sys.executable, "-c", "import fovea; print(fovea.backends()['cuda'])"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert said.returncode == 0 and said.stdout.strip() not in ("", "available"), said


def test_two_processes_compile_the_same(tmp_path):
    environment = {**os.environ, "FOVEA_CACHE_DIR": str(tmp_path / "cache")}
    both = [subprocess.Popen(command("compute()"), env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in both:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0 and "RIGHT" in said, said


def test_damaged_entries_are_compiled_again(tmp_path):
    folder = tmp_path / "cache"
    assert "RIGHT" in run("compute()", FOVEA_CACHE_DIR=str(folder))
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    for n, file in enumerate(files):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if n % 2 == 0 else content[:-100] + bytes(100))
    assert "RIGHT" in run("compute()", FOVEA_CACHE_DIR=str(folder))


RAW = """
from problem import parse
from trial import Trial
trial = Trial(parse("bwd b=1 hq=2 sq=40 sk=40 d=64 bf16 need=q,k,v"), torch.device("cuda", 0))
trial.prepare(False)
trial.run(False)
torch.cuda.synchronize()
import ctypes
from fovea._library import check, lib
memory, needed = trial.call.workspace(False)
def again():  # the call alone, without PyTorch, which has errors of its own for this
    check(lib.fovea_forward(ctypes.byref(trial.call.raw), memory.data_ptr() + 256, needed))
"""


def test_a_thread_without_a_context():
    """The first call of a backward from a thread that never saw CUDA, on the default stream, its kernels not loaded yet."""
    said = run(RAW + """
import threading
trial.prepare(True)
torch.cuda.synchronize()
memory, needed = trial.call.workspace(True)
trial.call.raw.stream = 0
def work():
    refused(lambda: check(lib.fovea_backward(ctypes.byref(trial.call.raw), memory.data_ptr() + 256, needed)))
thread = threading.Thread(target=work)
thread.start()
thread.join()
torch.cuda.synchronize()
print("FAULTS", trial.faults(True))
""")  # fmt: skip
    assert "REFUSED" not in said and "FAULTS []" in said, said


def test_use_after_fork():
    said = run(RAW + """
import os
child = os.fork()
if child == 0:
    refused(again)
    os._exit(0)
_, status = os.waitpid(child, 0)
print("CHILD", status)
compute()
""")  # fmt: skip
    assert "CHILD 0" in said and "REFUSED" in said and "fork" in said and "RIGHT" in said, said


def test_lengths_that_lie_are_told_where_that_is_asked_for():
    said = run("""
x = torch.randn(50, 2, 64, device="cuda", dtype=torch.bfloat16)
def packed(*ends):
    lengths = torch.tensor(ends, device="cuda", dtype=torch.int32)
    attention(x, x, x, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=50, max_seqlen_k=50)
packed(0, 20, 50)
refused(lambda: packed(0, 20, 60))
refused(lambda: packed(0, 30, 20))
compute()
""", FOVEA_CHECK="1")  # fmt: skip
    assert said.count("REFUSED ValueError cu_seqlens_q") == 2 and "RIGHT" in said, said


def test_a_fault_of_somebody_elses():
    """A device-side assertion of PyTorch's: every later call says that the device is in error."""
    said = run(RAW + """
stream = torch.cuda.current_stream().cuda_stream
torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
refused(torch.cuda.synchronize)
refused(again)
import os
os._exit(0)
""")  # fmt: skip
    assert said.count("REFUSED") == 2, said


def test_out_of_memory_and_on():
    said = run("""
large = torch.randn(1, 8, 65536, 64, device="cuda", requires_grad=True)
out = attention(large, large, large, window=(64, 0))
free, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
refused(lambda: out.sum().backward())
torch.cuda.set_per_process_memory_fraction(1.0)
compute()
""")  # fmt: skip
    assert "REFUSED OutOfMemoryError" in said and "RIGHT" in said, said
