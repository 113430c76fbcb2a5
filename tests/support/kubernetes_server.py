"""The scale subresource of Deployments as a Kubernetes API server offers it, over HTTPS on loopback."""

from __future__ import annotations

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.certificates import make_certificates

NAMESPACE = "rl"
_SCALE = re.compile(r"/apis/apps/v1/namespaces/([^/]+)/deployments/([^/]+)/scale")


class KubernetesServer:
    """One API server, and the files that Kubernetes mounts into a pod.

    It admits the bearer `token`, which a test may change, and patches of type `application/merge-patch+json`.
    """

    def __init__(self, directory: Path, **replicas: int) -> None:
        self.replicas = replicas
        self.token = "first"
        self.account = directory / "serviceaccount"
        made = make_certificates(self.account)
        made.ca.rename(self.account / "ca.crt")
        (self.account / "namespace").write_text(NAMESPACE)
        self.mount()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(made.certificate, made.key)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self._server.server_port)}
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def mount(self) -> None:
        """Write the present token where a pod finds it."""
        (self.account / "token").write_text(self.token + "\n")

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def patch(self, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the answer."""
        if headers["Authorization"] != f"Bearer {self.token}":
            return 401, _failure(401, "Unauthorized")
        if headers["Content-Type"] != "application/merge-patch+json":
            return 415, _failure(415, "the body of the request was in an unknown format")
        found = _SCALE.fullmatch(path)
        if not found or found[1] != NAMESPACE or found[2] not in self.replicas:
            return 404, _failure(404, f'deployments.apps "{found and found[2]}" not found')
        self.replicas[found[2]] = json.loads(body)["spec"]["replicas"]
        scale = {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": {"replicas": self.replicas[found[2]]}}
        return 200, scale

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        patch = self.patch

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = patch(self.path, self.headers, body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def _failure(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
