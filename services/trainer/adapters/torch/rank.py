"""`python -m rlboost.services.trainer.adapters.torch.rank KIND FD`: the process of one rank.

On a machine that has joined the trainer it has `KIND URL SESSION` and runs under torchrun; see `machines.agent`.

Consumes: calls from the trainer, on socket FD. Produces: a result or an error per call, and questions during a call.
Waits for: the next call, in `inbox.get()`, which the reader thread feeds; and for other ranks, in collectives.
Ends when: the trainer closes the socket or its process ends, even in the middle of a call.
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

from rlboost.services.trainer.adapters.torch.ranks import Layout, encode_error, receive, send
from rlboost.services.trainer.domain.plan import SequenceRow
from rlboost.shared.process.modules import modules_hidden
from rlboost.shared.process.system import gc_paused

if TYPE_CHECKING:
    from rlboost.services.trainer.adapters.torch.engine import RankEngine

_REPORTERS = ("tensorboard", "wandb")
"""Optional imports of megatron-core that a rank does not need; they would cost a second of CPU time per start."""


def main(kind: str, channel: socket.socket) -> None:
    """Serve the trainer at the other end of a socket, as a rank of kind `megatron` or `fsdp`."""
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), name="calls", daemon=True).start()
    # megatron-core warns about every optional library that is missing.
    warnings.simplefilter("ignore")
    with gc_paused():
        kind_of_engine = engine_class(kind)

    import torch  # noqa: PLC0415 - after megatron-core

    def gradient(loss: str, replica: int, index: int, column: torch.Tensor) -> torch.Tensor:
        question = {"ask": loss, "data": replica, "batch": index, "column": column.cpu().numpy().tobytes()}
        send(channel, question)
        return torch.frombuffer(bytearray(inbox.get()["gradient"]), dtype=torch.float32).view(column.shape)

    engine: RankEngine | None = None
    while True:
        request = inbox.get()
        name, arguments = request["call"], request["arguments"]
        try:
            result: Any = None
            if engine is None:
                engine = kind_of_engine(**{**arguments, "layout": Layout(*arguments["layout"])})
            else:
                if "batches" in arguments:
                    arguments["batches"] = [[SequenceRow(*row) for row in rows] for rows in arguments["batches"]]
                if name == "accumulate":
                    arguments["gradient"] = gradient
                result = getattr(engine, name)(**arguments)
            answer = {"result": result}
        except Exception as error:  # noqa: BLE001 - reported to the trainer, which decides
            answer = encode_error(error, traceback.format_exc())
        send(channel, answer)


def engine_class(kind: str) -> type[RankEngine]:
    """Import and return the engine of a kind of rank."""
    if kind == "megatron":
        with modules_hidden(*_REPORTERS):
            from rlboost.services.trainer.adapters.megatron.rank_engine import MegatronRank  # noqa: PLC0415 - optional

        return MegatronRank
    from rlboost.services.trainer.adapters.torch.fsdp import FsdpRank  # noqa: PLC0415 - only one kind is imported

    return FsdpRank


def _read(channel: socket.socket, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while True:
            inbox.put(receive(channel))
    except (EOFError, OSError):
        # The trainer is gone. Exit at once: the main thread may be in a collective for minutes.
        os._exit(1)


def _channel(where: str, *session: str) -> socket.socket:
    if not session:
        return socket.socket(fileno=int(where))
    from rlboost.services.trainer.adapters.machines.link import join_session  # noqa: PLC0415 - not for local ranks

    return join_session(where, *session)


if __name__ == "__main__":
    main(sys.argv[1], _channel(*sys.argv[2:]))
