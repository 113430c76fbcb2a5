"""A process that runs the user's reward functions: `python -m rlboost.services.trainer.children.reward PARTS`.

PARTS is JSON, a list of the fields of `RewardPart`, with `timeout_s` and `hidden`: the names of arguments that are also
columns of the data. `child` describes the transport.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

from rlboost.services.trainer.children.child import Pipe, unpack
from rlboost.shared.secrets import REWARD_TOKEN, bearer
from rlboost.shared.user_code import (
    RAW_ARGUMENTS,
    TRL_ARGUMENTS,
    check_arguments,
    checked_cost,
    describe_error,
    describe_import_error,
    describe_row,
    describe_value,
    detect_style,
    ground_truth,
    has_parameter,
    hidden_argument,
    load,
)

# --- Calls a user's reward function with TRL's or verl's signature, and checks what it returns ------------------------


class UnusableReward(Exception):
    """A function returned something that is no reward."""

    def __init__(self, reason: str, detail: str) -> None:
        """Describe it by one of the reasons of `Scores`, and for people."""
        super().__init__(detail)
        self.reason = reason


class Caller(NamedTuple):
    """One reward function."""

    name: str
    """Empty if the job has only one."""
    source: str
    """The function's path, or the url."""
    call: Callable[[dict[str, Any]], Any]
    """A request, whose keys are the fields of `RewardBatch` -> its rewards, one per completion, or an awaitable of
    them."""


def caller(function: Callable[..., Any], part: Mapping[str, Any]) -> Caller:
    """Return the caller of a function.

    Args:
        function: the user's.
        part: the fields of `RewardPart`.

    Raises:
        InvalidUserFunction: it has neither signature.

    """
    style = detect_style(function, part["arguments"], part["style"])
    bound = partial(function, **part["arguments"]) if part["arguments"] else function
    if style == "verl":
        return Caller(part["name"], part["function"], lambda request: _verl(bound, request))
    names = [*TRL_ARGUMENTS, *(name for name in RAW_ARGUMENTS if has_parameter(function, name))]
    return Caller(
        part["name"],
        part["function"],
        lambda request: bound(**{name: request[name] for name in names}, **request["columns"]),
    )


def _verl(function: Callable[..., Any], request: dict[str, Any]) -> list[Any] | Awaitable[list[Any]]:
    rows = rows_of(request["columns"], len(request["solutions"]))
    results = [
        function(
            data_source=row.get("data_source"),
            solution_str=text,
            ground_truth=ground_truth(row),
            extra_info=row.get("extra_info") or {},
        )
        for row, text in zip(rows, request["solutions"], strict=True)
    ]
    if results and inspect.isawaitable(results[0]):
        return _together(results)
    return results


async def _together(results: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*results)


def rewards_of(result: object, call: Caller) -> tuple[list[float | None], list[float]]:
    """Return the rewards and costs that a function returned for a group; their number is not checked.

    Instead of a number, a completion may have a mapping, as in verl: its `score`, perhaps its `cost`, and further
    entries for logging.

    Raises:
        UnusableReward: it returned something else.

    """
    if result is None:
        raise UnusableReward("missing", f"{call.source} returned None: is there a `return`?")
    # Each of them can be iterated, but not as one reward per completion.
    is_other = isinstance(result, str | bytes | bytearray | Mapping | Set) or not hasattr(type(result), "__iter__")
    if is_other or getattr(result, "ndim", 1) != 1 or not isinstance(result, Iterable):
        raise UnusableReward(
            "not_a_number",
            f"{call.source} returned {_typed(result)}: return a list with a number, or None, per completion",
        )
    values = list(result)  # which may run the user's code
    try:
        split = [split_cost(value) for value in values]
    except ValueError as error:
        raise UnusableReward("not_a_number", str(error)) from error
    return [reward_number(value) for value, _ in split], [cost for _, cost in split]


def reward_number(value: object) -> float | None:
    """Return a reward as a float, which may be infinite or NaN; None for None, a reward that is missing.

    Booleans, decimals and scalars of numpy and torch are numbers; text is not, even if it reads like one.

    Raises:
        UnusableReward: it is no number, or too large for a float.

    """
    if value is None:
        return None
    try:
        if isinstance(value, SupportsFloat | SupportsIndex) and not getattr(value, "ndim", 0):
            return float(value)
    except OverflowError as error:
        raise UnusableReward("too_large", f"a reward is beyond any float ({error}): scale it down") from error
    except (TypeError, ValueError):
        pass  # below
    hint = ": convert it with float()" if isinstance(value, str) else ""
    raise UnusableReward("not_a_number", f"a reward is {_typed(value)}, not a number{hint}")


def _typed(value: object) -> str:
    return f"{describe_value(value)}, of the type {type(value).__name__}"


def rows_of(columns: Mapping[str, list[Any]], n: int) -> list[dict[str, Any]]:
    """Return columns as `n` rows."""
    return [{name: values[i] for name, values in columns.items()} for i in range(n)]


def split_cost(result: Any) -> tuple[Any, float]:
    """Return the reward and the cost of a result: a reward, or a mapping with a `score` and perhaps a `cost`.

    Raises:
        ValueError: the mapping has no score, or the cost is not a finite number from 0 to `MAX_REWARD`.

    """
    if not isinstance(result, Mapping):
        return result, 0.0
    if "score" not in result:
        raise ValueError(f"{describe_value(result)} has no 'score': return it there")
    return result["score"], checked_cost(result.get("cost"))


# --- A reward function served over HTTP: one POST per group -----------------------------------------------------------
# The request is JSON, `{"rows": [{"prompt", "completion", "completion_ids", "completion_raw", "solution", "columns":
# {...}}, ...]}`, one row per completion. Only `completion_raw` has special tokens; `solution` is the text that the
# model generated. The answer is `{"rewards": [...]}`, per row a number or null, or `{"score": ..., "cost": ...}`.


_BUSY = {429, 502, 503, 504}
"""Status codes that are retried."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_RETRY_FRACTION = 0.9
"""Part of `reward.timeout_s` for requests and retries, so that the error is reported before the process is killed."""
_SHOWN_CHARS = 200
_ORIGINS = "RLBOOST_TRAINER_REWARD_TOKEN_ORIGINS"
_UNAUTHORIZED = {401, 403}


class RemoteFailed(Exception):
    """The service returned no rewards."""


def remote(part: Mapping[str, Any]) -> Caller:
    """Return a caller of the service at `part["url"]` with the limit `part["timeout_s"]`.

    A job file chooses the URL, so only where the trainer's operator allows it, `part["gets_token"]`, is the token sent,
    and a connection to a cloud's metadata service used.
    Retried with exponential backoff: connections that fail or break, and status 429, 502, 503 and 504.
    """
    from rlboost.shared.http.clients import IDENTITY, http_client, limit_answer  # noqa: PLC0415 - most rewards need no HTTP client
    from rlboost.shared.proxies import external  # noqa: PLC0415 - most rewards need no HTTP client

    token = os.environ.get(REWARD_TOKEN) if part["gets_token"] else None
    headers = {"authorization": bearer(REWARD_TOKEN, token)} if token else {}
    client = http_client(external, headers={**headers, **IDENTITY}, event_hooks={"response": [limit_answer]})
    traced = {} if part["gets_token"] else {"trace": partial(_check_connection, part["url"])}
    post = partial(client.post, part["url"], extensions=traced)
    return Caller(part["name"], part["url"], lambda request: _ask(post, part["url"], request, part["timeout_s"]))


def _check_connection(url: str, event: str, info: Mapping[str, Any]) -> None:
    """Reject the address that was connected, whatever the name resolved to before, while nothing is sent yet."""
    from rlboost.shared.proxies import is_metadata  # noqa: PLC0415 - as above

    if event != "connection.connect_tcp.complete":
        return
    stream = info["return_value"]
    host = stream.get_extra_info("server_addr")[0]
    if is_metadata(host):
        stream.close()
        raise RemoteFailed(
            f"{url} is at {host}, where clouds serve credentials: name another service, or add its origin to the "
            f"trainer's {_ORIGINS}"
        )


def _ask(post: Any, url: str, request: Mapping[str, Any], timeout_s: float) -> list[Any]:
    import httpx  # noqa: PLC0415 - as above

    body = json.dumps({"rows": _rows(request)}).encode()
    until = time.monotonic() + timeout_s * _RETRY_FRACTION
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = until - time.monotonic()
        try:
            answer = post(content=body, headers={"content-type": "application/json"}, timeout=max(left_s, 1e-3))
        except httpx.TransportError as error:
            wrong = f"{type(error).__name__}: {error}"
        except httpx.DecodingError as error:
            raise RemoteFailed(f"{url}: {error}") from error
        else:
            if answer.status_code not in _BUSY:
                return _rewards(url, answer)
            wrong = _shown(answer)
        # Jitter, for many processes that were rejected at once.
        wait_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret
        if time.monotonic() + wait_s >= until:
            raise RemoteFailed(f"{url} gave no rewards within {timeout_s:g} s; last error: {wrong}")
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _rewards(url: str, answer: Any) -> list[Any]:
    if answer.status_code in _UNAUTHORIZED and "authorization" not in answer.request.headers:
        hint = f"to send it {REWARD_TOKEN}, add its https://HOST:PORT to the trainer's {_ORIGINS}"
        raise RemoteFailed(f"{url} answered {_shown(answer)}: {hint}")
    if answer.status_code != 200:
        raise RemoteFailed(f"{url} answered {_shown(answer)}")
    try:
        rewards = answer.json()["rewards"]
    except (ValueError, TypeError, KeyError) as error:
        raise RemoteFailed(f'{url} answered no {{"rewards": [...]}} but {_shown(answer)}') from error
    if not isinstance(rewards, list):
        raise RemoteFailed(f"{url}: rewards is no list but {_shown(answer)}")
    return rewards


def _shown(answer: Any) -> str:
    return f"{answer.status_code} {answer.text[:_SHOWN_CHARS]}"


def _rows(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = rows_of(request["columns"], len(request["completions"]))
    return [
        {
            "prompt": request["prompts"][i],
            "completion": request["completions"][i],
            "completion_ids": request["completion_ids"][i],
            "completion_raw": request["completions_raw"][i],
            "solution": request["solutions"][i],
            "columns": row,
        }
        for i, row in enumerate(columns)
    ]


# --- A reward model in this process -----------------------------------------------------------------------------------


def reward_model(part: Mapping[str, Any]) -> Caller:
    """Return a caller of the reward model that `part["scorer"]` describes: a class of the trainer's, and arguments.

    Raises:
        ConfigError: it cannot be loaded.

    """
    module, _, name = part["scorer"]["class"].partition(":")
    made = getattr(import_module(module), name)(**part["scorer"]["arguments"])
    return Caller(part["name"], part["model"], made.score)


# --- The process ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Answer requests until the input ends."""
    pipe = Pipe()
    callers = []
    for part in json.loads(sys.argv[1]):
        if part["model"]:
            try:
                callers.append(reward_model(part))
            except Exception as error:  # noqa: BLE001 - of a library, such as a device without memory
                pipe.write({"failed": f"{part['model']}: {error}"})
                return 1
            continue
        try:
            function = None if part["url"] else _loaded(part)
            callers.append(remote(part) if function is None else caller(function, part))
        except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
            pipe.write({"failed": describe_import_error(part["function"], "reward function", error)})
            return 1
        if part["hidden"] and function is not None:
            style = detect_style(function, part["arguments"], part["style"])
            if hidden := hidden_argument(part["arguments"], style, part["hidden"], "the data"):
                pipe.write({"failed": hidden})
                return 1
        try:
            if (prepare := getattr(function, "prepare", None)) is not None:
                prepare(**part["arguments"])
        except BaseException as error:  # noqa: BLE001 - as above
            pipe.write({"failed": f"{part['function']}: {error}"})
            return 1
    pipe.write({"ready": True})
    with asyncio.Runner() as runner:
        while (packed := pipe.read_packed()) is not None:
            pipe.write(_answer(runner, callers, packed))
    return 0


def _loaded(part: dict[str, Any]) -> Callable[..., Any]:
    check_arguments(part["function"], part["arguments"])
    return load(part["function"], "reward function")


def _answer(runner: asyncio.Runner, callers: Sequence[Caller], packed: bytes) -> dict[str, Any]:
    """Return `rewards` and `costs`, a list per function; or `raised` or `unusable`.

    `raised` is the error of the first function that failed, `unusable` the reason and a description of the first
    function's result that is no reward.
    """
    rewards, costs = [], []
    for one in callers:
        prefix = f"{one.name}: " if one.name else ""
        try:
            # Each function gets lists of its own, which it may change. It is called outside the event loop: it may run
            # its own.
            result = one.call(unpack(packed))
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result))
            of_function, cost = rewards_of(result, one)
            rewards.append(of_function)
            costs.append(cost)
        except UnusableReward as error:
            return {"unusable": [error.reason, f"{prefix}{error}\n{describe_row(_row(unpack(packed)))}"]}
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            return {"raised": prefix + describe_error(error, _row(unpack(packed)))}
    return {"rewards": rewards, "costs": costs}


def _row(request: dict[str, Any]) -> dict[str, Any]:
    """Return the data row of a group's request, and its completions."""
    columns = {name: values[0] for name, values in request["columns"].items()}
    return {"prompt": request["prompts"][0], **columns, "completions": request["solutions"] or request["completions"]}


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


if __name__ == "__main__":
    sys.exit(main())
