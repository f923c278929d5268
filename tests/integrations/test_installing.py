# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages: what programs find, what they do not, and that everything is put back."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fovea.integrations
from conftest import ROOT
from fovea.integrations import _stand_in, available, install, stats, uninstall

STAND_INS = {
    "flash_attn": ("flash-attn", "2.8.4", ["flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"]),
    "flash_attn_3": ("flash-attn-3", "3.0.0", ["flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface"]),
    "flash_attn_4": ("flash-attn-4", "4.0.0b36", ["flash_attn.cute", "flash_attn.cute.interface"]),
}


def theirs():
    return {name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_3", "flash_attn_interface")}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_program_finds_the_package(name):
    distribution, version, modules = STAND_INS[name]
    finders = list(sys.meta_path)
    install(name)
    install(name)  # again is no error
    for module in modules:
        assert importlib.util.find_spec(module) is not None
        assert importlib.import_module(module) is sys.modules[module]
        parent, _, last = module.rpartition(".")
        assert not parent or getattr(sys.modules[parent], last) is sys.modules[module]
    for spelled in (distribution, distribution.replace("-", "_")):
        assert importlib.metadata.version(spelled) == version
    top = modules[0].split(".")[0]
    mapping = importlib.metadata.packages_distributions()
    assert distribution in [found.replace("_", "-") for found in mapping[top]]
    own = importlib.import_module(f"fovea.integrations.{name}")
    for function in own.__all__:
        assert getattr(sys.modules[modules[0]], function) is getattr(own, function)
    uninstall(name)
    uninstall(name)
    assert theirs() == set() and sys.meta_path == finders
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(distribution)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(modules[0])


@pytest.mark.parametrize("first, second", [("flash_attn", "flash_attn_4"), ("flash_attn_4", "flash_attn")])
def test_two_that_share_a_package(first, second):
    """Versions 2 and 4 are both in flash_attn. Either may go first."""
    install(first)
    install(second)
    import flash_attn
    import flash_attn.cute

    assert flash_attn.__version__ == "2.8.4" and flash_attn.cute.__version__ == "4.0.0b36"
    assert set(importlib.metadata.packages_distributions()["flash_attn"]) == {"flash-attn", "flash-attn-4"}
    uninstall(first)
    left = sys.modules["flash_attn"]
    assert hasattr(left, "flash_attn_func") == (second == "flash_attn") and hasattr(left, "cute") == (second == "flash_attn_4")
    uninstall(second)
    assert theirs() == set()


def test_version_4_does_not_hide_a_package_of_version_2(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("flash_attn_func = 'the real one'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    says = r"install: flash_attn_4 is a part of flash_attn, which is installed.*force=True, or install\('flash_attn', 'flash_attn_4'\)"
    try:
        for imported in (False, True):
            if imported:
                importlib.import_module("flash_attn")
            with pytest.raises(RuntimeError, match=says):
                install("flash_attn_4")
        real = sys.modules["flash_attn"]
        # In any order the package comes back when the last one is gone.
        for last, first in (("flash_attn", "flash_attn_4"), ("flash_attn_4", "flash_attn")):
            install("flash_attn_4", force=True)
            install("flash_attn", force=True)
            uninstall(first)
            assert sys.modules["flash_attn"] is not real
            uninstall(last)
            assert sys.modules["flash_attn"] is real and not hasattr(real, "cute")
        install("flash_attn", "flash_attn_4", force=True)
    finally:
        uninstall("flash_attn", "flash_attn_4")
        sys.modules.pop("flash_attn", None)


def test_what_it_does_not_have_is_said():
    """An import says why; a program that asks first is answered as for any package without such a module."""
    install("flash_attn")
    says = "fovea.integrations stands in for flash-attn 2.8.4, and has its attention alone"
    for name in ("flash_attn.layers", "flash_attn.layers.rotary", "flash_attn.ops.triton"):
        with pytest.raises(ModuleNotFoundError, match=f"{says}; for the rest the package itself has to be installed"):
            importlib.import_module(name)
    for name in ("flash_attn.layers", "flash_attn.cute"):
        assert importlib.util.find_spec(name) is None
    # Whoever calls a finder by himself asks as well, at the top of a thread, too.
    done = subprocess.run([sys.executable, "-c", (
        "import sys, fovea.integrations as i\ni.install('flash_attn')\n"
        "print([f.find_spec('no_such_module', None) for f in sys.meta_path][0], sys.meta_path[0].find_spec('flash_attn.layers', None))"
    )], capture_output=True, text=True)  # fmt: skip
    assert done.stdout == "None None\n", done.stderr
    with pytest.raises(ModuleNotFoundError, match=rf"{says}; install\('flash_attn_4'\) has it"):
        importlib.import_module("flash_attn.cute")
    install("flash_attn_4")
    with pytest.raises(ModuleNotFoundError, match=says):
        importlib.import_module("flash_attn.layers")
    uninstall("flash_attn")
    with pytest.raises(ModuleNotFoundError, match=r"flash-attn-4 4.0.0b36.*; install\('flash_attn'\) has it"):
        importlib.import_module("flash_attn.bert_padding")


def test_the_second_name_of_version_3():
    """Transformer Engine and Megatron import it from a package, with its private names."""
    install("flash_attn_3")
    from flash_attn_3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_with_kvcache

    import flash_attn_interface

    for function in (_flash_attn_backward, _flash_attn_forward, flash_attn_with_kvcache):
        assert getattr(flash_attn_interface, function.__name__) is function


def test_the_private_names_of_version_4():
    """PyTorch, prime-rl and FastVideo import them from the interface; the package itself has the public names alone."""
    install("flash_attn_4")
    import flash_attn.cute
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    for function in (_flash_attn_bwd, _flash_attn_fwd):
        assert function is getattr(fovea.integrations.flash_attn_4, function.__name__) and not hasattr(flash_attn.cute, function.__name__)


def test_all_or_none(monkeypatch):
    """With an error nothing is replaced that was not before. DeepSpeed stands for a package that is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *given: None if name == "deepspeed" else find(name, *given))
    install("flash_attn_3")
    try:
        with pytest.raises(ImportError, match="deepspeed is not installed"):
            install("flash_attn", "flash_attn_3", "evoformer")
        assert find("flash_attn_interface") is not None and find("flash_attn") is None
    finally:
        uninstall("flash_attn_3", "flash_attn")
    assert find("flash_attn_interface") is None


def test_the_package_itself_is_not_replaced_without_a_word(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text("flash_attn_func = 'the real one'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import flash_attn_interface as real

    try:
        with pytest.raises(RuntimeError, match=r"install: flash_attn_interface is imported already.*force=True"):
            install("flash_attn_3")
        assert sys.modules["flash_attn_interface"] is real
        install("flash_attn_3", force=True)
        assert callable(importlib.import_module("flash_attn_interface").flash_attn_func)
        uninstall("flash_attn_3")
        assert sys.modules["flash_attn_interface"] is real
    finally:
        sys.modules.pop("flash_attn_interface", None)


@pytest.mark.parametrize("name", STAND_INS)
def test_xformers_looks_before_the_stand_in_is_there(name, tmp_path, monkeypatch):
    """It calls into whatever it can import as flash_attn."""
    monkeypatch.delitem(sys.modules, "xformers", raising=False)
    monkeypatch.delitem(sys.modules, "xformers.ops", raising=False)
    ops = tmp_path / "xformers" / "ops"
    ops.mkdir(parents=True)
    (tmp_path / "xformers" / "__init__.py").touch()
    (ops / "__init__.py").write_text("try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        install(name)
        assert sys.modules["xformers.ops"].flash_attn is None
        (ops / "__init__.py").write_text("raise OSError('broken')\n")
        for module in ("xformers", "xformers.ops"):
            del sys.modules[module]
        uninstall(name)
        install(name)
        # It may install by itself: there is one stand-in all the same.
        uninstall(name)
        (ops / "__init__.py").write_text(f"import fovea.integrations\nfovea.integrations.install({name!r})\n")
        importlib.invalidate_caches()
        sys.modules.pop("xformers", None)
        install(name)
        assert len(_stand_in._finder.stand_ins) == 1
        for module in ("xformers", "xformers.ops"):
            del sys.modules[module]
        # It imports the package itself, which the program has not done: that is replaced, and put back.
        uninstall(name)
        (tmp_path / "flash_attn.py").write_text("flash_attn_func = 'the real one'\n")
        (ops / "__init__.py").write_text("import flash_attn\n")
        importlib.invalidate_caches()
        sys.modules.pop("xformers", None)
        install("flash_attn")
        real = sys.modules["xformers.ops"].flash_attn
        assert real.flash_attn_func == "the real one" and callable(sys.modules["flash_attn"].flash_attn_func)
        uninstall("flash_attn")
        assert sys.modules["flash_attn"] is real
        with pytest.raises(RuntimeError, match="install: flash_attn is imported already"):
            install("flash_attn")
    finally:
        for module in ("xformers", "xformers.ops", "flash_attn"):
            sys.modules.pop(module, None)


@pytest.mark.parametrize("names", [(), ("flash_attn", "flash_attn_5"), ("FlashAttention",), (["flash_attn", "xformers"],)])
def test_unknown_names(names):
    for function in (install, uninstall):
        with pytest.raises(ValueError, match=r"names: .*; accepted, each by itself: .*flash_attn, flash_attn_3, flash_attn_4"):
            function(*names)
    assert theirs() == set()


def test_every_integration_says_what_it_is():
    for name, text in available().items():
        module = importlib.import_module(f"fovea.integrations.{name}")
        assert text and module.__doc__ and callable(module._install) and callable(module._uninstall)


def test_nothing_is_imported_before_it_is_used():
    """Neither the other library nor PyTorch's compiler."""
    script = (
        "import sys, importlib, fovea.integrations\n"
        "for name in fovea.integrations.available(): importlib.import_module(f'fovea.integrations.{name}')\n"
        "print(*sorted({n.split('.')[0] for n in sys.modules} & {'transformers', 'diffusers', 'flash_attn', 'xformers', 'deepspeed'}), "
        "'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["False"], done.stdout + done.stderr


def test_counts():
    install("flash_attn")
    from flash_attn import flash_attn_func

    q = torch.randn(1, 3, 2, 8)
    flash_attn_func(q, q, q)
    before = stats()
    flash_attn_func(q, q, q)
    assert before == {"flash_attn": {"served": 1, "traced": 0, "handed_back": {}}} and stats()["flash_attn"]["served"] == 2
    fovea.integrations.reset_stats()
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn_func(q, q, q, alibi_slopes=torch.ones(3))
    assert stats() == {}  # a call that raises is not counted
    q.requires_grad_()
    checkpoint(flash_attn_func, q, q, q, use_reentrant=False).sum().backward()
    assert stats()["flash_attn"]["served"] == 2  # both times it is computed


def test_errors_name_what_the_program_gave():
    install("flash_attn")
    from flash_attn import flash_attn_func, flash_attn_with_kvcache

    q = torch.randn(2, 20, 4, 16)
    with pytest.raises(TypeError, match="^softmax_scale: "):
        flash_attn_func(q, q, q, softmax_scale=torch.ones(2))
    with pytest.raises(ValueError, match="^k: ") as told:  # heads that do not fit, and a layout that flash_attn has not
        flash_attn_func(q, q[:, :, :3], q[:, :, :3])
    assert "layout" not in str(told.value)
    with pytest.raises(ValueError, match="^cache_seqlens: 50"):
        flash_attn_with_kvcache(q, q, q, cache_seqlens=torch.tensor([50, 3], dtype=torch.int32))
    with pytest.raises(TypeError, match="^cache_seqlens: a list"):
        flash_attn_with_kvcache(q, q, q, cache_seqlens=[5, 3])


# ---- without an edited line ----

PROGRAM = """
import sys, torch
before = [name for name in ("flash_attn", "transformers") if name in sys.modules]
import transformers.modeling_utils
print(*before, *sorted(transformers.modeling_utils.AttentionInterface.registered))
"""
INTERFACE = """
class {name}:
    registered = set()

    @classmethod
    def register(cls, name, function):
        cls.registered.add(name)
"""
MASKS = """
def causal_mask_function(): ...
def bidirectional_mask_function(): ...
def prepare_padding_mask(): ...
def sdpa_mask(batch_size, q_length): ...
"""


@pytest.mark.parametrize("value, printed", [("1", "fovea"), ("flash_attn,cpu", "flash_attn fovea"), ("0", "")])
def test_the_environment_variable(tmp_path, value, printed):
    """FOVEA_TORCH registers attn_implementation="fovea" when transformers is imported, not before, and installs stand-ins."""
    info = tmp_path / "fovea_attention-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fovea-attention\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfovea = fovea_autoload:load\n")
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_utils.py").write_text(INTERFACE.format(name="AttentionInterface"))
    (package / "masking_utils.py").write_text(INTERFACE.format(name="AttentionMaskInterface") + MASKS)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "python")])
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "FOVEA_TORCH": value, "PYTHONPATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed
    # What the integrations computed is in the lines at the end of the program.
    if "flash_attn" in value:
        calls = "import torch\nfrom flash_attn import flash_attn_func\nflash_attn_func(*[torch.ones(1, 2, 1, 8)] * 3)\n"
        done = subprocess.run([sys.executable, "-c", calls], env={**os.environ, "FOVEA_TORCH": f"{value},stats", "PYTHONPATH": path},
                              capture_output=True, text=True)  # fmt: skip
        assert "fovea.torch: flash_attn: 1 calls computed by fovea, 0 traced\n" in done.stderr
    # One without the interface is said, and the program goes on; so is one of before 5.4, and one without a name that is used.
    for text in ("", MASKS, INTERFACE.format(name="AttentionMaskInterface") + MASKS.replace("q_length", "cache_position"),
                 INTERFACE.format(name="AttentionMaskInterface") + MASKS.replace("prepare_padding_mask", "another")):  # fmt: skip
        (package / "masking_utils.py").write_text(text)
        done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "FOVEA_TORCH": value, "PYTHONPATH": path},
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ("FOVEA_TORCH: fovea.integrations.transformers needs transformers from 5.4 on" in done.stderr) == (value != "0")
        if value == "0":
            break


def test_the_finder_answers_for_nothing_else():
    install("flash_attn")
    assert list(_stand_in._finder.find_distributions(importlib.metadata.DistributionFinder.Context(name="numpy"))) == []
    assert importlib.metadata.version("torch").split("+")[0] == torch.__version__.split("+")[0]
