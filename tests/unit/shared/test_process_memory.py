"""A process of the same user tries to read the environment and the memory of another one, with a token."""

from __future__ import annotations

import subprocess
import sys

import pytest

VICTIM = """
import asyncio, ctypes, os, sys
from rlboost.services.trainer.children.child import Pipe
from rlboost.shared.process.lifecycle import run_service
from rlboost.shared.process.system import protect_process_memory
from rlboost.shared.settings import ServiceSettings

def readable(name):
    if (child := os.fork()) == 0:
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        try:
            os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

async def service(settings, stop):
    report()

def report():
    print(readable("environ"), readable("mem"), file=sys.stderr)

if os.getuid() == 0:  # which may read everything
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after an exec; a change of user clears it
if not readable("environ"):
    sys.exit("this test could not fail")
"""


@pytest.mark.parametrize(
    "protected",
    [
        "protect_process_memory(); report()",
        "sys.argv[1:] = []; run_service('a_service', ServiceSettings, service)",
        "Pipe(); report()",
    ],
    ids=["function", "service", "process_of_user_code"],
)
def test_process_of_the_same_user_reads_no_memory_of_a_protected_one(protected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VICTIM + protected], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "False False\n"
