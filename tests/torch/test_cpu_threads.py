# SPDX-License-Identifier: Apache-2.0
"""On the CPU a call computes on PyTorch's own threads. Each test is a process of its own: threads stay once they are made."""

import os
import subprocess
import sys

import pytest

START = """
import os, threading
import torch
torch.set_num_threads(2)
torch.randn(1 << 20) + 1  # PyTorch's threads start
import fovea
from fovea.torch import attention
generator = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(2, 4, 256, 32, generator=generator, requires_grad=True) for _ in range(3))
def tasks(): return len(os.listdir("/proc/self/task"))
def call():
    out = attention(q, k, v, causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
"""

TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core only")


def run(text):
    done = subprocess.run([sys.executable, "-c", START + text], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@TWO
def test_no_other_threads():
    before, after = run("before = tasks(); call(); print(before, tasks())")
    assert before == after


@TWO
def test_threads_of_ones_own_when_more_are_wanted():
    before, after, same = run("a = call(); before = tasks(); fovea.set_num_threads(4); b = call(); print(before, tasks(), same(a, b))")
    assert int(after) == int(before) + 3  # 4, the caller among them
    assert same == "True"


def test_their_number():
    """torch.set_num_threads() holds for fovea, up to what the process may use."""
    assert run("print(fovea.num_threads()); torch.set_num_threads(1); print(fovea.num_threads())")[1] == "1"
    two, most, chosen = run("""
print(fovea.num_threads()); torch.set_num_threads(4096); print(fovea.num_threads()); fovea.set_num_threads(3); print(fovea.num_threads())""")
    assert int(two) == min(2, int(most))
    assert int(most) <= len(os.sched_getaffinity(0))
    assert chosen == "3"


def test_their_number_in_a_new_thread():
    """PyTorch tells its number to a thread's runtime only when it is first asked there."""
    text = "torch.set_num_threads(1); threading.Thread(target=lambda: print(fovea.num_threads(), torch.get_num_threads())).start()"
    assert run(text) == ["1", "1"]


def test_their_number_in_a_worker_of_a_data_loader():
    """A forked process, which computes on one thread."""
    text = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, n): return torch.tensor([torch.get_num_threads(), fovea.num_threads()])
if __name__ == "__main__":
    print(*next(iter(torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")))[0].tolist())"""
    assert run(text) == ["1", "1"]


def test_the_same_bits():
    text = "a = call()\nfor n in (1, 2, 3):\n    torch.set_num_threads(n); print(same(a, call()))"
    assert run(text) == ["True"] * 3


@TWO
def test_a_forked_child():
    """PyTorch's threads do not survive a fork (its own operators hang there): the child gets threads of its own."""
    text = """
torch.set_grad_enabled(False)
a = attention(q, k, v).numpy().tobytes()
if (child := os.fork()) == 0:
    before = tasks()
    b = attention(q, k, v).numpy().tobytes()
    os._exit(0 if a == b and (before, tasks()) == (1, 2) else 1)
print(os.waitpid(child, 0)[1])"""
    assert run(text) == ["0"]


def test_threads_of_python():
    """Calls from several threads at once: each has the bits that it has alone."""
    text = """
a = call()
wrong = []
def again():
    for _ in range(10):
        if not same(a, call()): wrong.append(1)
threads = [threading.Thread(target=again) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(wrong))"""
    assert run(text) == ["0"]


@TWO
def test_flushing_of_denormals_is_left_as_it_was():
    """A call takes the caller's flushing of denormals along to PyTorch's threads, and leaves theirs as it was."""
    text = """
x = torch.full((1 << 20,), 1e-40)
def flushed(): return int(((x * 1.0) == 0).sum())
before = flushed()
torch.set_flush_denormal(True)  # of this thread
call()
torch.set_flush_denormal(False)
print(before, flushed())"""
    assert run(text) == ["0", "0"]


def test_without_pytorch():
    """A process without PyTorch is as before."""
    text = "import numpy as np, fovea, os\nq = np.ones((1, 2048, 4, 32), np.float32)\nfovea.attention(q, q, q)\nprint(fovea.num_threads(), len(os.listdir('/proc/self/task')))"
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    threads, tasks = map(int, done.stdout.split())
    assert tasks == threads
