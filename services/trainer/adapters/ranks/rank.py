"""`python -m services.trainer.adapters.ranks.rank FD KIND`: one rank, a process of the trainer's.

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
from typing import TYPE_CHECKING, Any

from services.trainer.adapters.ranks import wire
from services.trainer.adapters.ranks.layout import Layout
from shared.importing import without, without_collector

if TYPE_CHECKING:
    from services.trainer.adapters.ranks.engine import RankEngine

_REPORTERS = ("tensorboard", "wandb")
"""megatron-core imports them where they are, for nothing that a rank does: a second of processor time each start."""


def main(descriptor: int, kind: str) -> None:
    """Serve the trainer at the other end of a socket, as a rank of `megatron` or `fsdp`."""
    channel = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), name="calls", daemon=True).start()
    # megatron-core tells of each library that it would like to have.
    warnings.simplefilter("ignore")
    with without_collector():
        engine_class = _engine_class(kind)

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        wire.send(channel, question)
        return inbox.get()

    engine: RankEngine | None = None
    while True:
        request = inbox.get()
        name, arguments = request["call"], request["arguments"]
        try:
            if engine is None:
                engine = engine_class(**{**arguments, "layout": Layout(*arguments["layout"])})
                result: Any = engine.rewritten
            else:
                result = getattr(engine, name)(**arguments, **({"ask": ask} if name == "accumulate" else {}))
            answer = {"result": result}
        except Exception as error:  # noqa: BLE001 - the trainer is told, and decides
            answer = wire.failure(error, traceback.format_exc())
        wire.send(channel, answer)


def _engine_class(kind: str) -> type[RankEngine]:
    if kind == "megatron":
        from services.trainer.adapters.megatron import hook  # noqa: PLC0415 - nobody else has it installed

        hook.install()
        with without(*_REPORTERS):
            from services.trainer.adapters.megatron.rank_engine import MegatronRank  # noqa: PLC0415 - after the hook

        return MegatronRank
    from services.trainer.adapters.fsdp.rank_engine import FsdpRank  # noqa: PLC0415 - it is one or the other

    return FsdpRank


def _read(channel: socket.socket, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            inbox.put(wire.receive(channel))
    except (EOFError, OSError):
        # Without the trainer there is nothing to finish, and the main thread may be in a collective for long.
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
