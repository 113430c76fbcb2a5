"""A stand-in of the Hugging Face Hub: what its library asks for to create, upload to and download repositories."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import yaml

TOKEN = "hf_of-the-test"


class Hub(ThreadingHTTPServer):
    """The repositories, and the requests so far."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.private: dict[str, bool] = {}
        """Name of each repository -> whether it is private."""
        self.files: dict[str, bytes] = {}
        """Path in the last commit -> content."""
        self.stored: dict[str, bytes] = {}
        """SHA-256 of a large file -> content."""
        self.forbidden = False
        """Whether the token may create no repository."""
        self.models: dict[str, dict[str, bytes]] = {}
        """Name of each repository that may be downloaded -> path -> content."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid user token."}, 401)
        elif self.path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user"})
        elif (model := "/".join(urlsplit(self.path.removeprefix("/api/models")).path.split("/")[1:3])) in (
            self.server.models
        ):
            self._serve(model, self.server.models[model])
        elif "/tree/main" in self.path:
            files = self.server.files.items()
            self._answer([{"type": "file", "path": path, "oid": "", "size": len(data)} for path, data in files])
        else:  # is there such a file? none is large and known
            self._answer({"error": "Entry not found"}, 404)

    def _serve(self, model: str, files: dict[str, bytes]) -> None:
        """Answer what a download asks for: the newest revision, its files, and one of them."""
        revision = sha1(repr(files).encode(), usedforsecurity=False).hexdigest()
        if "/revision/" in self.path or "?blobs=" in self.path:
            siblings = [{"rfilename": path, "size": len(files[path])} for path in files]
            self._answer({"id": model, "sha": revision, "siblings": siblings})
        elif "/tree/" in self.path:
            self._answer([{"type": "file", "path": path, "oid": path, "size": len(files[path])} for path in files])
        elif (path := self.path.rpartition("/")[2]) in files:
            self._answer(files[path], headers={"ETag": f'"{revision}-{path}"', "X-Repo-Commit": revision})
        else:
            self._answer({"error": "Entry not found"}, 404)

    do_HEAD = do_GET  # noqa: N815 - the name of the class above

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if self.server.forbidden:
                self._answer({"error": f"You don't have the rights to create a model under {name}"}, 403)
                return
            self.server.private[name] = asked.get("private") or asked.get("visibility") == "private"
            self._answer({"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            head = json.loads(body)["content"].split("---")[1]
            self._answer({"errors": [] if isinstance(yaml.safe_load(head), dict) else ["no mapping"], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": one["path"], "uploadMode": modes[one["path"].endswith(".safetensors")], "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.server.url}/store/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif self.path.endswith("/commit/main"):
            self._commit(map(json.loads, body.splitlines()))
            self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": self._commit_url()})
        else:
            self._answer({"error": f"the stand-in has no {self.path}"}, 404)

    def _commit(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            value: dict[str, Any] = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]

    def _commit_url(self) -> str:
        owner, name = self.path.split("/")[3:5]
        return f"{self.server.url}/{owner}/{name}/commit/{'0' * 40}"

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.stored[self.path.rpartition("/")[2]] = content
        self._answer({})

    def _answer(self, answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the class above
        """Print nothing."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Yield a hub that answers."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, name="hub")
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
