"""The channel of a rank to a trainer on another machine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading

from rlboost.services.trainer.adapters.machines.link import connect
from rlboost.shared.errors import RLBoostError

KEY_VARIABLE = "RLBOOST_RANK_KEY"
"""The key of the rank's session; an argument would be readable by all users of the machine."""


def join_session(url: str, session: str) -> socket.socket:
    """Return a socket to the trainer, for the rank that torchrun has made this process.

    It is closed, and the reason printed, if the trainer does not accept the connection.
    """
    ours, theirs = socket.socketpair()
    threading.Thread(target=_relay, args=(url, session, theirs), name="trainer-link", daemon=True).start()
    return ours


def _relay(url: str, session: str, channel: socket.socket) -> None:
    async def relay() -> None:
        link = await connect(url, os.environ.pop(KEY_VARIABLE), session, {"rank": int(os.environ["RANK"])})
        await link.relay(channel)

    # Its end closes the channel, and that ends the rank.
    with channel:
        try:
            asyncio.run(relay())
        except RLBoostError as error:
            print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
