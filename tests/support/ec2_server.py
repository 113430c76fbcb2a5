"""A server of EC2 (moto's) in a thread, which refuses launches and repeats replies as AWS does."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs, urlencode

import botocore.session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from rlboost.services.rollout_manager.domain.offers import AwsMachine
from tests.support.ports import reserve_port

ZONE = "us-east-1a"
TEMPLATE = "rlboost-spot"
_ERROR = (
    "<Response><Errors><Error><Code>{}</Code><Message>{}</Message></Error></Errors><RequestID>r</RequestID></Response>"
)
_NO_MACHINES = "<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>"
_NO_PRICES = "<DescribeSpotPriceHistoryResponse><spotPriceHistorySet/></DescribeSpotPriceHistoryResponse>"
_PRICE = (
    "<DescribeSpotPriceHistoryResponse><spotPriceHistorySet><item><spotPrice>{}</spotPrice><timestamp>"
    "2026-01-01T00:00:00Z</timestamp></item></spotPriceHistorySet></DescribeSpotPriceHistoryResponse>"
)


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


class Ec2Server:
    """One region's EC2 with a launch template. moto lists no prices, knows no client token and always has capacity."""

    def __init__(self) -> None:
        self.reset()
        self._launched: dict[str, tuple[dict[str, str], bytes]] = {}
        """Client token -> request and reply."""
        self._moto: Callable[..., Iterable[bytes]] = DomainDispatcherApplication(create_backend_app)
        self.port = reserve_port(self)
        options: Any = {"threaded": True, "request_handler": _Quiet}
        self._server = make_server("127.0.0.1", self.port, self._answer, **options)
        self._thread = threading.Thread(target=self._server.serve_forever, name="ec2", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Refuse nothing, as at the start; machines remain."""
        self.errors: dict[str, str] = {}
        """Operation -> error code with which it is refused."""
        self.status = "400 Bad Request"
        """Of those refusals."""
        self.capacity: int | None = None
        """Machines that a launch starts at most; None: all that it asks for."""
        self.hides_new = False
        """True: lists have no machines, as right after their launch."""
        self.replies = True
        """False: a launch takes effect, and its connection is closed without a reply."""
        self.prices = {ZONE: 0.9}
        """Zone -> dollars per hour of a machine."""
        self.launches: list[dict[str, str]] = []
        """Fields of each request to launch."""

    @property
    def env(self) -> dict[str, str]:
        """Return what a client of this server needs in its environment."""
        return {
            "AWS_ACCESS_KEY_ID": "key-for-tests",
            "AWS_SECRET_ACCESS_KEY": "secret-for-tests",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    def client(self) -> Any:
        """Return a client of AWS's library; the environment has `env`."""
        return botocore.session.Session().create_client("ec2", region_name="us-east-1")

    def make_template(self) -> None:
        """Start without machines, with the template."""
        client = self.client()
        image = client.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        client.create_launch_template(LaunchTemplateName=TEMPLATE, LaunchTemplateData={"ImageId": image})

    def machine(self, **changes: Any) -> AwsMachine:
        """Return what a pool says of its machines."""
        return AwsMachine(**{"instance_type": "g6.xlarge", "zone": ZONE, "launch_template": TEMPLATE} | changes)

    def machines(self, system: str, kind: str) -> list[dict[str, Any]]:
        """Return the machines of a system's kind that are there."""
        filters = [{"Name": "tag:rlboost-system", "Values": [system]}, {"Name": "tag:rlboost-kind", "Values": [kind]}]
        found = self.client().describe_instances(Filters=filters)["Reservations"]
        alive = [one for reservation in found for one in reservation["Instances"]]
        return [one for one in alive if one["State"]["Name"] in {"pending", "running"}]

    def stop(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        fields = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        action = fields.get("Action", "")
        if action == "RunInstances":
            self.launches.append(fields)
        if action in self.errors:
            return _reply(start, self.status, _ERROR.format(self.errors[action], "as the test asks"))
        if action == "DescribeSpotPriceHistory":
            price = self.prices.get(fields["Filter.1.Value.1"])
            return _reply(start, "200 OK", _NO_PRICES if price is None else _PRICE.format(price))
        if action == "DescribeInstances" and self.hides_new:
            return _reply(start, "200 OK", _NO_MACHINES)
        if action == "RunInstances":
            return self._launch(environ, start, fields)
        return self._moto(_with_body(environ, body), start)

    def _launch(self, environ: dict[str, Any], start: Callable[..., Any], fields: dict[str, str]) -> Iterable[bytes]:
        token = fields["ClientToken"]
        if token in self._launched and self._launched[token][0] != fields:
            return _reply(start, "400 Bad Request", _ERROR.format("IdempotentParameterMismatch", "other fields"))
        if token not in self._launched:
            n = fields["MaxCount"] if self.capacity is None else str(min(self.capacity, int(fields["MaxCount"])))
            # moto starts the least number.
            body = urlencode(fields | {"MinCount": n, "MaxCount": n}).encode()
            heads: list[str] = []
            reply = b"".join(self._moto(_with_body(environ, body), lambda status, *_: heads.append(status)))
            if not heads[0].startswith("200"):
                return _reply(start, heads[0], reply.decode())
            self._launched[token] = fields, reply
        if not self.replies:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        return _reply(start, "200 OK", self._launched[token][1].decode())


def _with_body(environ: dict[str, Any], body: bytes) -> dict[str, Any]:
    return {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}


def _reply(start: Callable[..., Any], status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/xml")])
    return [text.encode()]
