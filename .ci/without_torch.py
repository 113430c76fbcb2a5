"""Copy a requirements file with hashes from standard input, without torch and its CUDA libraries."""

from __future__ import annotations

import re
import sys

LEFT_OUT = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)(\[[\w,-]+\])?==")

skipping = False
for line in sys.stdin:
    if not line.startswith((" ", "\t")):
        skipping = LEFT_OUT.match(line) is not None
    if not skipping:
        sys.stdout.write(line)
