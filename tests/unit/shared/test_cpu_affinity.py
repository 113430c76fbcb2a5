from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.process.system import bind_to_cpus, parse_cpus


def test_parse_list_of_cpus_returns_them() -> None:
    assert parse_cpus("0-2, 7") == {0, 1, 2, 7}
    with pytest.raises(ConfigError, match="'node0' is not a list of CPUs"):
        parse_cpus("node0")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to CPUs")
def test_bind_leaves_only_the_named_cpus() -> None:
    last = max(os.sched_getaffinity(0))
    code = (
        "import os, sys; from rlboost.shared.process.system import bind_to_cpus; "
        "bind_to_cpus(''); before = os.sched_getaffinity(0); "
        f"bind_to_cpus('{last},100000'); print(before, os.sched_getaffinity(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.sched_getaffinity(0)} {{{last}}}\n"
    with pytest.raises(ConfigError, match="may use none of them"):
        bind_to_cpus("100000")
