# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.enable(): switching, what is computed, what is handed back and why, what is counted. The fuzzer compares
numbers with PyTorch's (fuzz_sdpa.py); test_enable_graphs.py has what compiles and exports."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings

import fuzz_sdpa
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fovea
from fovea.torch import _call, _enable, _enable_decisions, _enable_jagged, _enable_kernel, _enable_order, _enable_state, _enable_tag, _fast, _fastest, _operators, _sdpa, disable, enable, enabled, is_enabled, reset_stats, stats


@pytest.fixture(autouse=True)
def off():
    disable()
    reset_stats()
    yield
    disable()
    reset_stats()
    torch._C._set_deterministic_algorithms(False)


def counted():
    """(served, traced, handed back in all)"""
    now = stats()
    return now["served"], now["traced"], sum(now["handed_back"].values())


def qkv(*shape, dtype=torch.float32, grad=True):
    return [torch.randn(shape or (2, 4, 6, 8), dtype=dtype, requires_grad=grad) for _ in range(3)]


def results(function, *leaves):
    out = function()
    return [out.detach(), *torch.autograd.grad(out.cos().sum(), leaves)]


def close(got, want):
    for x, y in zip(got, want):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# ---- switching ----


def test_on_and_off():
    q, k, v = qkv(grad=False)
    want = sdpa(q, k, v)
    assert not is_enabled() and counted() == (0, 0, 0)
    enable(prefer=None)
    assert is_enabled()
    torch.testing.assert_close(sdpa(q, k, v), want)
    assert counted() == (1, 0, 0)
    enable(prefer=None)  # nothing changes
    sdpa(q, k, v)
    disable()
    disable()
    sdpa(q, k, v)
    assert not is_enabled() and counted() == (2, 0, 0)
    reset_stats()
    assert stats() == {"served": 0, "traced": 0, "handed_back": {}, "problems": [], "operators": {}}


def test_contexts_restore_what_was_in_force():
    q, k, v = qkv(grad=False)
    with enabled(prefer=None):
        with enabled(prefer=None, strict=True):
            assert _enable_state.state.settings.strict
            with pytest.raises(RuntimeError, match="inside"), enabled("cuda"):
                raise RuntimeError("inside")
            assert _enable_state.state.settings == (("cuda", "cpu"), None, True, False)
        assert _enable_state.state.settings == (("cuda", "cpu"), None, False, False)
        sdpa(q, k, v)
    assert not is_enabled() and counted()[0] == 1


def test_a_context_may_be_entered_again():
    q, k, v = qkv(grad=False)
    context = enabled(prefer=None)
    for number in (1, 2):
        with context, context:
            sdpa(q, k, v)
        assert not is_enabled() and counted()[0] == number
    assert context(lambda: is_enabled())() and not is_enabled()


def test_a_context_restores_the_fast_path_of_modules():
    """Which a program may have turned on again."""
    enable(prefer=None)
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with enabled(prefer=None, strict=True):
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled()
    finally:
        disable()
        torch.backends.mha.set_fastpath_enabled(True)


def test_only_the_devices_that_are_named():
    q, k, v = qkv(grad=False)
    with enabled("cuda", prefer=None):
        sdpa(q, k, v)
    assert counted() == (0, 0, 0)
    with enabled(["cpu"], prefer=None):
        sdpa(q, k, v)
    assert counted() == (1, 0, 0)


@pytest.mark.parametrize("options, error, text", [
    ({"devices": "tpu"}, ValueError, "devices: 'tpu'; accepted: 'cuda', 'cpu' or both"),
    ({"devices": ()}, ValueError, r"devices: \(\); accepted"),
    ({"devices": 1}, TypeError, "devices: 1; accepted"),
    ({"prefer": "slowest"}, ValueError, "prefer: 'slowest'; accepted: 'fastest', None"),
    ({"strict": 1}, TypeError, "strict: 1; accepted: True or False"),
])  # fmt: skip
def test_bad_input(options, error, text):
    for switch in (enable, enabled):  # this one before it is entered
        with pytest.raises(error, match=text):
            switch(**options)
    assert not is_enabled()


def test_every_thread_is_served():
    tensors = qkv()
    want = results(lambda: sdpa(*tensors), *tensors)
    enable(prefer=None)
    failures = []

    def work():
        try:
            for _ in range(50):
                close(results(lambda: sdpa(*tensors), *tensors), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and counted() == (200, 0, 0)


def test_blocks_of_several_threads_may_overlap():
    """The one that was entered last applies, and after all of them what was before."""
    first, second = enabled("cpu", prefer=None), enabled("cpu", prefer=None, strict=True)
    strict = lambda: is_enabled() and _enable_state.state.settings.strict  # noqa: E731
    for outer in (None, True):
        if outer:
            enable("cpu")
        first.__enter__(), second.__enter__()
        assert strict()
        first.__exit__()
        assert strict()
        second.__exit__()
        assert is_enabled() == bool(outer) and not _enable_state.state.blocks
    first.__enter__(), second.__enter__(), second.__exit__()
    assert is_enabled() and not strict()
    first.__exit__()
    assert _enable_state.state.settings.prefer == "fastest"


def test_a_block_that_two_threads_share_ends_with_its_own_thread():
    shared = enabled("cpu", prefer=None)

    def enter():
        shared.__enter__()
        left.wait()
        shared.__exit__()

    left = threading.Event()
    shared.__enter__()
    with enabled("cpu", prefer=None, strict=True):
        thread = threading.Thread(target=enter)
        thread.start()
        while len(_enable_state.state.blocks) < 3:
            pass
        shared.__exit__()  # that of this thread, which is the first
        assert not _enable_state.state.settings.strict  # the other thread's was entered last
        left.set()
        thread.join()
        assert _enable_state.state.settings.strict
    assert not is_enabled() and not _enable_state.state.blocks


@pytest.mark.parametrize("last", [None, {}, {"operators": True}], ids=str)
@pytest.mark.parametrize("first", [None, {}, {"operators": True}], ids=str)
def test_tags_while_the_program_has_patched_its_own(first, last):
    """PyTorch writes back what it has read."""
    config = torch.compiler.config
    if not hasattr(config._config["cache_key_tag"].user_override, "get"):
        pytest.skip("before PyTorch 2.15 a patch that is open across a switch puts back the tag from before it")
    switch = lambda options: disable() if options is None else enable("cpu", prefer=None, **options)  # noqa: E731
    switch(first)
    with config.patch(cache_key_tag="mine"):
        switch(last)
        assert config.cache_key_tag.startswith("mine") and config.cache_key_tag.count("fovea") == (last is not None)
    disable()
    switch(last)
    want = config.cache_key_tag
    assert want.count("fovea") == (last is not None) and want.endswith(" operators;") == bool(last)
    disable()
    assert config.cache_key_tag == ""


def test_a_switch_by_a_backend_that_compiles_is_refused():
    said = []

    def backend(graph, inputs):
        for switch in (enable, disable):
            with pytest.raises(RuntimeError, match="called from code that torch.compile traces; accepted: before it"):
                switch()
            said.append(switch)
        return graph

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
    assert said == [enable, disable] and not is_enabled()


def test_switches_and_nested_tensors_while_another_thread_compiles():
    """torch.compiler.is_compiling() is of the process."""
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    compiling, done = threading.Event(), threading.Event()
    enable(prefer=None, strict=True)

    def backend(graph, inputs):
        compiling.set()
        assert done.wait(60)
        return graph

    thread = threading.Thread(target=lambda: torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3)))
    thread.start()
    try:
        assert compiling.wait(60) and torch.compiler.is_compiling()
        sdpa(nested, nested, nested)
        assert counted() == (1, 0, 0)
        _enable._refuse_while_compiling("disable")  # does not; disable() waits for PyTorch's lock of compilations
    finally:
        done.set()
        thread.join()


def test_a_signal_handler_asks_for_stats():
    with _enable_state.counts.lock:
        assert stats()["served"] == 0


def test_no_tag_and_no_switch_is_left_behind():
    config = torch.compiler.config
    before = config.cache_key_tag
    with enabled(prefer=None):
        assert not torch.backends.mha.get_fastpath_enabled()
        config.cache_key_tag += ";of a user"
        assert config.cache_key_tag.count("fovea") == 1
        own = isinstance(config._config["cache_key_tag"].user_override, _enable_tag._Tagged)  # since 2.15: of each thread
        read = []

        def other():
            read.append(config.cache_key_tag)
            if own:
                config.cache_key_tag = "of a thread"
                read.append(config.cache_key_tag)
                disable()
                read.append(config.cache_key_tag)

        thread = threading.Thread(target=other)
        thread.start(), thread.join()
        assert read[0].count("fovea") == 1
        if own:
            assert read[1].startswith("of a thread;fovea-") and read[2] == "of a thread"
    assert config.cache_key_tag == before + ";of a user"
    config.cache_key_tag = before
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with enabled(prefer=None):
        torch.backends.mha.set_fastpath_enabled(True)  # by the program, which keeps it
    assert torch.backends.mha.get_fastpath_enabled()
    tags = {before}
    others = {"devices": "cpu", "prefer": None, "strict": True, "operators": True}
    assert set(others) == set(inspect.signature(enable).parameters)
    for options in ({}, *({name: value} for name, value in others.items())):
        with enabled(**options):
            tags.add(config.cache_key_tag)
            assert f"fovea-{fovea.__version__}" in config.cache_key_tag
    assert len(tags) == 2 + len(others)


class Library(torch.library.Library):
    """Calls `then` after each registration and after each that is taken away."""

    then = None

    def impl(self, *arguments, **options):
        super().impl(*arguments, **options)
        Library.then()

    def _destroy(self):
        super()._destroy()
        if Library.then is not None:
            Library.then()


def test_a_call_while_it_is_switched_keeps_its_gradient(monkeypatch):
    """Another thread may call between two registrations."""
    tensors = qkv()
    want = results(lambda: sdpa(*tensors), *tensors)
    calls = []

    def call():
        calls.append(close(results(lambda: sdpa(*tensors), *tensors), want))

    monkeypatch.setattr(Library, "then", staticmethod(call))
    monkeypatch.setattr(_enable, "_library", Library)
    monkeypatch.setattr(Library, "Library", Library, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable("cpu", prefer=None)
        disable()
    assert len(calls) == 4


@pytest.mark.parametrize("first", [None, {"prefer": None}])
@pytest.mark.parametrize("at", ["Library", "take", "nested_module", "set_fastpath_enabled"])
def test_an_exception_while_it_is_switched_leaves_what_was_in_force(first, at, monkeypatch):
    tensors = qkv(grad=False)
    tag = torch.compiler.config.cache_key_tag
    nested_attention = _enable_jagged.nested_module().jagged_scaled_dot_product_attention
    if first is not None:
        enable(**first)
    before = _enable_state.state.settings, torch.compiler.config.cache_key_tag, torch.backends.mha.get_fastpath_enabled()
    calls = []

    def interrupted(*arguments, **options):
        calls.append(at)
        raise KeyboardInterrupt

    def fail_once(place, name):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **o: (real if calls else interrupted)(*a, **o))

    if at == "Library":
        monkeypatch.setattr(Library, "then", staticmethod(lambda: None if calls else interrupted()))
        monkeypatch.setattr(_enable, "_library", Library)
        monkeypatch.setattr(Library, "Library", Library, raising=False)
    else:
        fail_once({"take": _enable._owners, "nested_module": _enable}.get(at, torch.backends.mha), at)
    with pytest.raises(KeyboardInterrupt), enabled("cpu", prefer=None, strict=True, operators=True):
        pass
    assert calls and not fovea.torch.aten.owners()
    assert (_enable_state.state.settings, torch.compiler.config.cache_key_tag, torch.backends.mha.get_fastpath_enabled()) == before
    sdpa(*tensors)
    assert counted()[0] == (first is not None)
    enable(prefer=None, strict=True)
    disable()
    sdpa(*tensors)
    assert not is_enabled() and counted()[0] == (first is not None)
    assert torch.compiler.config.cache_key_tag == tag and torch.backends.mha.get_fastpath_enabled()
    assert _enable_jagged.nested_module().jagged_scaled_dot_product_attention is nested_attention


# ---- the private names of PyTorch that it uses ----


def test_the_operator_is_composite_and_decomposes():
    """OpOverload.decompose of PyTorch 2.9 to 2.15."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(_enable._operator.name(), "CompositeImplicitAutograd")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(_enable._operator.name(), "AutogradCPU")
    q, k, v = qkv(grad=False)
    assert torch.equal(_enable_decisions.composite(q, k, v), sdpa(q, k, v))


def test_a_library_can_be_destroyed():
    """torch.library.Library._destroy of PyTorch 2.9 to 2.15."""
    with enabled():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(_enable._operator.name(), "AutogradCPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(_enable._operator.name(), "AutogradCPU")


def test_nested_attention_is_where_it_was():
    """torch.nested._internal.ops.jagged_scaled_dot_product_attention of PyTorch 2.9 to 2.15; without it dense tensors
    are computed all the same."""
    assert _enable_jagged.nested_module() is not None


def test_dynamo_knows_what_it_shall_not_trace():
    """_dynamo_marked_constant of PyTorch 2.9 to 2.15."""
    marked = torch.compiler.assume_constant_result(lambda: 1)
    assert vars(marked) == {"_dynamo_marked_constant": True} == vars(_enable_jagged._count_compiled)


def test_without_nested_attention(monkeypatch):
    monkeypatch.setattr(_enable, "nested_module", lambda: None)
    with enabled(prefer=None):
        sdpa(*qkv())
    assert counted() == (1, 0, 0)


# ---- what is computed: numbers are the fuzzer's part ----


def test_fuzz():
    """$FOVEA_RANDOM calls, or 1,500."""
    count = int(os.environ.get("FOVEA_RANDOM", 1500))
    failures, served = fuzz_sdpa.run("cpu", range(count), show=lambda text: None)
    assert not failures, "\n".join(failures)
    assert served > 0.75 * count
    assert set(stats()["handed_back"]) <= {
        _sdpa.MALFORMED, _sdpa.RANK_OF_MASK, "keys and values with different numbers of heads", "empty tensors",
        "tensors of uint8", "tensors of int64"}  # fmt: skip


def test_pytorchs_process_is_replaced_after_a_fault():
    case = fuzz_sdpa.Case(0, "cpu")
    pytorch = fuzz_sdpa.PyTorch("cpu", alone=True)
    try:
        want = fuzz_sdpa.computed(case)
        for _ in range(2):
            for x, y in zip(pytorch.results(case), want):
                assert torch.equal(x, y)
            ended = pytorch.pool.submit(os._exit, 1)
            assert isinstance(ended.exception(), Exception) and isinstance(pytorch.results(case), fuzz_sdpa.Fault)
    finally:
        pytorch.close()


def test_the_fuzzer_finds_what_is_wrong(monkeypatch):
    """A mask that is broadcast otherwise, and a scale that is lost."""
    levels = _sdpa._levels
    with monkeypatch.context() as patch:
        patch.setattr(_sdpa, "_levels", lambda lead, mask_lead: levels(lead, mask_lead[::-1]))
        assert fuzz_sdpa.run("cpu", range(200), show=lambda text: None)[0]
    with monkeypatch.context() as patch:
        attention = _enable_kernel.attention
        patch.setattr(_enable_kernel, "attention", lambda *tensors, scale, **options: attention(*tensors, **options))
        assert fuzz_sdpa.run("cpu", range(50), show=lambda text: None)[0]
    case = next(case for seed in range(300) if (case := fuzz_sdpa.Case(seed, "cpu")).dtype == torch.float32 and not case.malformed
                and case.how == "gradients" and case.learns[0])  # fmt: skip
    pytorch = fuzz_sdpa.PyTorch("cpu")
    with enabled(prefer=None):
        mine = fuzz_sdpa.computed(case)
    assert fuzz_sdpa.check(case, mine, pytorch) == ("", False, False)
    mine[1] = mine[1] * (1 + 1e-5)  # once: a matter of chance
    wrong, _, again = fuzz_sdpa.check(case, mine, pytorch)
    assert again and not wrong
    with monkeypatch.context() as patch:  # in every draw
        patch.setattr(_enable_kernel, "attention", lambda q, *more, **options: attention(q + 1e-5 * (q - q.detach()), *more, **options))
        _enable._fast.switch_off()
        with enabled(prefer=None):
            mine = fuzz_sdpa.computed(case)
        wrong, _, again = fuzz_sdpa.check(case, mine, pytorch)
        _enable._fast.load()
    assert again and wrong.startswith("query: error"), wrong


def test_the_fuzzer_finds_malformed_calls_that_go_wrong(monkeypatch):
    """An error where PyTorch computes, a result where it refuses, and an error of another kind."""
    read = _sdpa.read

    def refuses(*call):
        if (found := read(*call)) == _sdpa.RANK_OF_MASK:
            raise ValueError("planted")
        return found

    def ignores_is_causal(q, k, v, mask, dropout_p, is_causal, *rest):
        return read(q, k, v, mask, dropout_p, is_causal and mask is None, *rest)

    def has_its_own_error(*call):
        if (found := read(*call)) == _sdpa.MALFORMED:
            raise ValueError("planted")
        return found

    planted = {
        refuses: "raises <class 'ValueError'> (planted), PyTorch None",
        ignores_is_causal: "raises None (), PyTorch <class 'RuntimeError'>",
        has_its_own_error: "raises <class 'ValueError'> (planted), PyTorch <class 'RuntimeError'>",
    }
    malformed = [seed for seed in range(800) if fuzz_sdpa.Case(seed, "cpu").malformed]
    for fault, said in planted.items():
        monkeypatch.setattr(_sdpa, "read", fault)
        failures, _ = fuzz_sdpa.run("cpu", malformed, show=lambda text: None)
        assert any(said in text for text in failures), (fault.__name__, failures)
    monkeypatch.setattr(_sdpa, "read", read)
    assert fuzz_sdpa.run("cpu", malformed, show=lambda text: None)[0] == []


def test_a_mask_of_more_dimensions_than_the_scores():
    """PyTorch adds it in place, and refuses."""
    q, k, v, mask = torch.randn(7, 8), torch.randn(4, 8), torch.randn(2, 4, 8), torch.randn(1, 7, 4)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        sdpa(q, k, v, mask)
    enable(prefer=None)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        sdpa(q, k, v, mask)
    assert stats()["handed_back"] == {_sdpa.MALFORMED: 1}


@pytest.mark.parametrize("rank", [4, 5])
def test_gradients_of_rows_that_a_large_finite_number_masks(rank):
    """docs/semantics.md: lse in fp32 loses log(n) where every key of a row has -1e9, so the row's gradients are n times too large, as
    those of PyTorch's fused kernel for four dimensions. For five, where PyTorch takes its math path, that is a difference. A mask
    of -inf, or of bool, has none."""
    tensors = qkv(*(1, 2, 4, 6, 8)[-rank:])
    tensors = [x[:1].detach().requires_grad_() for x in tensors]
    grad_out = torch.zeros_like(tensors[0])
    grad_out[..., 1, :] = torch.randn(8)  # the loss looks at the row alone

    def gradients(number):
        mask = torch.zeros(6, 6)
        mask[1] = number
        out = sdpa(*tensors, attn_mask=mask)
        return [out.detach()[..., 1, :], *torch.autograd.grad(out, tensors, grad_out)]

    with sdpa_kernel(SDPBackend.MATH):
        right = gradients(-1e9)
    theirs = gradients(-1e9)
    enable(prefer=None)
    ours = gradients(-1e9)
    close(ours[:1], right[:1])
    close(ours[1:], [6 * x for x in right[1:]])
    close(theirs[1:], [(6 if rank == 4 else 1) * x for x in right[1:]])
    assert not any(x.any() for x in gradients(-torch.inf))
    assert counted() == (2, 0, 0)


@pytest.mark.parametrize("shape", [(6, 8), (4, 6, 8), (2, 4, 6, 8), (2, 3, 4, 6, 8), (2, 1, 3, 4, 6, 8)], ids=len)
def test_dropout(shape):
    """Each row of weights is dropped with the probability and scaled; a seed of PyTorch's governs it."""
    q, k, v = (torch.zeros(shape), torch.zeros(shape), torch.eye(8)[:6].expand(*shape).clone().requires_grad_())
    enable(prefer=None)
    draws = []
    for _ in range(60):
        draws.append(sdpa(q, k, v, dropout_p=0.25).detach())
    drawn = torch.stack(draws)[..., :6] * 6
    assert ((drawn == 0) | (drawn - 1 / 0.75).abs().lt(1e-5)).all()
    share = (drawn == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * (0.1875 / drawn.numel()) ** 0.5
    torch.manual_seed(5)
    first = sdpa(q, k, v, dropout_p=0.25)
    torch.manual_seed(5)
    assert torch.equal(sdpa(q, k, v, dropout_p=0.25), first)
    assert counted() == (62, 0, 0)


def in_memory(order, *shape, **options):
    """A tensor whose dimensions lie in this order, the outermost first."""
    return torch.randn([shape[at] for at in order], **options).permute([order.index(at) for at in range(len(shape))])


def order_of(x):
    """Of the dimensions that have several elements."""
    return [at for at in sorted(range(x.dim()), key=lambda at: -x.stride(at)) if x.shape[at] > 1]


LAYOUTS = {
    "as the shape": lambda: [torch.randn(2, 4, 6, 8) for _ in range(3)],
    "heads of a row adjacent": lambda: [in_memory((0, 2, 1, 3), 2, 4, 6, 8) for _ in range(3)],
    "rows first": lambda: [in_memory((2, 0, 1, 3), 2, 4, 6, 8) for _ in range(3)],
    "of one tensor": lambda: torch.randn(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0),
    "of different orders": lambda: [torch.randn(2, 4, 6, 8), in_memory((0, 2, 1, 3), 2, 4, 6, 8), in_memory((2, 0, 1, 3), 2, 4, 6, 8)],
    "Dv != D": lambda: [in_memory((2, 0, 1, 3), 2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 5)],
    "one row": lambda: [torch.randn(2, 4, 1, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)],
    "five dimensions": lambda: [in_memory((0, 1, 3, 2, 4), 2, 3, 4, 6, 8) for _ in range(3)],
    "three dimensions": lambda: [torch.randn(4, 6, 8) for _ in range(3)],
    "three dimensions, rows first": lambda: [in_memory((1, 0, 2), 4, 6, 8) for _ in range(3)],
    "queries of all entries": lambda: [in_memory((0, 2, 1, 3), 1, 4, 6, 8).expand(3, -1, -1, -1), *(in_memory((0, 2, 1, 3), 3, 4, 6, 8) for _ in range(2))],
    "queries of all entries, as the shape": lambda: [torch.randn(1, 4, 6, 8).expand(3, -1, -1, -1), *(torch.randn(3, 4, 6, 8) for _ in range(2))],
    "queries of all heads": lambda: [torch.randn(3, 1, 6, 8).expand(-1, 4, -1, -1), *(torch.randn(3, 4, 6, 8) for _ in range(2))],
    "one query of all rows": lambda: [torch.randn(3, 4, 1, 8).expand(-1, -1, 6, -1), *(torch.randn(3, 4, 6, 8) for _ in range(2))],
    "a broadcast batch": lambda: [in_memory((0, 2, 1, 3), 2, 4, 6, 8), torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)],
}
LAYOUT_OPTIONS = {
    "plain": lambda: {},
    "a mask": lambda: {"attn_mask": torch.randn(6)[None].expand(1, 6)},
    "a mask that learns": lambda: {"attn_mask": torch.randn(1, 6, requires_grad=True)},
    "dropout": lambda: {"dropout_p": 0.5},
}


@pytest.mark.parametrize("options", LAYOUT_OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["C", "Python", "compiled"])
def test_the_layout_of_a_result(monkeypatch, way, layout, options):
    """It is PyTorch's, so .view() of a result works as it does there; and so is its gradient's."""
    if way == "Python":
        monkeypatch.setattr(_fast, "sdpa", None)
    tensors, given = [x.requires_grad_() for x in LAYOUTS[layout]()], LAYOUT_OPTIONS[options]()
    call = lambda *x: sdpa(*x, **given)  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True) if way == "compiled" else call
    want = call(*tensors)
    enable(prefer=None)
    got = compiled(*tensors)
    assert counted()[way == "compiled"] >= 1 and not stats()["handed_back"]
    assert order_of(got) == order_of(want) and got.shape == want.shape
    assert got.is_contiguous() == want.is_contiguous()
    got.sum().backward()
    assert all(x.grad is not None for x in tensors)
    if "dropout_p" not in given:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("rows_first", [False, True])
def test_the_layout_of_grouped_heads(way, lead, rows_first):
    first = (len(lead) + 1, *range(len(lead) + 1), len(lead) + 2)
    q = in_memory(first, *lead, 6, 5, 8) if rows_first else torch.randn(*lead, 6, 5, 8)
    k, v = (torch.randn(*lead, 3, 7, 8) for _ in range(2))
    call = lambda: sdpa(q, k, v, enable_gqa=True)  # noqa: E731
    want = call()
    enable(prefer=None)
    got = (torch.compile(call, backend="aot_eager", fullgraph=True) if way == "compiled" else call)()
    assert order_of(got) == order_of(want) and got.shape == want.shape and counted()[way == "compiled"] >= 1
    torch.testing.assert_close(got, want)


def test_the_layout_of_a_cpu_that_has_adjacent_heads(monkeypatch):
    """PyTorch's CPU before 2.15."""
    monkeypatch.setattr(_enable_order, "_cpu_keeps_q", lambda composite: False)
    enable(prefer=None)
    assert order_of(sdpa(*qkv(grad=False))) == [0, 2, 1, 3]


def test_the_layout_where_pytorch_has_no_choice(monkeypatch):
    """Without math paths, and where the function that chooses is missing."""
    q, k, v = qkv(grad=False)
    enable(prefer=None)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert sdpa(q, k, v).is_contiguous()
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    reset_stats()
    assert order_of(sdpa(q, k, v)) == [0, 2, 1, 3]


def test_a_bias_of_two_levels_is_not_copied(monkeypatch):
    """Protein models: (B, N, H, S, D) with a bias of (B, 1, H, S, S)."""
    seen = []
    attention = _enable_kernel.attention
    monkeypatch.setattr(_fast, "sdpa", None)
    monkeypatch.setattr(_enable_kernel, "attention", lambda *x, **options: seen.append(options["bias"]) or attention(*x, **options))
    q, k, v = qkv(2, 3, 4, 6, 8)
    bias = torch.randn(2, 1, 4, 6, 6, requires_grad=True)
    want = results(lambda: sdpa(q, k, v, bias), q, k, v, bias)
    enable(prefer=None)
    close(results(lambda: sdpa(q, k, v, bias), q, k, v, bias), want)
    assert seen[0] is bias
    six = [x[:, None] for x in (q, k, v)]
    close(results(lambda: sdpa(*six, bias[:, None]).squeeze(1), q, k, v, bias), want)
    assert seen[1].shape == (2, 1, 4, 6, 6) and seen[1].data_ptr() == bias.data_ptr()


@pytest.mark.parametrize("key_padding", [False, True])
def test_multihead_attention(key_padding):
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 6, 32)
    options = {"key_padding_mask": torch.tensor([[False] * 6, [False] * 4 + [True] * 2])} if key_padding else {}
    leaves = list(layer.parameters())
    want = results(lambda: layer(x, x, x, need_weights=False, **options)[0], *leaves)
    enable(prefer=None)
    close(results(lambda: layer(x, x, x, need_weights=False, **options)[0], *leaves), want)
    assert counted() == (1, 0, 0)
    layer(x, x, x, need_weights=True)  # makes the weights itself
    assert counted() == (1, 0, 0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_transformer_layers(training, gradients):
    """In inference PyTorch computes an encoder's layer in C++, and on the CPU without asking for attention. With
    prefer=None that path is switched off."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2).train(training)
    decoder = nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True).train(training)
    x, y = torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def run():
        with torch.set_grad_enabled(gradients):
            return decoder(y, encoder(x), tgt_mask=causal, tgt_is_causal=True)

    leaves = [*encoder.parameters(), *decoder.parameters()] if gradients else []
    want = results(run, *leaves) if gradients else [run()]
    enable(prefer=None)
    close(results(run, *leaves) if gradients else [run()], want)
    assert counted() == (4, 0, 0)


def test_the_causal_bias_objects():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = qkv(grad=False)
    q = q[:, :, :4].contiguous()
    for bias in (causal_lower_right(4, 6), causal_upper_left(4, 6)):
        want = sdpa(q, k, v, bias)
        with enabled(prefer=None):
            torch.testing.assert_close(sdpa(q, k, v, bias), want)
    assert counted() == (2, 0, 0)


def test_autocast():
    """16 bits, as PyTorch's own; the gradient of a float32 leaf is float32."""
    q, k, v = qkv()
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            out = sdpa(q, k, v, bias)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), (q, k, v, bias))]

    want = run()
    enable(prefer=None)
    for x, y in zip(run(), want):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)
    assert counted() == (1, 0, 0)


# ---- nested tensors ----


def nested(lengths, heads=4):
    return torch.nested.nested_tensor([torch.randn(n, heads, 8) for n in lengths], layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
def test_jagged(causal):
    leaf = nested([5, 9, 2])
    x = leaf.transpose(1, 2)

    def run():
        out = sdpa(x, x, x, is_causal=causal, scale=0.3).transpose(1, 2).values()
        (grad,) = torch.autograd.grad(out.cos().sum(), leaf)
        return [out.detach(), grad.values()]

    values = leaf.detach().values().requires_grad_()
    parts = [part.transpose(0, 1) for part in values.split([5, 9, 2])]
    one_by_one = torch.cat([sdpa(part, part, part, is_causal=causal, scale=0.3).transpose(0, 1) for part in parts])
    want = [one_by_one.detach(), *torch.autograd.grad(one_by_one.cos().sum(), values)]
    enable(prefer=None)
    close(run(), want)
    assert counted() == (1, 0, 0)
    disable()
    if not causal:  # PyTorch's own asks for a CUDA driver
        close(run(), want)
    assert counted() == (1, 0, 0)


def test_jagged_that_is_handed_back():
    x = nested([5, 9]).detach().transpose(1, 2)
    y = nested([5, 9]).detach().transpose(1, 2)
    want = sdpa(x, y, y)
    enable(prefer=None)
    assert sdpa(x, y, y).shape == want.shape
    with sdpa_kernel(SDPBackend.MATH):
        sdpa(x, y, y)
    assert counted()[0] == 1 and stats()["handed_back"] == {_enable_state.MATH: 1}
    with pytest.raises(ValueError):
        sdpa(x, torch.randn(2, 4, 9, 8), y)
    assert stats()["handed_back"][_sdpa.MALFORMED] == 1


def own_offsets():
    """Which PyTorch computes on the CPU, and fovea does not."""
    leaf = nested([3, 4]).detach()
    other = torch.nested.nested_tensor_from_jagged(leaf.values().clone(), leaf.offsets().clone())
    return nested([5, 9]).detach().transpose(1, 2), leaf.transpose(1, 2), other.transpose(1, 2)


def test_jagged_and_strict():
    """NestedTensor takes a NotImplementedError for a function that it has not got, and calls the next one. Devices that are not
    named are PyTorch's."""
    given = own_offsets()
    x, y, _ = given
    enable(prefer=None, strict=True)
    with pytest.raises(RuntimeError, match="nested keys and values with offsets of their own; fovea does not"):
        sdpa(*given)
    sdpa(x, y, y)
    assert counted() == (1, 0, 1)
    reset_stats()
    enable("cuda", prefer=None, strict=True)
    sdpa(*given)
    assert counted() == (0, 0, 0)


def jagged_of(lengths, heads=4, dim=8, offsets=None):
    values = torch.randn(sum(lengths), heads, dim)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)]) if offsets is None else offsets
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def jagged_three(**of_key):
    """Of which one part is wrong."""
    key = jagged_of(**{"lengths": [5, 9], **of_key})
    return jagged_of([5, 9]), key, key


LIKE_PYTORCH = {
    "a scale that is not finite": lambda: sdpa(*jagged_three(), scale=float("inf")),
    "a scale that is no number": lambda: sdpa(*jagged_three(), scale=float("nan")),
    "a scale beyond fp32": lambda: sdpa(*jagged_three(), scale=1e39),
    "dropout of 2": lambda: sdpa(*jagged_three(), dropout_p=2.0),
    "another batch": lambda: sdpa(*jagged_three(lengths=[5, 9, 2])),
    "another head dimension": lambda: sdpa(*jagged_three(dim=6)),
    "no heads": lambda: sdpa(*jagged_three(heads=0), enable_gqa=True),
}


@pytest.mark.parametrize("call", LIKE_PYTORCH.values(), ids=LIKE_PYTORCH)
def test_jagged_arguments_that_fovea_refuses_are_pytorchs(call):
    def outcome():
        torch.manual_seed(0)
        try:
            return call().values().nan_to_num()
        except Exception as error:
            return type(error), str(error)

    want = outcome()
    enable(prefer=None)
    got = outcome()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert counted() == (0, 0, 1)


def test_jagged_is_planned(monkeypatch):
    """Both directions, at the forward, once for each kind of call; what fovea refuses is handed back."""
    x = jagged_of([5, 9])
    leaf = nested([5, 9])
    enable(prefer=None)
    sdpa(x, x, x)
    for _ in range(2):
        sdpa(*[leaf.transpose(1, 2)] * 3)
    lines = stats()["problems"]
    assert [line.split()[0] for line in lines] == ["fwd", "fwd", "bwd"] and "lse" in lines[1]
    for line in lines:
        assert "total_q=14 max_q=9 total_k=14" in line and "cpu: used" in fovea.explain(line)
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(x, x, x).dtype is torch.bfloat16
    assert "bf16" in stats()["problems"][3] and counted() == (4, 0, 0)

    def refuse(a, learns):
        if any(learns):
            raise NotImplementedError("no backward")
        return ()

    monkeypatch.setattr(_enable_decisions, "_plan", refuse)
    enable(prefer=None, strict=True)
    sdpa(x, x, x)
    with pytest.raises(RuntimeError, match="no backward; fovea does not compute this"):
        sdpa(*[leaf.transpose(1, 2)] * 3)


def test_jagged_calls_are_measured_as_dense_ones(table):
    """Where nothing was measured plain and causal ones stay with PyTorch. Its CPU has no fused kernel of them, so where something was
    measured its calls without one count."""
    x = jagged_of([5, 9])
    table({})
    enable()
    sdpa(x, x, x)
    assert stats()["handed_back"] == {_enable_state.UNMEASURED: 1}
    sdpa(x, x, x, dropout_p=0.5)
    assert counted() == (1, 0, 1)
    table({_fastest.section_of(torch.device("cpu")): [row("plain", 2.0), row("other rank", 0.5)]})
    reset_stats()
    sdpa(x, x, x)
    assert counted() == (1, 0, 0)
    table({_fastest.section_of(torch.device("cpu")): [row("other rank", 2.0)]})
    reset_stats()
    sdpa(x, x, x)
    assert stats()["handed_back"] == {_enable_state.SLOWER: 1}


def test_who_keeps_the_function_for_nested_tensors_may_call_it_later(monkeypatch):
    ops = _enable_jagged.nested_module()
    theirs = ops.jagged_scaled_dot_product_attention
    given = own_offsets()
    want = theirs(*given).values()
    monkeypatch.setattr(ops, "jagged_scaled_dot_product_attention", theirs)  # to have it back in the end
    enable(prefer=None)
    kept = ops.jagged_scaled_dot_product_attention
    other = ops.jagged_scaled_dot_product_attention = lambda *x: kept(*x)
    disable()
    assert torch.equal(kept(*given).values(), want) and torch.equal(sdpa(*given).values(), want)
    enable(prefer=None)
    assert torch.equal(sdpa(*given).values(), want)  # by ours, by the one that was put there, and by PyTorch's
    assert counted() == (0, 0, 1)
    disable()
    assert ops.jagged_scaled_dot_product_attention is other


# ---- what is handed back ----


class Other(torch.Tensor):
    pass


def of_several_heads():
    q = torch.randn(2, 4, 6, 8)
    return sdpa(q, q[:, :2], q[:, :1], enable_gqa=True)


def with_math():
    q, k, v = qkv()
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), q)[0].abs().sum() > 0  # that is what it is for
    return first


def in_forward_mode():
    q = torch.randn(2, 4, 6, 8)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]), torch.autograd.forward_ad.dual_level():
        return sdpa(torch.autograd.forward_ad.make_dual(q, q), q, q, attn_mask=torch.zeros(6, 6, requires_grad=True))


HANDED_BACK = {
    "a tensor of the type Other": lambda: sdpa(*(x.detach().as_subclass(Other) for x in qkv())),
    "a transform of torch.func": lambda: torch.func.grad(lambda q: sdpa(q, q, q).sum())(torch.randn(2, 4, 6, 8)),
    "forward-mode differentiation": in_forward_mode,
    "empty tensors": lambda: sdpa(torch.randn(2, 4, 0, 8), *qkv()[1:]),
    "a scale that is not finite": lambda: sdpa(*qkv(), scale=float("inf")),
    "scale: 1e+39; accepted: a finite number, at most 3.4028234663852886e+38 in size where sums are fp32": lambda: sdpa(*qkv(), scale=1e39),
    "keys and values with different numbers of heads": of_several_heads,
    _sdpa.RANK_OF_MASK: lambda: sdpa(*qkv(4, 6, 8), attn_mask=torch.randn(1, 4, 6, 6)),
    "a tensor of layout torch.sparse_coo": lambda: sdpa(*qkv(), attn_mask=torch.randn(2, 4, 6, 6).to_sparse()),
    "a tensor of layout torch._mkldnn": lambda: sdpa(*qkv(), attn_mask=torch.randn(2, 4, 6, 6).to_mkldnn()),
    "a tensor of zeros without memory": lambda: sdpa(*qkv()[:2], torch._efficientzerotensor((2, 4, 6, 8))),
    "tensors of complex64": lambda: sdpa(*[torch.randn(2, 4, 6, 8, dtype=torch.complex64)] * 3),
    _enable_state.MATH: with_math,
    _sdpa.MALFORMED: lambda: sdpa(*qkv(), attn_mask=torch.ones(6, 6, dtype=torch.int64)),
}


MATH, FLASH, EFFICIENT, CUDNN = (
    SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)  # fmt: skip


@pytest.fixture(params=["C", "Python"])
def either_path(request):
    return request.getfixturevalue("python_path") if request.param == "Python" else None


@pytest.mark.parametrize("backends, in_this_order, ours", [
    ([MATH, FLASH], True, False), ([MATH, FLASH], False, True), ([FLASH, MATH], True, True), ([EFFICIENT, MATH], True, True),
    ([CUDNN, MATH], True, True), ([MATH, CUDNN], True, False), ([MATH, EFFICIENT, CUDNN], True, False), ([CUDNN], False, True),
])  # fmt: skip
def test_the_first_backend_that_is_allowed_decides(backends, in_this_order, ours, either_path):
    """sdpa_kernel(set_priority=True) gives an order. Without it PyTorch's own holds, which depends on the device."""
    q, k, v = qkv()
    enable(prefer=None)
    for _ in range(2):  # the second time the decision is known
        with sdpa_kernel(backends, set_priority=in_this_order):
            sdpa(q, k, v)
    assert (counted()[0], stats()["handed_back"]) == ((2, {}) if ours else (0, {_enable_state.MATH: 2}))
    sdpa(q, k, v)
    assert counted()[0] == (3 if ours else 1)


def test_a_call_that_raises_is_not_counted(either_path, monkeypatch):
    def draw(*_):
        raise MemoryError("of a test")

    q, k, v = qkv()
    monkeypatch.setattr(_operators, "draw_seed", draw)
    if _fast.sdpa is not None:
        _fast.load()  # C calls it as well
    try:
        enable(prefer=None)
        with pytest.raises(MemoryError, match="of a test"):
            sdpa(q, k, v, dropout_p=0.5)
        assert counted() == (0, 0, 0)
        sdpa(q, k, v)
        assert counted() == (1, 0, 0)
    finally:
        monkeypatch.undo()
        if _fast.sdpa is not None:
            _fast.load()


def test_a_call_whose_result_could_not_be_kept_is_not_counted(either_path):
    def refuse(tensor):
        raise LookupError("of a test")

    tensors = qkv()
    enable(prefer=None)
    with pytest.raises(LookupError, match="of a test"), torch.autograd.graph.saved_tensors_hooks(refuse, lambda x: x):
        sdpa(*tensors)
    assert counted() == (0, 0, 0)


@pytest.mark.parametrize("reason", HANDED_BACK, ids=str)
def test_handed_back(reason):
    """PyTorch gives what it gives without fovea, or raises what it raises; strict raises, but not for what somebody asked
    for or did wrong."""
    call = HANDED_BACK[reason]

    def outcome():
        torch.manual_seed(0)
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    want = outcome()
    enable(prefer=None)
    got = outcome()
    if isinstance(want, tuple):
        assert got == want
    elif "without memory" in reason:  # PyTorch's CPU kernel reads what is no memory: any numbers (seen with 2.12)
        assert got.shape == want.shape
    else:
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert stats()["handed_back"] == {reason: 1} and counted()[:2] == (0, 0)
    enable(prefer=None, strict=True)
    if reason in _enable_state.ASKED_FOR:
        assert type(outcome()) is type(want)
    else:
        with pytest.raises(NotImplementedError, match=re.escape(f"scaled_dot_product_attention: {reason}; fovea does not")):
            call()


def test_the_backward_is_planned_at_the_forward(monkeypatch):
    """A backward that the library refuses is refused before the forward, when PyTorch can still compute both."""
    tensors = qkv()
    want = results(lambda: sdpa(*tensors), *tensors)
    asked = []

    class Library:
        fovea_describe = _enable_decisions.lib.fovea_describe
        workspace = _enable_decisions.lib.fovea_workspace

        @classmethod
        def fovea_workspace(cls, problem, direction, needed):
            asked.append(direction)
            refused = direction == fovea._abi.BACKWARD
            return fovea._abi.UNSUPPORTED if refused else cls.workspace(problem, direction, needed)

    def refuse(self, status):
        raise NotImplementedError("no backward")

    monkeypatch.setattr(_enable_decisions, "lib", Library)
    monkeypatch.setattr(_call._Problem, "_refuse", refuse)
    enable(prefer=None)
    with torch.no_grad():
        sdpa(*tensors)
    assert counted() == (1, 0, 0)
    close(results(lambda: sdpa(*tensors), *tensors), want)
    assert stats()["handed_back"] == {"no backward": 1}
    assert asked == [fovea._abi.FORWARD, fovea._abi.FORWARD, fovea._abi.BACKWARD]
    results(lambda: sdpa(*tensors), *tensors)
    assert len(asked) == 3 and stats()["handed_back"] == {"no backward": 2}  # once for each kind of problem


def test_what_fovea_refuses_is_handed_back(monkeypatch):
    """By the library itself: a backend that computes nothing here."""
    q, k, v = qkv(grad=False)
    want = sdpa(q, k, v)
    problem = _call._Problem

    class Named(problem):
        def __init__(self, a):
            super().__init__(a._replace(backend="cuda"))

    monkeypatch.setattr(_call, "_Problem", Named)
    enable(prefer=None)
    assert torch.equal(sdpa(q, k, v), want)
    (reason,) = stats()["handed_back"]
    assert "cuda" in reason


def test_said_once_on_cuda():
    enable(prefer=None)
    cuda = torch.device("cuda")
    with pytest.warns(UserWarning, match="handed back to PyTorch: empty tensors .said once; fovea.torch.stats.. counts"):
        _enable_state.hand_back("empty tensors", cuda)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _enable_state.hand_back("empty tensors", cuda)
        _enable_state.hand_back(_enable_state.MATH, cuda)
        _enable_state.hand_back("another", torch.device("cpu"))
    assert stats()["handed_back"] == {"empty tensors": 2, _enable_state.MATH: 1, "another": 1}
    enable(strict=True)
    with pytest.warns(UserWarning, match="not measured on this kind of device, .* unless prefer=None .said once"):
        _enable_state.hand_back(_enable_state.UNMEASURED, cuda)


@pytest.mark.parametrize("by_c", [False, True])
def test_the_warning_names_the_callers_line(by_c, monkeypatch):
    """C, which has no frame, calls give_back(); without it there is compute() between."""
    enable(prefer=None)
    calls = [*3 * [torch.empty(0)], None, 0.0, False]
    monkeypatch.setattr(_enable_kernel, "composite", lambda *args, **options: "PyTorch's")
    monkeypatch.setattr(_enable_kernel, "_why_not_dense", lambda tensor: "empty tensors")
    monkeypatch.setattr(_enable_state, "count_handed_back", lambda reason: reason)
    hand_back = _enable_state.hand_back
    monkeypatch.setattr(_enable_kernel, "hand_back", lambda why, device, level: hand_back(why, torch.device("cuda"), level=level + 1))
    with pytest.warns(UserWarning, match="handed back to PyTorch: empty tensors") as said:
        if by_c:
            got = _enable_kernel.give_back("empty tensors", *calls, None, False)
        else:
            got = _enable_kernel.compute(*calls)
    assert got == "PyTorch's" and said[0].filename == __file__


# ---- what PyTorch does faster ----


def row(kind, ratio, **more):
    place = {"batch": 2, "heads": 4, "sq": 6, "sk": 6, "d": 8, "dtype": "float32", "backward": False}
    return {"kind": kind, "fovea_us": ratio, "pytorch_us": 1.0, **place, **more}


@pytest.fixture
def table(monkeypatch):
    import json

    def use(sections):
        text = json.dumps({"sections": {name: {"rows": rows} for name, rows in sections.items()}}).encode()
        monkeypatch.setattr(_fastest, "contents", lambda: text)
        _fastest._table.cache_clear()

    yield use
    _fastest._table.cache_clear()


def test_the_faster_one_computes(table):
    here = _fastest.section_of(torch.device("cpu"))
    table({here: [row("plain", 2.0), row("causal", 0.5), row("plain", 0.5, sk=4096), row("plain", 0.5, backward=True)]})
    q, k, v = qkv(grad=False)
    enable()
    sdpa(q, k, v)
    assert stats()["handed_back"] == {_enable_state.SLOWER: 1}
    sdpa(q, k, v, is_causal=True)
    assert counted() == (1, 0, 1)
    long = torch.randn(2, 4, 2048, 8)
    sdpa(q, long, long)  # the nearest problem is another one
    sdpa(q.requires_grad_(), k, v)
    assert counted() == (3, 0, 1)
    enable(prefer=None)
    sdpa(q.detach(), k, v)
    assert counted() == (4, 0, 1)
    enable(strict=True)
    sdpa(q.detach(), k, v)  # a wish, which strict leaves alone
    assert counted() == (4, 0, 2)


def test_what_pytorch_does_faster_is_what_it_does(monkeypatch):
    """Every argument reaches it, from C as from Python; with operators=True its operators are its own as well."""
    monkeypatch.setattr(_fastest, "slower", lambda *call: True)
    mask, bias = torch.rand(6, 6) > 0.2, torch.randn(2, 4, 6, 6, requires_grad=True)
    calls = [{}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": bias}, {"scale": 0.3}, {"dropout_p": 0.5},
             {"attn_mask": bias, "dropout_p": 0.5, "scale": 0.3}, {"enable_gqa": True}, {"enable_gqa": True, "is_causal": True},
             {"is_causal": True, "scale": 2.0, "enable_gqa": True, "dropout_p": 0.0}]  # fmt: skip
    for options in calls:
        q, k, v = qkv()
        if "enable_gqa" in options:
            k, v = qkv(2, 2, 6, 8)[:2]

        def run(q=q, k=k, v=v, options=options):
            torch.manual_seed(1)
            return results(lambda: sdpa(q, k, v, **options), q, k, v)

        want = run()
        for path in ("C", "operators", "Python"):
            enable(operators=path == "operators")
            reset_stats()
            if path == "Python":
                monkeypatch.setattr(_fast, "sdpa", None)
                disable()
                enable()
            for _ in range(3):  # C does so from the second call of a kind on
                assert all(map(torch.equal, run(), want)), (options, path)
            assert stats()["handed_back"] == {_enable_state.SLOWER: 3} and not stats()["operators"], (options, path)
            disable()
            monkeypatch.setattr(_fast, "sdpa", SDPA)
    enable()
    reset_stats()
    with pytest.raises(RuntimeError):
        sdpa(q, k, v)  # keys of two heads
    assert stats()["handed_back"] in ({_enable_state.SLOWER: 1}, {_sdpa.MALFORMED: 1})


SDPA = _fast.sdpa


def test_where_nothing_was_measured_plain_and_causal_calls_stay_with_pytorch(table):
    """As on GPUs of compute capability 10 and 12, for which fovea has no kernels of their own."""
    table({})
    q, k, v = qkv(grad=False)
    enable()
    sdpa(q, k, v)
    sdpa(q, k, v, is_causal=True)
    assert stats()["handed_back"] == {_enable_state.UNMEASURED: 2}
    sdpa(q, k, v, torch.zeros(6, 6))
    sdpa(q, k, v, torch.ones(6, 6, dtype=torch.bool))
    sdpa(q, k, v, dropout_p=0.1)
    sdpa(q[None], k[None], v[None])
    assert counted() == (4, 0, 2)


@pytest.mark.parametrize("there, used, other, bf16", [
    (("amx", "avx512_bf16", "avx512"), "amx", "cpu avx512", "cpu amx"),
    (("amx", "avx512_bf16", "avx512"), "avx512", "cpu avx512", "cpu avx512 beside amx"),  # which PyTorch uses
    (("avx512_bf16", "avx512", "avx2"), "avx512_bf16", "cpu avx512", "cpu avx512_bf16"),
    (("avx512_bf16", "avx512", "avx2"), "avx512", "cpu avx512", "cpu avx512"),
    (("neon_bf16", "neon"), "neon_bf16", "cpu neon", "cpu neon_bf16"),
    (("avx2", "sse4", "portable"), "avx2", "cpu avx2", "cpu avx2"),
    (("sse4", "portable"), "sse4", "cpu sse4", "cpu sse4"),
])  # fmt: skip
def test_bf16_may_have_a_section_of_its_own(there, used, other, bf16, table, monkeypatch):
    """Where products of bf16 have instructions of their own. Without that section plain and causal calls of bf16 stay with PyTorch,
    and float32 has its rows all the same."""
    monkeypatch.setattr(_fastest._api, "explain", lambda: "\n".join(
        f"instruction set  {name}  {'in use' if name == used else 'available'}" for name in there
    ) + "\ninstruction set  avx1024  not here: needs a processor with it")  # fmt: skip
    cpu = torch.device("cpu")

    def clear():
        _fastest.instruction_sets.cache_clear()
        _fastest.section_of.cache_clear()

    clear()
    try:
        assert (_fastest.section_of(cpu), _fastest.section_of(cpu, True)) == (other, bf16)
        table({other: [row("plain", 0.5)]})
        assert _fastest.slower(*qkv(), None, 0.0, False, False, False) is False
        of_bf16 = (*qkv(dtype=torch.bfloat16), None, 0.0, False, False, False)
        assert _fastest.slower(*of_bf16) is None
        table({other: [row("plain", 0.5)], bf16: [row("plain", 2.0, dtype="bfloat16")]})
        assert _fastest.slower(*of_bf16) is True
    finally:
        clear()


def test_a_vendor_may_have_rows_of_its_own(table, monkeypatch):
    """They go before those of the instruction set, which has the rest."""
    here = _fastest.section_of(torch.device("cpu"))
    table({here: [row("plain", 0.5), row("mask", 2.0)], f"{here} intel": [row("plain", 2.0)], f"{here} via": [row("mask", 0.5)]})
    plain, mask = (*qkv(), None, 0.0, False, False, False), (*qkv(), torch.ones(6, 6, dtype=torch.bool), 0.0, False, False, False)
    for vendor, slower in (("intel", (True, True)), ("amd", (False, True)), ("", (False, True)), ("via", (False, False))):
        monkeypatch.setattr(_fastest, "vendor", lambda vendor=vendor: vendor)
        assert (_fastest.slower(*plain), _fastest.slower(*mask)) == slower
    table({f"{here} intel": [row("plain", 0.5)]})
    monkeypatch.setattr(_fastest, "vendor", lambda: "intel")
    assert _fastest.slower(*plain) is False


def test_kinds():
    kind = _fastest.kind_of
    assert kind(4, None, False, False, False, False, True) == "plain"
    assert kind(4, None, False, False, True, False, True) == "causal"
    assert kind(4, (6, 6), True, False, False, False, True) == "mask"
    assert kind(4, (2, 1, 1, 6), True, False, False, False, True) == "mask of keys"
    assert kind(4, (6, 6), False, False, False, False, True) == "bias"
    assert kind(4, (6, 6), False, True, False, False, True) == "learned bias"
    assert kind(4, None, False, False, True, True, True) == "dropout"
    assert kind(5, None, False, False, True, False, True) == kind(4, None, False, False, False, False, False) == "other rank"


def test_the_table_that_fovea_has():
    """Every section names its machine and its versions; every row is a kind that calls have."""
    import json

    sections = json.loads(_fastest.contents())["sections"]
    assert {"cpu amx", "cpu avx512_bf16", "cpu avx512", "cpu avx2", "cpu sse4", "cpu portable", "cuda 9.0"} <= set(sections)
    assert not any("beside" in name for name in sections), "what was not measured stays with PyTorch"
    kinds = {"plain", "causal", "mask", "mask of keys", "bias", "learned bias", "dropout", "other rank"}
    for name, section in sections.items():
        assert {"machine", "pytorch", "fovea", "date", "commit"} <= set(section), name
        assert {row["kind"] for row in section["rows"]} == kinds, name
        assert all(row["fovea_us"] > 0 and row["pytorch_us"] > 0 for row in section["rows"])


def test_an_instruction_set_that_is_none_is_refused():
    """Each call on the CPU would be handed back for it."""
    program = "import fovea.torch; fovea.torch.enable(devices='cuda'); fovea.torch.enable()"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "FOVEA_CPU_ISA": "avx513"}, capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    assert done.returncode == 1 and "ValueError: FOVEA_CPU_ISA: 'avx513'; accepted: " in done.stderr, done.stderr


# ---- autograd, checkpoints, counters ----


def test_a_forward_keeps_its_backward():
    tensors = qkv()
    want = results(lambda: sdpa(*tensors), *tensors)
    enable(prefer=None)
    ours = sdpa(*tensors)
    disable()
    theirs = sdpa(*tensors)
    node = ours.grad_fn
    while type(node).__name__ in ("PermuteBackward0", "CloneBackward0"):  # Python's path copies into PyTorch's order
        node = node.next_functions[0][0]
    assert type(node).__name__ in ("FastAttentionBackward", "DirectAttentionBackward")
    first = torch.autograd.grad(ours.cos().sum(), tensors)
    enable(prefer=None)
    second = torch.autograd.grad(theirs.cos().sum(), tensors)
    close(first, want[1:])
    close(second, want[1:])
    assert type(theirs.grad_fn).__name__ not in ("FastAttentionBackward", "DirectAttentionBackward")


def test_a_second_derivative_is_refused_by_name():
    """A RuntimeError, as from PyTorch's fused kernels; its math path has one."""
    q, k, v = qkv()
    enable(prefer=None)
    (first,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first.square().sum(), q)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_mask(reentrant, either_path):
    tensors = qkv()
    enable(prefer=None)
    call = lambda *x: sdpa(*x, dropout_p=0.5)  # noqa: E731
    torch.manual_seed(3)
    want = results(lambda: call(*tensors), *tensors)
    torch.manual_seed(3)
    out = checkpoint(call, *tensors, use_reentrant=reentrant)
    out.cos().sum().backward()
    assert all(torch.equal(x, y) for x, y in zip([out.detach(), *(x.grad for x in tensors)], want))
    assert counted()[0] == 3


def test_what_selective_checkpoints_save():
    """With SAVE_IN_CHECKPOINTS in the policy attention is not computed again; without it it is."""
    tensors = qkv()
    enable(prefer=None)

    def calls(saved):
        policy = lambda ctx, op, *args, **kwargs: (  # noqa: E731
            CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
        times = []
        compute = _call.compute

        def count(*arguments, **options):
            times.append(1)
            return compute(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_call, "compute", count)
            out = checkpoint(lambda *x: sdpa(*x).sin(), *tensors, use_reentrant=False,
                             context_fn=lambda: create_selective_checkpoint_contexts(policy))  # fmt: skip
            grads = torch.autograd.grad(out.sum(), tensors)
        return len(times), grads

    often, want = calls(())
    once, got = calls(fovea.torch.SAVE_IN_CHECKPOINTS)
    assert (once, often) == (1, 2)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_floating_point_operations_are_counted():
    def flops():
        tensors = qkv(2, 4, 64, 32)
        with FlopCounterMode(display=False) as counter:
            sdpa(*tensors).sum().backward()
        return counter.get_total_flops()

    theirs = flops()
    enable(prefer=None)
    assert flops() == 2 * 2 * 4 * 64 * 64 * (32 + 32 + 5 * 32)
    assert theirs in (flops(), 0)  # 0: PyTorch 2.9 counts none of its kernel on the CPU
    assert counted() == (2, 0, 0)


def test_problems_are_what_the_command_takes():
    enable(prefer=None)
    q, k, v = qkv()
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    sdpa(q, k, v, bias)
    sdpa(q, k, v, bias)
    with torch.no_grad():
        sdpa(q, k, v, is_causal=True)
    sdpa(q.detach(), k, v)
    lines = stats()["problems"]
    assert [line.split()[0] for line in lines] == ["fwd", "bwd", "fwd", "fwd", "bwd"]
    for line in lines:
        assert "cpu: used" in fovea.explain(line)
    assert "need=k,v" in lines[4] and "bias=1,h,q,k" in lines[1] and "causal" in lines[2] and "lse" not in lines[2]
    reset_stats()
    sdpa(q, k, v, bias)
    assert stats()["problems"] == lines[:2]


def test_problems_are_bounded(monkeypatch):
    monkeypatch.setattr(_enable_decisions, "MOST_KEPT", 3)
    enable(prefer=None)
    for rows in range(2, 9):
        sdpa(*qkv(1, 1, rows, 8, grad=False))
    assert [f"sq={rows} " in line for rows, line in zip((2, 3, 4), stats()["problems"])] == [True] * 3 and counted()[0] == 7


def test_reasons_are_bounded(monkeypatch):
    """The texts of some have a number of the call."""
    monkeypatch.setattr(_enable_state, "MOST_REASONS", 3)
    enable(prefer=None)
    for scale in (*range(1, 8), *range(1, 8)):
        sdpa(*qkv(), scale=scale * 1e39)
    assert [*stats()["handed_back"].values()] == [2, 2, 2, 8] and _enable_state.OTHERS in stats()["handed_back"]


def test_calls_are_handed_back_without_python_after_the_first(monkeypatch):
    """Of each kind; but not where `strict` raises, nor where operators are fovea's too."""
    asked = []
    give_back = _enable.give_back
    for module in (_enable, _enable_kernel):  # C's and Python's
        monkeypatch.setattr(module, "give_back", lambda *call: asked.append(call[0]) or give_back(*call))
    q, k, v = qkv()
    call = HANDED_BACK["keys and values with different numbers of heads"]
    enable(prefer=None)
    for _ in range(3):
        call()
    assert stats()["handed_back"] == {"keys and values with different numbers of heads": 3}
    assert len(asked) == (1 if _fast.sdpa is not None else 3)
    reset_stats()
    assert stats()["handed_back"] == {}
    call()
    assert stats()["handed_back"] == {"keys and values with different numbers of heads": 1}
    enable(prefer=None, strict=True)
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="different numbers of heads; fovea does not"):
            call()
    enable(prefer=None, operators=True)
    asked.clear()
    for _ in range(3):
        call()
    assert len(asked) == 3


def test_determinism_is_a_kind_of_its_own():
    q, k, v = qkv(grad=False)
    enable(prefer=None)
    sdpa(q, k, v)
    torch.use_deterministic_algorithms(True)
    sdpa(q, k, v)
    lines = stats()["problems"]
    assert len(lines) == 2 and lines[1].endswith(" det")


@pytest.mark.parametrize("operators", (False, True))
def test_switching_while_other_threads_compute(operators):
    """In a process of its own, which overwrites memory that it frees: a thread that waits in a freed kernel fails then."""
    program = f"""
        import sys, threading, torch, fovea.torch
        from fovea.torch import _enable_state
        sys.setswitchinterval(1e-6)
        sdpa, stop, errors, calls = torch.nn.functional.scaled_dot_product_attention, threading.Event(), [], [0] * 4
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        fovea.set_num_threads(1), torch.set_num_threads(1)
        library = torch.library.Library("aten", "IMPL")  # PyTorch has no kernel of this for the CPU
        library.impl(operator.default, lambda q, k, v, *_, **__: (sdpa(q, k, v), *torch.zeros(3).long()), "CPU")
        def compute(n):
            q, k, v = (torch.randn(1, 2, 5 + n, 8, requires_grad=n < 2) for _ in range(3))
            def work():
                if n >= 2:
                    return (operator(q, k, v, None, False)[0] if {operators} else sdpa(q, k, v),)
                return torch.autograd.grad(sdpa(q, k, v).sum(), (q, k, v))
            want = work()
            try:
                while not stop.is_set():
                    for got, right in zip(work(), want):
                        assert got.allclose(right, 1e-5, 1e-6)
                    calls[n] += 1
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=compute, args=(n,), daemon=True) for n in range(4)]
        for one in threads: one.start()
        for n in range(400):
            fovea.torch.enable(prefer=None, devices=("cpu", ("cpu", "cuda"))[n % 2], operators={operators})
            before = sum(calls)
            while not errors and sum(calls) < before + 3: pass
            fovea.torch.disable()
        stop.set()
        for one in threads: one.join()
        assert not errors, errors
        assert not _enable_state.state.libraries and not fovea.torch.is_enabled() and not fovea.torch.aten.owners()
        served = fovea.torch.stats()
        assert served["served"] > 0 and bool(served["operators"]) == {operators}
        sdpa(*(torch.randn(1, 2, 5, 8) for _ in range(3)))
        assert fovea.torch.stats() == served
        print("served", served, "of", sum(calls))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "MALLOC_PERTURB_": "165"},
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])
