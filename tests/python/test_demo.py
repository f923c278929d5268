# SPDX-License-Identifier: Apache-2.0
"""examples/train_lm: its gradients, that a run repeats, that fovea and the textbook train the same network, and that
what it says about the text is so."""

import collections
import csv
import math
import random
import re
import subprocess
import xml.etree.ElementTree

import pytest

from conftest import BUILD

TRAIN_LM = BUILD / "examples" / "train_lm" / "train_lm"
SMALL = ("--layers", 2, "--heads", 2, "--width", 32, "--context", 32, "--batch", 4, "--sample", 20)


def train_lm(*arguments, cwd=None):
    return subprocess.run([str(TRAIN_LM), *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture
def text(tmp_path):
    """Words with a rule to learn: each is one of twenty, and the last letter depends on the first."""
    words = random.Random(1)
    letters = "etaoinshrdlu"
    known = ["".join(words.choice(letters) for _ in range(words.randint(2, 6))) for _ in range(20)]
    path = tmp_path / "words.txt"
    path.write_text(" ".join(words.choice(known) for _ in range(3000)))
    return path


def losses(folder):
    with open(folder / "loss.csv") as file:
        return [(row["step"], row["train_nats_per_byte"], row["held_out_estimate_nats_per_byte"]) for row in csv.DictReader(file)]


def succeeds(*arguments, cwd=None):
    done = train_lm(*arguments, cwd=cwd)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def test_gradients():
    output = succeeds("--check-gradients")
    assert output.count(" ok\n") == 3 * 12 and "WRONG" not in output and "all gradients are right" in output
    for line in output.splitlines():
        if "naive" in line or "none" in line:
            break
        found = re.search(r"largest gradient (\S+)", line)
        assert not found or float(found.group(1)) > 1e-3, "a gradient of zero proves nothing: " + line


def test_a_run_repeats_whatever_the_number_of_threads(text, tmp_path):
    results = []
    for threads in (1, 2, 3):
        folder = tmp_path / f"out{threads}"
        output = succeeds("--text", text, *SMALL, "--steps", 12, "--threads", threads, "--no-comparisons", "--output", folder)
        held_out = re.search(r"held-out loss over all .*", output).group()
        results.append((losses(folder), held_out, (folder / "sample.txt").read_text()))
    assert results[0] == results[1] == results[2]
    other = tmp_path / "other"
    succeeds("--text", text, *SMALL, "--steps", 12, "--seed", 2, "--no-comparisons", "--output", other)
    assert losses(other) != results[0][0]


def test_naive_attention_trains_the_same_network(text, tmp_path):
    found = {}
    for kind in ("fovea", "naive", "none"):
        succeeds("--text", text, *SMALL, "--steps", 60, "--learning-rate", 8e-3, "--attention", kind, "--no-comparisons", "--output", tmp_path / kind)
        found[kind] = [float(value) for row in losses(tmp_path / kind) for value in row[1:]]
    assert found["fovea"] == pytest.approx(found["naive"], abs=1e-3)
    assert found["fovea"][-1] != pytest.approx(found["none"][-1], abs=1e-2)


def test_a_whole_run_with_its_comparisons(text, tmp_path):
    out = tmp_path / "out"
    output = succeeds("--text", text, *SMALL, "--steps", 400, "--learning-rate", 4e-3, "--output", out, "--must-beat", 1)
    nats = {}
    for name, pattern in {"fovea": r"attention by fovea, \d+ steps\s+(\S+)", "none": r"output zeroed.*\s(\d\.\d+)",
                          "order 1": r"order 1 .*\s(\d\.\d+)"}.items():
        nats[name] = float(re.search(pattern, output).group(1))
    assert nats["fovea"] < nats["none"] and nats["fovea"] < nats["order 1"] < math.log(256)
    agreement = re.search(r"losses are (\S+) and (\S+)", output)
    assert float(agreement.group(1)) == pytest.approx(float(agreement.group(2)), abs=1e-3)
    size = text.stat().st_size
    held_out = math.ceil(size / 10)
    assert re.search(rf"words.txt +{size} +\[0, +{size - held_out}\) +\[ *{size - held_out}, +{size}\)", output)
    root = xml.etree.ElementTree.parse(out / "loss.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    assert (out / "table.txt").read_text() in output
    assert "[[" in (out / "sample.txt").read_text()


def count_model(train, held_out_from, whole, order):
    """Witten and Bell's interpolation, written again."""
    counts = [collections.defaultdict(collections.Counter) for _ in range(order + 1)]
    for at in range(len(train)):
        for k in range(min(order, at) + 1):
            counts[k][train[at - k:at]][train[at]] += 1
    nats = 0.0
    for at in range(held_out_from, len(whole)):
        p = 1 / 256
        for k in range(min(order, at) + 1):
            followers = counts[k].get(whole[at - k:at])
            if followers is None:
                break
            p = (followers[whole[at]] + len(followers) * p) / (sum(followers.values()) + len(followers))
        nats -= math.log(p)
    return nats / (len(whole) - held_out_from)


def test_the_byte_counts(text, tmp_path):
    output = succeeds("--text", text, *SMALL, "--steps", 1, "--no-comparisons", "--output", tmp_path / "out")
    whole = text.read_bytes()
    begin = len(whole) - math.ceil(len(whole) / 10)
    for order in range(1, 6):
        said = float(re.search(rf"order {order} .*\s(\d\.\d+)", output).group(1))
        assert said == pytest.approx(count_model(whole[:begin], begin, whole, order), abs=6e-4)


def test_must_beat_is_an_exit_code(text, tmp_path):
    done = train_lm("--text", text, *SMALL, "--steps", 1, "--no-comparisons", "--must-beat", 3, "--output", tmp_path / "out")
    assert done.returncode == 1 and "NOT BELOW the order-3 model" in done.stdout


def test_a_clock_ends_a_run(text, tmp_path):
    output = succeeds("--text", text, *SMALL, "--steps", 10**9, "--seconds", 2, "--no-comparisons", "--output", tmp_path / "out")
    assert "100%" in output


@pytest.mark.parametrize("arguments, says", [
    (("--text", "no/such/file"), ("no/such/file", "neither a file nor a folder", "--text")),
    (("--text", "empty"), ("empty", "no text")),
    (("--text", "short.txt", "--context", 256), ("256 bytes", "--context")),
    (("--width", 10, "--heads", 4), ("--width 10", "multiple of --heads 4")),
    (("--dropout", 2), ("--dropout",)),
    (("--attention", "magic"), ("--attention", "fovea", "naive", "none")),
    (("--output", "short.txt/out"), ("short.txt",)),
    (("--stepps", 3), ("--stepps",)),
])
def test_refusals(tmp_path, arguments, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    done = train_lm(*arguments, "--steps", 1, "--no-comparisons", cwd=tmp_path)
    assert done.returncode != 0
    for word in says:
        assert word in done.stderr + done.stdout, (word, done.stderr)


def test_copies_and_links_are_left_out(text, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b").write_bytes(text.read_bytes())
    (folder / "a").write_bytes(text.read_bytes()[::-1])
    (folder / "copy-of-a").write_bytes(text.read_bytes()[::-1])
    (folder / "link").symlink_to("b")
    output = succeeds("--text", folder, *SMALL, "--steps", 1, "--no-comparisons", "--output", tmp_path / "out")
    assert re.findall(r"^(\S+) +\d+ +\[", output, re.M) == ["a", "b"]


def test_help_teaches():
    output = succeeds("--help")
    for word in ("Examples:", "--text", "--seconds", "--attention", "--check-gradients", "Exit codes"):
        assert word in output
