"""A small program for a fork server: `python -m tests.support.forked_probe WHAT`.

`describe` prints what a process can know of itself, `draw` random numbers, `user_code` what a module in the folder
RLBOOST_FOLDER says; `launch` is a launcher with two processes that `wait`, and prints their ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

MODULE = "tests.support.forked_probe"
BUSY_CPU_S = 0.2
CODE = 7


def _describe() -> dict[str, object]:
    spec = sys.modules["__main__"].__spec__
    links = list(Path("/proc/self/fd").iterdir())
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "imported": "numpy" in sys.modules,
        "name": Path("/proc/self/comm").read_text(),
        "command": Path("/proc/self/cmdline").read_text().replace("\0", " ").strip(),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "main": spec.name if spec else "",
        "cwd": str(Path.cwd()),
        "path": sys.path,
        "environment": dict(os.environ),
        "descriptors": {link.name: str(link.readlink()) for link in links if link.is_symlink()},
        "handlers": {number.name: repr(signal.getsignal(number)) for number in signal.Signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "threads": [thread.name for thread in threading.enumerate()],
        "n_threads": len(list(Path("/proc/self/task").iterdir())),
        "umask": os.umask(0),
    }


def _draw() -> dict[str, float]:
    import numpy as np  # noqa: PLC0415 - `describe` says whether it was imported before

    return {"random": random.random(), "numpy": float(np.random.rand())}


def _user_code() -> str:
    sys.path.insert(0, os.environ["RLBOOST_FOLDER"])
    import my_reward  # type: ignore[import-not-found]  # noqa: PLC0415 - the test writes it

    return str(my_reward.NAME)


async def _launch(folder: Path) -> None:
    from rlboost.local.child import Child  # noqa: PLC0415 - the other programs do not need it
    from rlboost.local.fork_server import ForkServer  # noqa: PLC0415 - likewise
    from tests.support.probes import probe, use_probes  # noqa: PLC0415 - likewise

    use_probes()
    forks = ForkServer(os.environ, folder / "fork-server.log")
    forks.start()
    assert forks.is_ready(60.0)
    children = [Child(probe(folder, "wait"), server) for server in (forks, None)]
    print(json.dumps([forks.pid, *(child.pid for child in children)]), flush=True)
    await asyncio.gather(*(child.wait() for child in children))


def main(what: str, *arguments: str) -> int:
    match what:
        case "describe":
            print(json.dumps(_describe()))
        case "draw":
            print(json.dumps(_draw()))
        case "user_code":
            print(_user_code())
        case "busy":
            while time.process_time() < BUSY_CPU_S:
                pass
        case "wait":
            signal.pause()
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail":
            return CODE
        case "launch":
            asyncio.run(_launch(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
