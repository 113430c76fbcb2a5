"""`python -m services.trainer.adapters.megatron.rank FD`: one rank, a process of the trainer's.

Consumes: calls from the socket FD, answers them in turn. Produces: their results or errors, and questions within one.
Ends when: the trainer closes the socket or is gone, whatever is being computed.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
import warnings
from typing import Any

from services.trainer.adapters.megatron import hook, wire


def main(descriptor: int) -> None:
    """Serve the trainer at the other end of a socket."""
    channel = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), name="calls", daemon=True).start()
    # megatron-core tells of each library that it would like to have.
    warnings.simplefilter("ignore")
    hook.install()
    from services.trainer.adapters.megatron.engine import RankEngine  # noqa: PLC0415 - after the hook
    from services.trainer.adapters.megatron.shape import Layout  # noqa: PLC0415 - its like

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        wire.send(channel, question)
        return inbox.get()

    engine: RankEngine | None = None
    while True:
        request = inbox.get()
        name, arguments = request["call"], request["arguments"]
        try:
            if engine is None:
                engine = RankEngine(**{**arguments, "layout": Layout(*arguments["layout"])})
                result: Any = hook.rewritten()
            else:
                result = getattr(engine, name)(**arguments, **({"ask": ask} if name == "accumulate" else {}))
            answer = {"result": result}
        except Exception as error:  # noqa: BLE001 - the trainer is told, and decides
            answer = wire.failure(error, traceback.format_exc())
        wire.send(channel, answer)


def _read(channel: socket.socket, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            inbox.put(wire.receive(channel))
    except (EOFError, OSError):
        # Without the trainer there is nothing to finish, and the main thread may be in a collective for long.
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
