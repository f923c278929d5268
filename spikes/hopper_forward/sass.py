# SPDX-License-Identifier: Apache-2.0
"""Where a spec spills and what its loops hold: python3 sass.py 'Spec(64,64,192,128)'. Needs nvdisasm."""
import collections, glob, re, subprocess, sys, sysconfig, tempfile
from build import Spec, compile

tool = (glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/cu13/bin/nvdisasm") + ["nvdisasm"])[0]
for text in sys.argv[1:]:
    if not text.startswith("Spec"):
        continue
    cubin, name, report, log = compile(eval(text))
    print(report)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin), f.flush()
        out = subprocess.run([tool, "-c", f.name], capture_output=True, text=True).stdout
    if "--dump" in sys.argv:
        open("/tmp/dump.sass", "w").write(out)
    labels, lines = {}, []
    for line in out.splitlines():
        m = re.match(r"\s*(\.L_x?_?\w+):", line)
        if m:
            labels[m.group(1)] = len(lines)
        m = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
        if m:
            lines.append(m.group(2))
    print(len(lines), "instructions; local:", [f"{i} {l.split('(')[0].strip()}" for i, l in enumerate(lines) if "LDL" in l or "STL" in l], "HGMMA at", [i for i, l in enumerate(lines) if "HGMMA" in l][::8], "UTMALDG at", [i for i, l in enumerate(lines) if "UTMALDG" in l][::8])
    for i, l in enumerate(lines):
        m = re.search(r"BRA.*?`\((\.L_x?_?\w+)\)", l)
        if m and m.group(1) in labels and labels[m.group(1)] < i and 60 < i - labels[m.group(1)] < 3200 and "-q" not in sys.argv:
            body = lines[labels[m.group(1)]:i + 1]
            ops = collections.Counter()
            for b in body:
                b = re.sub(r"^@!?U?P\w+\s+", "", b.strip())
                ops[b.split()[0].split(".")[0]] += 1
            print(f"loop {labels[m.group(1)]}..{i}: {len(body)};", ", ".join(f"{k} {v}" for k, v in ops.most_common(26)))
