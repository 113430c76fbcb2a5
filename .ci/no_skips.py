"""Fail if a test was skipped: in CI nothing may be missing, except what only root or a registry can provide.

Tests that were deselected are not in the report.

python .ci/no_skips.py REPORT.xml
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree as ET

PROGRAMS = ("bubblewrap", "cloud-init", "prometheus", "promtool", "systemd-analyze")
ALLOWED = {
    *(f"{program} is not installed" for program in PROGRAMS),
    "only root can mount a disk",
    "no registry answers: the image of Grafana is missing",
}
cases = list(ET.parse(sys.argv[1]).iter("testcase"))  # noqa: S314 - pytest has just written it
skipped = [
    f"{case.get('classname')}::{case.get('name')}: {mark.get('message')}"
    for case in cases
    for mark in case.iter("skipped")
    if mark.get("type") == "pytest.skip" and mark.get("message") not in ALLOWED
]
if skipped or not cases:
    sys.exit("\n".join(["tests were skipped:", *skipped]) if skipped else "no test ran")
for case in cases:
    for mark in case.iter("skipped"):
        if mark.get("message") in ALLOWED:
            print(f"not run: {case.get('classname')}::{case.get('name')}: {mark.get('message')}")
