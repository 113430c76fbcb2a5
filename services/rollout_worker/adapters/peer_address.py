"""Determines the address that a worker listens on, and the URL at which other workers reach it."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from rlboost.shared.http.server_url import server_url

OFF = "off"
_ANY_PORT = 9  # discard; connecting a UDP socket sends nothing


def peer_url(setting: str, host: str, port: int, manager_url: str, *, tls: bool = False) -> str:
    """Return the URL for other workers, empty for none.

    Args:
        setting: the URL itself, `off`, or empty: then it is derived.
        host: the address that the worker listens on; for a wildcard, the source address toward the manager is used.
        port: the port that it listens on.
        manager_url: selects the network for a wildcard.
        tls: the worker serves HTTPS.

    """
    if setting:
        return "" if setting == OFF else setting.rstrip("/")
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not listened on
        host = _outbound(urlsplit(manager_url).hostname or "", host)
    if not host:
        return ""
    return server_url(host, port, tls=tls)


def listen_address(setting: str, manager_url: str) -> str:
    """Return the configured address, or the one from which the manager is reached; loopback if it is not known."""
    manager = urlsplit(manager_url).hostname or ""
    return setting or _outbound(manager, "0.0.0.0") or _outbound(manager, "::") or "127.0.0.1"  # noqa: S104 - for the family


def _outbound(manager: str, wildcard: str) -> str:
    """Return the source address toward the manager, of the wildcard's family; empty if there is none."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((manager, _ANY_PORT))
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError):
        return ""
