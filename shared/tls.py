"""TLS of our own services: which certificates clients trust, and which one a server presents.

`RLBOOST_TLS_CA` names authorities that clients trust in addition to the system's. It is read from the environment, as
every client needs it: services, their child processes, the command line, and Python programs that use
`rlboost.client`.
"""

from __future__ import annotations

import os
import ssl
from typing import Literal, NamedTuple

from rlboost.shared.errors import ConfigError

CA_VARIABLE = "RLBOOST_TLS_CA"


class ServerCertificate(NamedTuple):
    """PEM files of a server."""

    certificate: str
    """File of the certificate, followed by intermediate certificates if there are any."""
    key: str


def server_certificate(certificate: str, key: str) -> ServerCertificate | None:
    """Return the checked files of a server, None for plain HTTP.

    Raises:
        ConfigError: only one is given, or they cannot be loaded.

    """
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise ConfigError("TLS needs both RLBOOST_TLS_CERT and RLBOOST_TLS_KEY: set the other one, or neither")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"RLBOOST_TLS_CERT {certificate} with RLBOOST_TLS_KEY {key} cannot be used: {error}; give a certificate "
            "and its unencrypted key as PEM files"
        ) from error
    return ServerCertificate(certificate, key)


def client_verification() -> ssl.SSLContext | Literal[True]:
    """Return what an HTTP client checks servers with: the context of `client_context`, or the library's default."""
    return client_context() or True


def verifying_context() -> ssl.SSLContext:
    """Return the context of `client_context`, or the system's authorities if there is none."""
    return client_context() or ssl.create_default_context()


def client_context() -> ssl.SSLContext | None:
    """Return the context of a client that trusts `RLBOOST_TLS_CA`, None if it is not set.

    Raises:
        ConfigError: the file cannot be loaded.

    """
    path = os.environ.get(CA_VARIABLE)
    if not path:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{CA_VARIABLE} {path} cannot be used: {error}; give a PEM file of authorities") from error
    return context
