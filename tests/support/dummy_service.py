"""A small process in a service's place: `dummy_service.py PORT [MOOD ...]`; it answers every GET with 200.

Moods: `refuse` exits with EXIT_CONFIG, `drained` with 0, `crash` with 7, `brittle` does so moments after its start,
`mute` never answers, `stubborn` ignores SIGTERM, `busy` uses processor time before it answers, `parent` starts a child
of its own and prints the child's process id.
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time

BUSY_CPU_S = 0.3


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port, moods = int(sys.argv[1]), sys.argv[2:]
    print("a line on stdout")
    print(f"pid {os.getpid()} on port {port}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in moods else lambda *_: sys.exit(0))
    if "refuse" in moods:
        sys.exit(_complain("RLBOOST_X names no setting; did you mean Y?", 2))
    if "drained" in moods:
        sys.exit(0)
    if "crash" in moods:
        sys.exit(_complain("something broke", 7))
    if "parent" in moods:
        child = subprocess.Popen(["sleep", "300"])
        print(f"child {child.pid}", flush=True)
    if "busy" in moods:
        while time.process_time() < BUSY_CPU_S:
            pass
    if "brittle" in moods:
        threading.Timer(0.5, lambda: os._exit(_complain("something broke", 7))).start()
    if "mute" in moods:
        signal.pause()
    http.server.HTTPServer(("127.0.0.1", port), _Handler).serve_forever()


def _complain(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
