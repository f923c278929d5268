# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of a group with gloo. They are started once and run functions of the tests by name."""

import datetime
import importlib
import os
import tempfile
import traceback

import torch
import torch.multiprocessing

MOST = 4
PATIENCE = datetime.timedelta(seconds=40)  # of a rank that waits for one that failed


class Ranks:
    """Four processes. `run(n, function, ...)` calls it as function(group, ...) in the first n, and returns their results."""

    def __init__(self):
        context = torch.multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, n, function, *arguments):
        for pipe in self.pipes[:n]:
            pipe.send((n, function.__module__, function.__qualname__, arguments))
        told = []
        for rank, pipe in enumerate(self.pipes[:n]):
            if not pipe.poll(120):
                raise TimeoutError(f"rank {rank} of {n} did not answer")
            told.append(pipe.recv())
        errors = [f"rank {rank} of {n}: {text}" for rank, (ok, text) in enumerate(told) if not ok]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for _, result in told]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.terminate()
        self.folder.cleanup()


def _serve(rank, folder, pipe):
    import fovea

    torch.set_num_threads(1)
    fovea.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=MOST, timeout=PATIENCE)
    groups = {n: dist.new_group(range(n), timeout=PATIENCE) for n in range(1, MOST)}
    groups[MOST] = dist.group.WORLD
    while (job := pipe.recv()) is not None:
        n, module, name, arguments = job
        torch.manual_seed(0)
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(groups[n], *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # taking the groups down would wait for every rank
