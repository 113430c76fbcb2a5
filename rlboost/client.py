"""The Python client of the REST API, synchronous.

    client = Client("http://127.0.0.1:8700", token)
    job = client.jobs.create(job_file_as_dict)
    for row in client.jobs.metrics(job["id"]): ...

Every call is idempotent, so a call that finds the manager unavailable, for example during a restart, is retried for
`retry_for_s`. A standby manager redirects each call to the leader.

`Attachment` is a trainer's hold of its external job: calls under its epoch, and a thread that renews the lease.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from rlboost.shared.errors import Conflict, RLBoostError
from rlboost.shared.http.clients import http_client
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from rlboost.shared.ids import new_token
from rlboost.shared.proxies import internal
from rlboost.shared.secrets import bearer
from rlboost.shared.weights.access import IssuedAccess

Json = dict[str, Any]
Rows = list[Json]

_RETRY_S = 0.25
_CONNECT_S = 5.0
_READ_TIMEOUT_S = 30.0
_ID = re.compile(r"[\w.-]*\w[\w.-]*", re.ASCII)
_UNAVAILABLE = httpx.codes.SERVICE_UNAVAILABLE.value


class ClientError(RLBoostError):
    """The API answered with a problem document (RFC 9457), or did not answer at all.

    Attributes:
        title: the kind of problem.
        detail: what is wrong and what to do.
        status: the HTTP status; None when there was no answer.

    """

    def __init__(self, title: str, detail: str, status: int | None = None) -> None:
        super().__init__(title, detail, status)  # all of them, so that it can be pickled
        self.title, self.detail, self.status = title, detail, status

    def __str__(self) -> str:
        """Return the kind of problem, and what is wrong."""
        return f"{self.title}: {self.detail}"


@dataclass(frozen=True)
class ServerEvent:
    """One server-sent event: `id` resumes after it, `data` is decoded."""

    id: str
    kind: str
    data: Json


class Client:
    """One system's API.

    Args:
        url: the manager's URL, without `/v1`.
        token: the system's token, or an access token of sufficient scope.
        retry_for_s: how long to retry when the manager does not answer or is unavailable.
        read_timeout_s: how long to wait for an answer to one request.
        transport: carries requests; tests pass one that needs no network.

    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        retry_for_s: float = 10.0,
        read_timeout_s: float = _READ_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Describe the service; the first call connects.

        Raises:
            ConfigError: the token has a character that no token may have.

        """
        self.url = url.strip().rstrip("/")
        self._prefix = f"{httpx.URL(self.url).path.rstrip('/')}/v1"
        self._retry_for_s = retry_for_s
        self._http = http_client(
            internal,
            base_url=f"{self.url}/v1",
            headers={"Authorization": bearer("the token", token)},
            timeout=httpx.Timeout(read_timeout_s, connect=_CONNECT_S),
            transport=transport,
        )
        self.jobs = Jobs(self)
        self.workers = Workers(self)
        self.tokens = Tokens(self)

    def fleet(self) -> Json:
        """Return the number of workers present and the number worth having, and what autoscaling decided."""
        fleet: Json = self.request("GET", "/fleet").json()
        return fleet

    def scale(self, workers: int | None) -> None:
        """Set the number of spot workers; None: the number worth having."""
        self.request("POST", "/fleet/scale", json={"workers": "auto" if workers is None else workers})

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Return the answer to one request under `/v1`; arguments are those of `httpx.Client.request`.

        Raises:
            ClientError: the answer is an error, or there was none for `retry_for_s`.

        """
        return self._with_retries(lambda: self._send(method, path, stream=False, **arguments))

    @contextmanager
    def stream(self, path: str, *, read_timeout_s: float | None, **arguments: Any) -> Iterator[httpx.Response]:
        """Open a streamed response; arguments are those of `httpx.Client.build_request`.

        Args:
            path: under `/v1`.
            read_timeout_s: how long the server may send nothing; None for no limit.
            arguments: the request's.

        Raises:
            ClientError: as for `request`; a stream that breaks off raises `httpx.TransportError` where it is read.

        """
        timeout = httpx.Timeout(read_timeout_s, connect=_CONNECT_S)
        response = self._with_retries(lambda: self._send("GET", path, stream=True, timeout=timeout, **arguments))
        try:
            yield response
        finally:
            response.close()

    def _send(self, method: str, path: str, *, stream: bool, **arguments: Any) -> httpx.Response:
        url = path
        for _ in range(1 + MAX_REDIRECTS):
            # Rebuilt for each redirect with the token; `redirected_origin` checks that the target may receive it.
            request = self._http.build_request(method, url, **arguments)
            response = self._http.send(request, stream=stream)
            try:
                origin = redirected_origin(str(request.url), response.status_code, response.headers.get("location", ""))
            except Conflict as error:
                response.close()
                raise ClientError("Wrong redirect", str(error), response.status_code) from error
            if origin is None:
                return _checked(response)
            response.close()
            url = f"{origin}{self._prefix}{path}"
        raise ClientError("No leader", f"{self.url}: the managers redirect to each other", _UNAVAILABLE)

    def _with_retries(self, call: Callable[[], httpx.Response]) -> httpx.Response:
        limit = time.monotonic() + self._retry_for_s
        while True:
            try:
                return call()
            except httpx.TransportError as error:
                problem = ClientError("No answer", f"{self.url} does not answer ({error}): is the system running?")
            except ClientError as error:
                if error.status != _UNAVAILABLE:
                    raise
                problem = error
            if time.monotonic() >= limit:
                raise problem
            time.sleep(_RETRY_S)


class Jobs:
    """`/v1/jobs`; ids are those that `create` returns. Every method may raise `ClientError`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, spec: Mapping[str, Any], idempotency_key: str | None = None) -> Json:
        """Create a job from a job file as a mapping; return `{id, state}`.

        Requests with the same key create one job; None generates a new key.
        """
        headers = {"Idempotency-Key": idempotency_key or new_token(16)}
        job: Json = self._client.request("POST", "/jobs", json=dict(spec), headers=headers).json()
        return job

    def list(self) -> Rows:
        """Return all jobs, oldest first."""
        jobs: Rows = self._client.request("GET", "/jobs").json()
        return jobs

    def find(self, given: str) -> Json:
        """Return the job with this id, or else the newest job of this name, as `show` does."""
        try:
            return self.show(given)
        except ClientError as error:
            if error.status != httpx.codes.NOT_FOUND or not _ID.fullmatch(given):
                raise
            named = [job for job in self.list() if job["name"] == given]
            if not named:
                raise
            return named[-1]

    def show(self, job_id: str) -> Json:
        """Return one job: its state, step, latest metrics, warnings, what it waits for, its error."""
        job: Json = self._get(job_id)
        return job

    def spec(self, job_id: str) -> Json:
        """Return a job's job file, every default filled in."""
        spec: Json = self._get(job_id, "spec")
        return spec

    def cancel(self, job_id: str) -> Json:
        """Ask a job to stop for good; return `{id, state}`."""
        return self._act(job_id, "cancel")

    def pause(self, job_id: str) -> Json:
        """Ask a job to stop until it is resumed; return `{id, state}`."""
        return self._act(job_id, "pause")

    def resume(self, job_id: str) -> Json:
        """Ask a paused job to continue; return `{id, state}`."""
        return self._act(job_id, "resume")

    def profile(self, job_id: str, steps: int = 1) -> Json:
        """Ask the trainer for traces of its next steps; return `{id, state, steps}`."""
        answer: Json = self._client.request("POST", f"{job_path(job_id)}/profile", json={"steps": steps}).json()
        return answer

    def metrics(self, job_id: str, from_step: int = 0) -> Rows:
        """Return one row per step, from a step on; the first one is 0."""
        rows: Rows = self._get(job_id, "metrics", params={"from_step": from_step})
        return rows

    def samples(self, job_id: str, step: int | None = None) -> Rows:
        """Return scored samples of one step, or all that are retained."""
        samples: Rows = self._get(job_id, "samples", params={} if step is None else {"step": step})
        return samples

    def audit(self, job_id: str) -> Json:
        """Return how many samples and tokens were requested, delivered, dropped, regenerated and migrated."""
        audit: Json = self._get(job_id, "audit")
        return audit

    def cost(self, job_id: str) -> Json:
        """Return what the job's workers and trainer have cost at their prices, and the job's budget."""
        cost: Json = self._get(job_id, "cost")
        return cost

    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines of the job's log, with `follow` also future ones.

        A followed log does not resume after a broken connection, because its lines have no ids; `events` does.
        """
        read_timeout_s = None if follow else _READ_TIMEOUT_S
        parameters = {"follow": int(follow)}
        with self._client.stream(
            f"{job_path(job_id)}/logs", read_timeout_s=read_timeout_s, params=parameters
        ) as response:
            try:
                yield from response.iter_lines()
            except httpx.TransportError as error:
                raise ClientError("Log broke off", f"{error}: ask for it again") from error

    def events(self, job_id: str, last_event_id: str | None = None, *, follow: bool = True) -> Iterator[ServerEvent]:
        """Yield a job's events, from its beginning or after an event, until it has ended; or present ones only.

        A broken stream resumes after the last event that was read: no event is lost or repeated.
        """
        while True:
            headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
            with self._client.stream(
                f"{job_path(job_id)}/events",
                read_timeout_s=_READ_TIMEOUT_S,
                headers=headers,
                params={"follow": int(follow)},
            ) as response:
                try:
                    for event in server_events(response.iter_lines()):
                        last_event_id = event.id or last_event_id
                        yield event
                except httpx.TransportError:
                    time.sleep(_RETRY_S)
                    continue
            return

    def _get(self, job_id: str, part: str = "", **arguments: Any) -> Any:
        path = f"{job_path(job_id)}/{part}" if part else job_path(job_id)
        return self._client.request("GET", path, **arguments).json()

    def _act(self, job_id: str, action: str) -> Json:
        job: Json = self._client.request("POST", f"{job_path(job_id)}/{action}").json()
        return job


class Workers:
    """`/v1/workers`. Every method may raise `ClientError`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self) -> Rows:
        """Return the present workers and those that left recently."""
        workers: Rows = self._client.request("GET", "/workers").json()
        return workers

    def drain(self, worker_id: str) -> Json:
        """Ask a worker to hand off its samples and exit."""
        worker: Json = self._client.request("POST", f"/workers/{quote(worker_id, safe='')}/drain").json()
        return worker


class Tokens:
    """`/v1/tokens`: access tokens of limited scope. Every method may raise `ClientError`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, scope: str, *, job: str = "", name: str = "", expires_s: float | None = None) -> Json:
        """Create a token that expires after a time, None for never; return it with its `secret`.

        `scope` is `admin`, `agent`, `job`, `read`, `worker`, or `trainer`, which is for one external `job`.
        """
        # A repeated request replaces the token of the first one, whose secret was lost with its response.
        body = {"id": new_token(8), "scope": scope, "job": job, "name": name, "expires_s": expires_s}
        token: Json = self._client.request("POST", "/tokens", json=body).json()
        return token

    def list(self) -> Rows:
        """Return all tokens, expired ones too, without their secrets."""
        tokens: Rows = self._client.request("GET", "/tokens").json()
        return tokens

    def revoke(self, token_id: str) -> None:
        """Revoke a token: it is rejected after at most 2 seconds."""
        self._client.request("DELETE", f"/tokens/{quote(token_id, safe='')}")


def server_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Yield the events in the lines of a `text/event-stream` (WHATWG HTML, 9.2.6); comments are keep-alives."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                data = json.loads(fields["data"])
                yield ServerEvent(fields.get("id", ""), fields.get("event", "message"), data)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value


def job_path(job_id: str) -> str:
    """Return the path of a job below `/v1`; raises `ClientError` if nothing can have this id."""
    if not _ID.fullmatch(job_id):  # a slash would select another route
        raise ClientError(
            "No such job",
            f"there is no job {job_id!r}: list them with 'rlboost ps' or GET /v1/jobs",
            httpx.codes.NOT_FOUND.value,
        )
    return f"/jobs/{job_id}"


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success and not response.headers.get("content-type", "").startswith("text/html"):
        return response
    try:
        response.read()
        problem = response.json()
        title, detail = str(problem["title"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        title, detail = response.reason_phrase, f"{response.url} answered {response.status_code}: is it this system's?"
        if response.is_success:
            title, detail = "Not a manager", f"{response.url} is a web page: give the URL of the manager"
    finally:
        response.close()
    raise ClientError(title, detail, response.status_code)


class Superseded(RLBoostError):
    """Another trainer has attached to the job, or the job has ended."""


class Attachment:
    """One trainer's hold of its job: calls of the REST API, and a thread that renews the lease.

    Args:
        client: of the manager.
        renewing: the same, which gives up soon: it renews the lease, and ends the hold.
        job_id: the job.
        options: of the request that attaches.

    """

    def __init__(self, client: Client, renewing: Client, job_id: str, options: Mapping[str, Any]) -> None:
        self.client, self._renewing, self.job_id = client, renewing, job_id
        self.path = job_path(job_id)
        self.attached = client.request("POST", f"{self.path}/trainer", json=dict(options)).json()
        self.epoch: int = self.attached["epoch"]
        self.access = IssuedAccess(self.attached["store_credential"], "")
        self.lost: RLBoostError | None = None
        self.phases = ["training"]
        """What it does, and what calls under way do."""
        self._stop = threading.Event()
        # By a weak reference: a trainer that is no longer used loses its job.
        arguments = (weakref.ref(self), self._stop, options["lease_s"] / 4)
        threading.Thread(target=_keep_renewing, args=arguments, name="trainer-lease", daemon=True).start()

    def call(self, method: str, part: str, body: Mapping[str, Any] | None = None, **options: Any) -> httpx.Response:
        """Return the answer to a request below the job, which names the epoch.

        Raises:
            Superseded: this trainer no longer has the job.
            ClientError: the request is rejected, or the manager does not answer.

        """
        return self._call(self.client, method, part, body, **options)

    def _call(
        self, client: Client, method: str, part: str, body: Mapping[str, Any] | None = None, **options: Any
    ) -> httpx.Response:
        if self.lost:
            raise self.lost
        if body is not None:
            options["json"] = {"epoch": self.epoch, **body}
        try:
            return client.request(method, f"{self.path}/{part}", **options)
        except ClientError as error:
            if error.status == httpx.codes.CONFLICT and error.title in {"Superseded", "Job over"}:
                self.lost = Superseded(error.detail)
                raise self.lost from error
            raise

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what the trainer does; of calls that overlap, what the last one that has not ended does."""
        self.phases.append(name)
        try:
            yield
        finally:
            self.phases.remove(name)

    def renew(self) -> None:
        """Renew the lease and the credential of the weight store; raises what `call` raises."""
        answer = self._call(self._renewing, "PUT", "trainer", {"phase": self.phases[-1]}).json()
        self.access.credential = answer["store_credential"]

    def close(self) -> None:
        """Let another trainer attach at once."""
        self._stop.set()
        with suppress(RLBoostError):  # its lease runs out
            self._call(self._renewing, "DELETE", "trainer", params={"epoch": self.epoch})


def _keep_renewing(attachment: weakref.ref[Attachment], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        if (held := attachment()) is None or held.lost:
            return
        with suppress(RLBoostError):  # the next call of the trainer says why
            held.renew()
        del held
