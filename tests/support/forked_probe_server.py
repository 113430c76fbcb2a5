"""The product's fork server with few imports, which the variable PROBE_FAULT makes unforkable."""

from __future__ import annotations

import os
import sys
import threading
import time

from rlboost.local import fork_server_process

CPU_S = 0.5
"""What it uses before it forks."""

if __name__ == "__main__":
    while time.process_time() < CPU_S:
        pass
    fork_server_process.MODULES = ("numpy", "tests.support.forked_probe_server")
    sys.exit(fork_server_process.main())
elif os.environ.get("PROBE_FAULT") == "thread":
    threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
elif os.environ.get("PROBE_FAULT") == "descriptor":
    os.open(os.devnull, os.O_RDONLY)
