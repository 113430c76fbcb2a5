"""Time from the command `rlboost up` until everything is ready.

    python -m benchmarks.start_up [--rounds 3]

One JSON line for each start: a new system with one trainer, one reserved worker and three spot workers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time


def start_up_s() -> float:
    """Return how long a new system takes until it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-m", "rlboost", "up", "--state", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            is_ready = any(line.startswith("ready: ") for line in process.stdout)
            took_s = time.monotonic() - began
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    if not is_ready:
        raise RuntimeError("rlboost up did not become ready: run it to see why")
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    for _ in range(parser.parse_args().rounds):
        print(json.dumps({"load": round(os.getloadavg()[0], 2), "ready_s": round(start_up_s(), 1)}), flush=True)


if __name__ == "__main__":
    main()
