# SPDX-License-Identifier: Apache-2.0
"""The site has every public name in its reference and in its index, its links lead somewhere, and a browser finds things."""

import ast
import html
import re
import struct
import urllib.parse

import pytest

from conftest import ROOT, SITE, parse

PAGES = sorted(SITE.rglob("*.html"))


def all_of(path):
    """__all__ of a package, without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return [element.value for element in node.value.elts]
    raise AssertionError(path)


def python_names():
    folder = ROOT / "python" / "fovea"
    integrations = [path for path in (folder / "integrations").glob("*.py") if not path.name.startswith("_")]
    for path in (folder / "__init__.py", *folder.glob("*/__init__.py"), *integrations):
        package = ".".join(path.relative_to(ROOT / "python").with_suffix("").parts).removesuffix(".__init__")
        for name in all_of(path):
            yield f"{package}.{name}"


def c_names():
    header = (ROOT / "include/fovea/c.h").read_text()
    yield from re.findall(r"FOVEA_API [^;(]*?\b(fovea_\w+)\(", header)
    yield from re.findall(r"^} (fovea_\w+);", header, re.M)
    yield from re.findall(r"\b(FOVEA_\w+) =", header)
    yield from (name for name in re.findall(r"#define (FOVEA_\w+)[ \t]+\S", header) if name != "FOVEA_API")


def c_fields():
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/fovea/c.h").read_text(), flags=re.S)
    for struct_name, body in re.findall(r"typedef struct (fovea_\w+) {(.*?)}", header, re.S):
        for field in re.findall(r"(\w+)(?:\[\w+\])?;", body):
            yield f"{struct_name}.{field}"


def cpp_names():
    for file, namespace in (("attention", ""), ("parallel", "parallel::"), ("parallel_nccl", "parallel::")):
        header = re.sub(r"namespace detail {.*?}  // namespace detail", "", (ROOT / f"include/fovea/{file}.h").read_text(), flags=re.S)
        for pattern in (r"^(?:class|struct|enum class) (\w+)[ :{;]", r"^(?:inline )?[\w:<>]+ (\w+)\(.*[{,}]$"):
            yield from (namespace + name for name in re.findall(pattern, header, re.M))


def test_the_lists_of_names_are_what_they_should_be():
    """A pattern that finds nothing would prove nothing."""
    assert {"fovea.attention", "fovea.torch.attention", "fovea.Attention", "fovea.integrations.install", "fovea.jax.attention",
            "fovea.integrations.flash_attn.flash_attn_func"} <= set(python_names())
    assert {"fovea_forward", "fovea_problem", "FOVEA_BF16", "FOVEA_CAUSAL", "fovea_status"} <= set(c_names()) and len(set(c_names())) > 50
    assert {"fovea_problem.bias", "fovea_tensor.stride", "fovea_problem.grad_sink"} <= set(c_fields())
    assert {"Tensor", "Options", "forward", "run", "explain", "dropout_mask", "num_threads", "tensor", "Align", "parallel::Rows", "parallel::Collectives", "parallel::run",
            "parallel::workspace", "parallel::nccl_collectives", "parallel::Move", "parallel::Piece"} <= set(cpp_names())
    assert "check_size" not in set(cpp_names())


@pytest.mark.parametrize("name", sorted(set(python_names())))
def test_python_names_are_described(name, inventory, index):
    assert {(f"py:{role}", name) for role in ("function", "class", "data", "module")} & inventory, name
    assert name.rsplit(".", 1)[1] in index


@pytest.mark.parametrize("name", sorted(set(c_names())))
def test_c_names_are_described(name, inventory, index):
    assert any(role.startswith("c:") and name in (full, full.rsplit(".", 1)[-1]) for role, full in inventory), name
    assert name in index


@pytest.mark.parametrize("name", sorted(set(c_fields())))
def test_c_fields_are_described(name, inventory):
    assert ("c:member", name) in inventory


@pytest.mark.parametrize("name", sorted(set(cpp_names())))
def test_cpp_names_are_described(name, inventory, index):
    page = " ".join(parse(SITE / "reference/cpp.html").words)
    short = name.rsplit("::", 1)[-1]
    assert re.search(rf"\b{short}\b", page) and re.search(rf"\b{short}\b", index), name
    assert any(role.startswith("cpp:") and full.startswith(f"fovea::{name}") for role, full in inventory), name


# What people set to change what fovea, its tests or its tools do. Names that the build defines are no environment variables.
READ = re.compile(
    r"""(?:getenv\(|env_flag\(|variable\(|environ(?:\.get\(|\.setdefault\(|\[)|environ\.pop\(|os\.getenv\()\s*['"](FOVEA_\w+)['"]"""
    r"""|['"](FOVEA_\w+)['"] (?:not )?in os\.environ|\$\{(FOVEA_\w+):|\{"(FOVEA_[A-Z_]+)","""
)


def environment():
    found = set()
    for folder in ("src", "cli", "python", "tests", "tools", "bench", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".h", ".cpp", ".c", ".py", ".sh") and "_build" not in path.parts and path.name != "test_site.py":
                found |= {name for match in READ.findall(path.read_text()) for name in match if name}
    return found


def test_the_variables_are_found():
    assert {"FOVEA_BACKEND", "FOVEA_CPU_ISA", "FOVEA_JIT", "FOVEA_CACHE_DIR", "FOVEA_NVRTC", "FOVEA_LIBRARY", "FOVEA_BUILD",
            "FOVEA_KERNEL", "FOVEA_LOG", "FOVEA_DUMP", "FOVEA_CACHE_MAX_MB", "FOVEA_PRECOMPILED_DIR", "FOVEA_CHECK"} <= environment()


@pytest.mark.parametrize("name", sorted(environment()))
def test_environment_variables_are_described(name, inventory, index):
    assert ("std:envvar", name) in inventory and name in index


def test_no_variable_is_described_that_nobody_reads(inventory):
    assert {name for role, name in inventory if role == "std:envvar"} - environment() - {"XDG_CACHE_HOME"} == set()


def options():
    """Those that every call shares, and one that each direction has for its own results."""
    path = ROOT / "python/fovea/_options.py"
    shared = [node.target.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign)]
    return sorted([*shared, "accumulate"])


@pytest.mark.parametrize("name", options())
def test_options_are_described(name, inventory, index):
    """On a page of their own and in the index."""
    assert len(options()) > 20
    page = parse(SITE / "reference/options.html")
    assert f"option-{name.replace('_', '-')}" in page.ids, name
    assert re.search(rf"\b{name}\b", index), name
    links = parse(SITE / "genindex.html").links
    assert sum(link.startswith("reference/options.html#") for link in links) == 2 * len(options())  # from either side of a pair


def terms():
    """Of the glossary: lines that begin at the margin within its block."""
    (block,) = re.findall(r"^```{glossary}\n(.*?)^```", (ROOT / "docs/glossary.md").read_text(), re.S | re.M)
    return [line for line in block.splitlines() if line and line[0] not in " :"]


@pytest.mark.parametrize("term", terms())
def test_terms_are_described(term, inventory, index):
    assert len(terms()) > 30
    assert ("std:term", term) in inventory and term in index


def test_every_word_of_the_command_line_is_described(inventory, index):
    text = "".join(path.read_text() for path in (ROOT / "cli").glob("*.cpp"))
    words = set(re.findall(r"add_(?:option|flag)[^;]*?\"(?:-\w,)?(--[\w-]+)", text))
    assert {"--arch", "--json", "--gradients"} <= words
    page = " ".join(parse(SITE / "reference/command.html").words)
    assert {word for word in words if word not in page or word not in index} == set()


def test_links_within_the_site_lead_somewhere():
    """Those that lead out of it are listed in docs/_build/external-links.txt, and not fetched."""
    pages = {path: parse(path) for path in PAGES}
    assert len(pages) > 20
    dead, external = [], set()
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                external |= {f"{path.relative_to(SITE)} {link}"} if url.netloc else set()
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                dead.append((str(path.relative_to(SITE)), link))
            elif url.fragment and target in pages and urllib.parse.unquote(url.fragment) not in pages[target].ids:
                dead.append((str(path.relative_to(SITE)), link))
    (SITE.parent / "external-links.txt").write_text("\n".join(sorted(external)) + "\n")
    assert dead == []


def test_every_page_is_reached_from_the_contents():
    seen, waiting = set(), [SITE / "index.html"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            links = (urllib.parse.urlsplit(link).path for link in parse(page).links)
            waiting += [target for target in ((page.parent / link).resolve() for link in links if link.endswith(".html")) if target.exists()]
    assert {str(page.relative_to(SITE)) for page in PAGES if page not in seen} == set()


def test_code_of_the_install_page_needs_no_scrolling():
    """A block of code on a wide screen shows 100 characters of a line."""
    blocks = re.findall(r"<pre>(.*?)</pre>", (SITE / "install.html").read_text(), re.S)
    lines = [html.unescape(re.sub(r"<[^>]*>", "", line)) for block in blocks for line in block.splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if len(line) > 100] == []


# ---- the browser ----


@pytest.mark.parametrize("query, page", [
    ("FOVEA_CACHE_DIR", "reference/environment.html"), ("fovea_workspace", "reference/c.html"), ("dead row", "glossary.html"),
])  # fmt: skip
def test_a_browser_searches_and_finds(browser, query, page):
    found = browser.text(f"file://{SITE}/search.html?q={urllib.parse.quote(query)}")
    links = [urllib.parse.urlsplit(link).path for link in found.links]
    assert page in links, [link for link in links if link.endswith(".html")][-30:]


def test_what_is_not_there_is_not_found(browser):
    found = browser.text(f"file://{SITE}/search.html?q=qwertyzuiop")
    assert "did not match any documents" in " ".join(found.words)


def size_of(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width, height", [(1400, 1600), (500, 1600)], ids=["desktop", "phone"])
@pytest.mark.parametrize("page", ["index", "install", "performance", "reference/python", "reference/c", "glossary"])
def test_pictures(browser, page, width, height, dark):
    """Taken for people to look at: docs/_build/pictures. That the browser drew something is all that is asserted."""
    folder = SITE.parent / "pictures"
    folder.mkdir(exist_ok=True)
    name = f"{page.replace('/', '-')}-{'phone' if width < 1000 else 'desktop'}-{'dark' if dark else 'light'}.png"
    browser.picture(f"file://{SITE}/{page}.html", folder / name, width, height, dark)
    assert size_of(folder / name) == (width, height) and (folder / name).stat().st_size > 20_000
