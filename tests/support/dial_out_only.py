"""A process that can only open outgoing connections, as after NAT: its network namespace accepts none from outside.

`python -m tests.support.dial_out_only SOCKET PORT... -- COMMAND...` makes a network namespace with nothing but a
loopback device, listens there at `PORT`s, passes these sockets to the process at the other end of SOCKET, and
becomes COMMAND. `Outside` forwards the connections that COMMAND opens to them; there are no incoming connections.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


class Outside:
    """Starts such a process, and is its way out: whatever it dials at 127.0.0.1 is dialled again here."""

    def __init__(self, command: Sequence[str], ports: Sequence[int], log: Path) -> None:
        """Start `command`, which may dial `ports` of this machine; its output goes to `log`."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arguments = [str(its.fileno()), *map(str, ports), "--", *command]
        with log.open("wb") as out, its, ours:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.dial_out_only", *arguments],
                pass_fds=[its.fileno()],
                stdout=out,
                stderr=out,
            )
            its.close()
            _, listening, _, _ = socket.recv_fds(ours, 1, len(ports))
        assert len(listening) == len(ports), log.read_text()
        self._sockets = [socket.socket(fileno=fd) for fd in listening]
        self.dialled = 0
        """Connections that it has made."""
        self._connected = threading.Event()
        self._connected.set()
        self._threads: list[threading.Thread] = []
        for inside, port in zip(self._sockets, ports, strict=True):
            self._start(self._accept, inside, port)

    def has_network_of_its_own(self) -> bool:
        """Return True if it lives in another network than this process."""
        here, there = (Path(f"/proc/{pid}/ns/net").readlink() for pid in ("self", self.process.pid))
        return here != there

    def cut(self) -> None:
        """Let nothing pass in either direction until `mend`, and connect nothing: no end notices."""
        self._connected.clear()

    def mend(self) -> None:
        """Let everything pass again, with what was sent meanwhile."""
        self._connected.set()

    def close(self) -> None:
        """Kill it, if it lives."""
        self.mend()
        self.process.kill()
        self.process.wait()
        for inside in self._sockets:
            with suppress(OSError):
                inside.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        for thread in self._threads:
            thread.join()
        for inside in self._sockets:
            inside.close()

    def _start(self, work: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self, inside: socket.socket, port: int) -> None:
        with suppress(OSError):  # closed
            while True:
                dialled, _ = inside.accept()
                self.dialled += 1
                self._start(self._relay, dialled, port)

    def _relay(self, dialled: socket.socket, port: int) -> None:
        self._connected.wait()
        with dialled, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as real:
            back = self._start(self._pump, real, dialled)
            self._pump(dialled, real)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._connected.wait()
                target.sendall(data)
        self._connected.wait()
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def possible() -> bool:
    """Return True if this machine lets a process make a network of its own."""
    done = subprocess.run([sys.executable, "-m", __name__, "--try"], check=False, capture_output=True)
    return done.returncode == 0


def _enter() -> None:
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "this machine lets no process make a network of its own")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _main(arguments: list[str]) -> None:
    _enter()
    if arguments == ["--try"]:
        return
    cut = arguments.index("--")
    with socket.socket(fileno=int(arguments[0])) as outside:
        sockets = [socket.create_server(("127.0.0.1", int(port)), backlog=64) for port in arguments[1:cut]]
        socket.send_fds(outside, [b"."], [one.fileno() for one in sockets])
    for one in sockets:
        one.close()
    command = arguments[cut + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
