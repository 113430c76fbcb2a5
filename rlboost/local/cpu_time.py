"""CPU time of a session of processes."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def session_cpu_s(leader: int) -> float:
    """Return user and system seconds of all living processes in a session and of the children they waited for."""
    ticks = 0
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has exited
            continue
        # proc(5), counted after the name: session is field 6, utime, stime, cutime and cstime are 14 to 17.
        if int(fields[3]) == leader:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
