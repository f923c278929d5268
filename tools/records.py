# SPDX-License-Identifier: Apache-2.0
"""How the files of bench/results are written: JSON with one row a line, so that a diff shows which rows changed; and what each
says about where it comes from."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def when(commit: str = "") -> dict[str, str]:
    """{"date", "commit"} of a measurement: today, and this checkout's unless another is named; "" where it is no checkout."""
    if not commit:
        said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = said.stdout.strip()
    return {"date": datetime.date.today().isoformat(), "commit": commit}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def text(data: dict) -> str:
    """JSON in which each member of a list of objects stands on its own line. Everything else is indented by one space."""
    rows: list[str] = []

    def marked(value):
        if isinstance(value, dict):
            return {key: marked(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)) and value and all(isinstance(part, dict) for part in value):
            first = len(rows)
            rows.extend(json.dumps(part) for part in value)
            return [f"row {n}\0" for n in range(first, len(rows))]
        return value

    lines = []
    for line in json.dumps(marked(data), indent=1).splitlines():
        word = line.strip().rstrip(",")
        if word.startswith('"row ') and word.endswith('\\u0000"'):
            line = line.replace(word, rows[int(word[5:-7])])
        lines.append(line)
    return "\n".join(lines) + "\n"


def write(path: Path, data: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(data))


def kept(path: Path, rows: list[dict], *names: str, **head: str) -> list[dict]:
    """The rows of the file that have, under these names, other values than each of `rows`: what a run of a part leaves as it was.
    `head`: what is said of all rows, which has to be the same."""
    found = {tuple(row.get(name) for name in names) for row in rows}
    before = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    left = [row for row in before["rows"] if tuple(row.get(name) for name in names) not in found]
    for name, value in head.items():
        if left and before.get(name, value) != value:
            raise SystemExit(f"--json {path}: its other rows are of {name} {before[name]!r}, these of {value!r}; accepted: another file")
    return left
