# SPDX-License-Identifier: Apache-2.0
"""One problem: its tensors, the call and the comparison, for every test of this folder that has a problem line."""

from __future__ import annotations

import re
import subprocess

import torch

from conftest import BUILD
from formula import Formula, compare, verdict
from library import Call
from problem import Problem
from tensors import Tensors

DRAWS = 3
MORE_DRAWS = 30  # others, where those are not enough: as in src/check/tolerance.h


def hopper_plan(line: str) -> str:
    """What `fovea explain` says of a line on Hopper: other tests of it would pass as well if some other kernel computed it."""
    words = re.sub(r" values=\S+", "", line)
    return subprocess.run([BUILD / "cli/fovea", "explain", "--arch", "sm_90", words], capture_output=True, text=True, check=True).stdout


class Trial:
    """A problem with its memory and what is right for it. Every backward reads the same out and lse: the
    reference's, rounded to their types."""

    def __init__(self, p: Problem, device: torch.device, backend: str = "") -> None:
        self.problem = p
        self.tensors = Tensors(p, device)
        self.call = Call(self.tensors, backend)
        reference = Formula(self.tensors, naive=False)
        draws = [Formula(self.tensors, naive=True, draw=draw) for draw in range(DRAWS)]
        self.saved = reference.combined(reference.forward(), False)
        forwards = [naive.combined(naive.forward(), False) for naive in draws]
        self.right = {name: (x, [naive[name] for naive in forwards]) for name, x in self.saved.items()}
        self._give_saved()
        backwards = [naive.combined(naive.backward(), True) for naive in draws]
        for name, x in reference.combined(reference.backward(), True).items():
            self.right[f"grad_{name}"] = x, [naive[name] for naive in backwards]

    def _give_saved(self) -> None:
        for name in ("out", "lse"):
            self.tensors[name].poison()
            self.tensors.write_padded(name, self.saved[name])

    def prepare(self, backward: bool) -> None:
        if backward:
            self._give_saved()
        self.call.prepare(backward)

    def run(self, backward: bool) -> None:
        self.call.run(backward)

    def faults(self, backward: bool) -> list[str]:
        """What is wrong; one wait for the device."""
        outputs = list(self.tensors.outputs(backward))
        names = [t.name for t in outputs]
        numbers = [self._compared(t, self.right[t.name][1]) for t in outputs]
        trespass = self.call.trespass(backward)
        counts = torch.stack([n for _, n in trespass]).double()
        found = torch.cat([*numbers, counts]).tolist()
        faults = [verdict(name, found[5 * n : 5 * n + 5]) for n, name in enumerate(names)]
        if any(fault and not found[5 * n] for n, fault in enumerate(faults)):
            more = self._more_draws(backward)
            for n, t in enumerate(outputs):
                if faults[n] and not found[5 * n]:
                    faults[n] = verdict(t.name, self._compared(t, more[t.name]).tolist())
        for (name, _), count in zip(trespass, found[5 * len(names) :]):
            if count:
                faults.append(f"{name}: {count:.0f} elements written where nothing is to be")
        return [fault for fault in faults if fault]

    def _compared(self, t, naive: list[torch.Tensor]) -> torch.Tensor:
        reference = self.right[t.name][0]
        if t.kind <= 2:  # rows and statistics
            index, exist = self.tensors._padded_index(t)
            return compare(t.buffer[index][exist], reference[exist], [x[exist] for x in naive])
        return compare(t.buffer[t.index], reference.reshape(t.shape), [x.reshape(t.shape) for x in naive])

    def _more_draws(self, backward: bool) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for draw in range(DRAWS, DRAWS + MORE_DRAWS):
            naive = Formula(self.tensors, naive=True, draw=draw)
            for name, x in naive.combined(naive.backward() if backward else naive.forward(), backward).items():
                found.setdefault(f"grad_{name}" if backward else name, []).append(x)
        return found

    def test(self) -> list[str]:
        """Forward and backward; the faults of both."""
        faults = []
        for backward, way in ((False, "forward"), (True, "backward")):
            try:
                self.prepare(backward)
                self.run(backward)
                faults += [f"{way}: {fault}" for fault in self.faults(backward)]
            except (NotImplementedError, ValueError, MemoryError) as error:  # a fault of the device goes on up
                faults.append(f"{way}: {type(error).__name__}: {error}")
        return faults

    def test_captured(self) -> list[str]:
        """The same from a CUDA graph: a hidden synchronisation or allocation fails in the capture."""
        faults = []
        for backward, way in ((False, "forward"), (True, "backward")):
            try:
                self.prepare(backward)
            except NotImplementedError as error:
                faults.append(f"captured {way}: {error}")
                continue
            graph = torch.cuda.CUDAGraph()
            stream = capture_stream(self.tensors.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin()
                try:
                    self.run(backward)
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
            for _ in range(2):  # the second replay finds a workspace that was used
                self.tensors.prepare(backward)
                graph.replay()
            faults += [f"captured {way}: {fault}" for fault in self.faults(backward)]
        return faults


_STREAMS: dict = {}


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: PyTorch refuses captures on the default stream."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
