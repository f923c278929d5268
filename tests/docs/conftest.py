# SPDX-License-Identifier: Apache-2.0
"""The tests of the documentation site. They read docs/_build/html, which `make docs` writes."""

import re
import subprocess
import tempfile
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs/_build/html"


def pytest_sessionstart(session):
    if not (SITE / "index.html").exists():
        pytest.exit(f"{SITE} has no site: run `make docs`", returncode=1)


@pytest.fixture(scope="session")
def inventory():
    """{(domain:role, name)} of what the site describes."""
    data = (SITE / "objects.inv").read_bytes()
    body = zlib.decompress(data.split(b"\n", 4)[4]).decode()
    return {(m[2], m[1]) for m in re.finditer(r"^(.+?)\s+(\S+:\S+)\s+-?\d+\s", body, re.M)}


class Words(HTMLParser):
    def __init__(self):
        super().__init__()
        self.words, self.links, self.ids = [], [], set()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]

    def handle_data(self, text):
        self.words.append(text)


def parse(path):
    words = Words()
    words.feed(path.read_text())
    return words


@pytest.fixture(scope="session")
def index():
    return " ".join(parse(SITE / "genindex.html").words)


class Browser:
    """Debian's chromium without a window, one process for each page."""

    def run(self, *options, url):
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 f"--user-data-dir={profile}", "--allow-file-access-from-files", "--virtual-time-budget=20000", *options, url],
                capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def text(self, url):
        words = Words()
        words.feed(self.run("--dump-dom", url=url))
        return words

    def picture(self, url, path, width, height, dark):
        # The site follows what the system prefers.
        dark = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
        self.run(f"--screenshot={path}", f"--window-size={width},{height}", *dark, url=url)


@pytest.fixture(scope="session")
def browser():
    return Browser()
