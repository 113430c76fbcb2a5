"""Connections of trainer machines and their ranks to the trainer: address, TLS, mutual authentication, messages.

Both sides prove that they have the key before either accepts anything else, and the key is never sent. A machine has
the system's token, a rank the key of its session. Messages are length-prefixed msgpack maps, as between the trainer and
the ranks of its own machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgpack

from rlboost.shared.errors import ConfigError, Retryable, RLBoostError
from rlboost.shared.framing import LENGTH_BYTES, length_of, pack, send
from rlboost.shared.http.access import is_valid_signature, sign
from rlboost.shared.tls import ServerCertificate, verifying_context

MACHINE = ""
"""The session of a machine that joins; a rank names the one that it belongs to."""
HANDSHAKE_LIMIT_S = 20.0
_MESSAGE_LIMIT_BYTES = 64 << 10
"""Limit on handshakes and assignments; what ranks and trainer exchange afterwards is not limited."""
_IDLE_S, _PROBE_S, _PROBES = 5, 5, 3
"""A peer whose machine does not answer for about 20 s is lost. The kernel probes it, so a busy process is not."""


def parse_url(url: str) -> tuple[str, int, ssl.SSLContext | None]:
    """Return host, port and TLS context of `tcp://HOST:PORT` or `tls://HOST:PORT`.

    Raises:
        ConfigError: it is no such URL, or `RLBOOST_TLS_CA` cannot be loaded.

    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("tcp", "tls") or not parts.hostname or not port:
        raise ConfigError(
            f"the trainer's URL is {url!r}: give tcp://HOST:PORT, or tls://HOST:PORT if the trainer has a "
            "certificate; PORT is its RLBOOST_TRAINER_MACHINES_PORT"
        )
    context = verifying_context() if parts.scheme == "tls" else None
    return parts.hostname, port, context


def server_context(certificate: ServerCertificate | None) -> ssl.SSLContext | None:
    """Return the TLS context of the trainer, None without a certificate."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    return context


class Link:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        channel = writer.get_extra_info("socket")
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_IDLE_S + _PROBES * _PROBE_S) * 1000)

    @property
    def local_address(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, body: dict[str, Any]) -> None:
        """Send a message; raises `OSError` if the other side has ended."""
        send(self._writer, pack(body))
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            EOFError, OSError: the other side has ended.
            ValueError: it sent something else.

        """
        length = length_of(await self._reader.readexactly(LENGTH_BYTES))
        if length > _MESSAGE_LIMIT_BYTES:
            raise ValueError(f"a message of {length} bytes")
        body = msgpack.unpackb(await self._reader.readexactly(length))
        if not isinstance(body, dict):
            raise ValueError("a message that is no map")  # noqa: TRY004 - what was received is invalid, not a call
        return body

    async def until_closed(self) -> None:
        """Wait until the other side has ended or its machine is unreachable; drop what it sends."""
        try:
            while await self._reader.read(1 << 16):
                pass
        except OSError:
            pass

    async def relay(self, channel: socket.socket) -> None:
        """Copy bytes between this connection and a socket until either ends, then close both."""
        reader, writer = await asyncio.open_connection(sock=channel)
        try:
            copies = (
                asyncio.create_task(_copy(self._reader, writer), name="from-link"),
                asyncio.create_task(_copy(reader, self._writer), name="to-link"),
            )
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
        finally:
            writer.close()
            self.close()

    def close(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            send(writer, data)
            await writer.drain()
    except OSError:
        pass  # as at the end


async def connect(url: str, key: str, session: str, hello: dict[str, Any]) -> Link:
    """Connect to the trainer and authenticate both sides; `hello` follows the proof.

    Raises:
        ConfigError: the URL is invalid, or the trainer has another key or certificate.
        Retryable: the trainer cannot be reached now.

    """
    host, port, context = parse_url(url)
    try:
        async with asyncio.timeout(HANDSHAKE_LIMIT_S):
            link = Link(*await asyncio.open_connection(host, port, ssl=context))
            try:
                await _prove(link, url, key, session, hello)
            except (Exception, asyncio.CancelledError):
                link.close()
                raise
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the trainer's certificate at {url} is not trusted: {error}; set RLBOOST_TLS_CA") from error
    except (OSError, EOFError, ValueError) as error:
        raise Retryable(f"the trainer at {url} cannot be reached: {str(error) or type(error).__name__}") from error
    return link


async def _prove(link: Link, url: str, key: str, session: str, hello: dict[str, Any]) -> None:
    ours = secrets.token_hex(16)
    await link.send({"nonce": ours, "session": session})
    answer = await link.receive()
    theirs, proof = str(answer.get("nonce")), str(answer.get("proof"))
    if not is_valid_signature(proof, key, "trainer-machine", _subject("trainer", session, ours, theirs)):
        raise ConfigError(f"the trainer at {url} has another token: give this machine the trainer's (RLBOOST_TOKEN)")
    await link.send({**hello, "proof": sign(key, "trainer-machine", _subject("machine", session, ours, theirs))})


async def accept(link: Link, key_of: Callable[[str], str]) -> tuple[str, dict[str, Any]]:
    """Authenticate a connection to the trainer; return its session and its `hello`.

    Args:
        link: the connection.
        key_of: session -> key, empty if there is no such session.

    Raises:
        EOFError, OSError, ValueError: it ended, was too slow, or did not prove that it has the key.

    """
    async with asyncio.timeout(HANDSHAKE_LIMIT_S):
        first = await link.receive()
        session, theirs, ours = str(first.get("session")), str(first.get("nonce")), secrets.token_hex(16)
        if not (key := key_of(session)):
            raise ValueError(f"no session {session!r}")
        proof = sign(key, "trainer-machine", _subject("trainer", session, theirs, ours))
        await link.send({"nonce": ours, "proof": proof})
        hello = await link.receive()
        proof = str(hello.pop("proof", ""))
        if not is_valid_signature(proof, key, "trainer-machine", _subject("machine", session, theirs, ours)):
            raise ValueError("it has another token")
    return session, hello


def _subject(side: str, session: str, first_nonce: str, second_nonce: str) -> str:
    return json.dumps([side, session, first_nonce, second_nonce])


# --- The channel of a rank to a trainer on another machine ------------------------------------------------------------


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
