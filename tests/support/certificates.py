"""A throw-away authority and a server's certificate for 127.0.0.1."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import trustme


class Certificates(NamedTuple):
    """PEM files."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def server(self) -> dict[str, str]:
        """Return the settings of a service that serves HTTPS and trusts the authority."""
        return {"RLBOOST_TLS_CERT": str(self.certificate), "RLBOOST_TLS_KEY": str(self.key), **self.client}

    @property
    def client(self) -> dict[str, str]:
        """Return the setting of a client that trusts the authority."""
        return {"RLBOOST_TLS_CA": str(self.ca)}


def make_certificates(folder: Path, *hosts: str) -> Certificates:
    """Return a new authority and a certificate for `hosts`, for 127.0.0.1 if there are none."""
    folder.mkdir(parents=True)
    authority = trustme.CA()
    issued = authority.issue_cert(*hosts or ("127.0.0.1",))
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(made.ca)
    issued.private_key_pem.write_to_path(made.key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(made.certificate, append=True)
    return made
