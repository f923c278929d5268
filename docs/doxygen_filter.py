# SPDX-License-Identifier: Apache-2.0
"""Turns the ordinary comments of a public header into those that Doxygen reads: a comment above a declaration describes
it, a comment behind a declaration describes that. Comments on a line of their own within a struct are headings of groups
of fields, and describe none."""

import re
import sys
from pathlib import Path


def c(text: str) -> str:
    text = re.sub(r"^(#(?:endif|else|ifn?def)[^/\n]*)/\*.*?\*/", r"\1", text, flags=re.M)
    text = re.sub(r"(?<=[^\s])([ \t]+)/\* ?", r"\1/**< ", text)  # behind code
    return re.sub(r"^/\*(?!\*)", "/**", text, flags=re.M)  # above code; indented ones stay as they are


def cpp(text: str) -> str:
    # The inline namespace is a part of symbols, not of what users write.
    text = re.sub(r"(// [^\n]*\n)?inline namespace \w+ {\n|}  // namespace api_v\d+\n", "", text)
    text = re.sub(r"template <class Call, class = decltype[^\n]*", "template <class Call>", text)
    lines = []
    for line in text.splitlines():
        if re.match(r"\s*// ----|}", line):
            lines.append("" if "----" in line else line)
            continue
        line = re.sub(r"^(\s*)//(?!/)", r"\1///", line)
        line = re.sub(r"(\S[ \t]+)//(?!/)", r"\1///<", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.stdout.write((c if path.name == "c.h" else cpp)(path.read_text()))
