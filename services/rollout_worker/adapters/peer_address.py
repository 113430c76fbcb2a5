"""Determines the URL at which other workers reach this one."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

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
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _outbound(manager: str, wildcard: str) -> str:
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((manager, _ANY_PORT))
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError):
        return ""
