# SPDX-License-Identifier: Apache-2.0
"""The documentation site: Sphinx over the Markdown pages of this folder, the Python package's docstrings and, through
Doxygen and Breathe, the comments of the C and C++ headers. `make docs` builds it.
"""

import importlib.machinery
import importlib.util
import os
import posixpath
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

from docutils import nodes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "python")]

header = (ROOT / "include/fovea/c.h").read_text()
version = release = ".".join(re.findall(r"#define FOVEA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
project = "fovea"
author = "the fovea authors"
copyright = "the fovea authors; Apache-2.0"  # noqa: A001

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe"]
exclude_patterns = ["_build", "requirements.txt"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
nitpicky = False
keep_warnings = True
highlight_language = "none"

# ---- Python ----

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80

MISSING = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is None]
if MISSING:
    # fovea.torch and fovea.jax are documented without PyTorch and JAX, of which this much is looked at when they are imported.
    class Stub(types.ModuleType):
        __path__ = []
        __version__ = "99.0"

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock(name=f"{self.__name__}.{name}")

    class Finder:
        """Any torch.x.y or jax.x.y can be imported."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, Finder) if name.split(".")[0] in MISSING else None

        @staticmethod
        def create_module(spec):
            return Stub(spec.name)

        @staticmethod
        def exec_module(module):
            pass

    sys.meta_path.append(Finder)
if "torch" in MISSING:
    os.environ["FOVEA_TORCH_FAST"] = "0"  # the path in C takes nothing of a stub
    import torch
    import torch.autograd
    import torch.nn

    torch.Tensor = type("Tensor", (), {"__module__": "torch"})
    torch.autograd.Function = type("Function", (), {"apply": None})
    torch.nn.Module = type("Module", (), {"__module__": "torch.nn"})
    torch.no_grad = lambda: lambda function: function
if "jax" in MISSING:
    import jax

    jax.Array = type("Array", (), {"__module__": "jax"})

# ---- C and C++ ----

breathe_projects = {"fovea": str(HERE / "_build/doxygen/xml")}
breathe_default_project = "fovea"
breathe_default_members = ("members", "undoc-members")
breathe_domain_by_file_pattern = {"*/c.h": "c", "*/attention.h": "cpp", "*/parallel*.h": "cpp"}
breathe_show_include = False
breathe_show_define_initializer = True
breathe_show_enumvalue_initializer = True


def run_doxygen(_):
    (HERE / "_build/doxygen").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["doxygen", "Doxyfile"], cwd=HERE, capture_output=True, text=True)
    if done.returncode or done.stderr.strip():
        raise RuntimeError(f"doxygen: {done.stderr.strip() or done.returncode}")


# ---- the site ----

html_theme = "furo"
html_title = f"fovea {version}"
html_static_path = ["_static"]
html_css_files = ["fovea.css"]
html_show_sphinx = False
html_domain_indices = False  # the general index has all of it
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#b3261e", "color-brand-content": "#b3261e"},
    "dark_css_variables": {"color-brand-primary": "#ff8a80", "color-brand-content": "#ff8a80"},
}


def hide_refusals(app, what, name, item, options, signature, returns):
    """*more and **unknown are there for their error messages alone."""
    if signature:
        signature = re.sub(r"\*more(?:: [\w.]+)?, ", "*, ", re.sub(r", \*\*unknown(?:: [\w.]+)?", "", signature))
    return signature, returns


def show_titles(app, doctree, name):
    """The text of a link that is a file's name becomes the title of that page."""
    for link in doctree.findall(nodes.reference):
        target = link.get("refuri", "").split("#")[0].removesuffix(".html")
        page = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if link.astext().endswith(".md") and page in app.env.titles:
            link.children = []
            link += nodes.inline("", f"“{app.env.titles[page].astext()}”")


def setup(app):
    app.connect("builder-inited", run_doxygen)
    app.connect("autodoc-process-signature", hide_refusals)
    app.connect("doctree-resolved", show_titles)
