"""Tools of MCP servers for a `ToolEnvironment`.

::

    from rlboost.environments import ToolEnvironment
    from rlboost.environments.mcp import McpServer

    SERVER = McpServer(["uvx", "mcp-server-time"])


    class Clock(ToolEnvironment):
        def __init__(self) -> None:
            super().__init__(SERVER.tools())

All conversations of a process share the server. Its connection lives on an event loop and a thread of its own, so that
any event loop, and code without one, can use it.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from rlboost.environments.tools import Tool
from rlboost.shared.job.environment import ToolUnavailable

PACKAGE = "mcp>=1.24,<3"
START_LIMIT_S = 60.0
"""How long a server may take to start and to list its tools."""
PING_LIMIT_S = 5.0
"""How long a server may take to answer a ping, after a call that exceeds its limit."""
_END_LIMIT_S = 10.0
MAX_TOOLS = 4096
"""Of one server: each is a text in every prompt."""
MAX_PAGES = 64
"""Answers in which a server may list its tools."""

_LOCK = threading.Lock()

T = TypeVar("T")


class McpServer:
    """An MCP server, started with the first call, and again after it has ended or has stopped to answer."""

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        url: str = "",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Name the server; this starts nothing.

        Args:
            command: a program that speaks MCP on its standard input and output, and its arguments.
            url: of a server that runs, for streamable HTTP, instead of a command.
            env: environment variables of the command, in addition to PATH, HOME and the like.
            headers: of the requests to `url`.
            timeout_s: the limit for one call of a tool.

        Raises:
            ValueError: neither a command nor a URL is given, or both are.

        """
        if bool(command) == bool(url) or isinstance(command, str):
            raise ValueError("give either a command, as a list of texts, or a url")
        self._command, self._url, self._env, self._headers = tuple(command), url, env, headers
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._starting = asyncio.Lock()
        self._listed: list[dict[str, Any]] = []

    def tools(self, only: Collection[str] = ()) -> list[Tool]:
        """Return the server's tools, or those with the given names; the first call starts the server.

        Raises:
            ToolUnavailable: it cannot be started.
            ValueError: it has no tool of such a name.

        """
        listed = self._listed = self._listed or _run(self._list()).result()
        if missing := sorted(set(only) - {tool["name"] for tool in listed}):
            raise ValueError(f"{self} has no tool {missing[0]}, but {', '.join(tool['name'] for tool in listed)}")
        return [
            Tool(
                tool["name"],
                tool.get("description") or "",
                tool["inputSchema"],
                partial(self.call, tool["name"]),
            )
            for tool in listed
            if not only or tool["name"] in only
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result; an error of the tool is a text that begins with `error: `.

        Content that is no text is named, as `[image]`.

        Raises:
            ToolUnavailable: the server cannot be reached, has ended, or answers nothing any more.
            Exception: the server rejects the call, or has not answered in time and is alive.

        """
        return await asyncio.wrap_future(_run(self._call(name, arguments)))

    def __str__(self) -> str:
        """Return what was given to start it."""
        return f"the MCP server {self._url or ' '.join(self._command)}"

    # --- on the thread of the connections ---

    async def _list(self) -> list[dict[str, Any]]:
        connection = await self._connected()
        listed, cursor = list[dict[str, Any]](), None
        for _ in range(MAX_PAGES):
            params = None if cursor is None else connection.mcp.types.PaginatedRequestParams(cursor=cursor)
            page = _as_json(await self._answer(connection, connection.session.list_tools(params=params), START_LIMIT_S))
            listed += page["tools"]
            if len(listed) > MAX_TOOLS:
                break
            if not (cursor := page.get("nextCursor")):
                return listed
        connection.close()
        raise ToolUnavailable(f"{self} lists more than {MAX_TOOLS} tools, or in more than {MAX_PAGES} answers")

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        connection = await self._connected()
        result = _as_json(
            await self._answer(connection, connection.session.call_tool(name, arguments), self._timeout_s)
        )
        text = "\n".join(map(_text_of, result["content"]))
        return f"error: {text}" if result.get("isError") else text

    async def _answer(self, connection: _Connection, request: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Return the answer to a request."""
        asked = asyncio.ensure_future(request)
        either: set[asyncio.Future[Any]] = {asked, connection.ended}
        try:
            done, _ = await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_alive = asked in done or (not connection.ended.done() and await connection.is_alive())
        finally:
            asked.cancel()
        reason: BaseException | str = f"it has answered neither a call within {limit_s:g} s nor a ping"
        if asked in done:
            try:
                return asked.result()
            except connection.refusal as error:
                if not connection.is_closed_by(error):
                    raise
                reason = error
            except Exception as error:  # noqa: BLE001 - the transport's, whatever it is
                reason = error
        elif is_alive:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        elif connection.ended in done:
            reason = "it has ended"
        connection.close()
        raise ToolUnavailable(f"{self} has failed: {_describe(reason)}")

    async def _connected(self) -> _Connection:
        async with self._starting:
            if self._connection is None or self._connection.ended.done():
                self._connection = connection = _Connection(self._session())
                try:
                    async with asyncio.timeout(START_LIMIT_S):
                        await connection.opened
                except Exception as error:
                    raise ToolUnavailable(f"{self} cannot be started: {_describe(error)}") from error
                finally:
                    if not connection.opened.done() or connection.opened.cancelled():
                        connection.close()
            return self._connection

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[tuple[Any, Any]]:
        try:
            mcp = importlib.import_module("mcp")
            http = importlib.import_module("httpx2" if version("mcp").startswith("2.") else "httpx")
        except (ModuleNotFoundError, PackageNotFoundError) as error:
            raise ModuleNotFoundError(f"{error}: pip install '{PACKAGE}'") from error
        async with AsyncExitStack() as stack:
            if self._url:
                streamable = importlib.import_module("mcp.client.streamable_http").streamable_http_client
                limit = http.Timeout(START_LIMIT_S, read=None)  # of a call, see `_answer`
                client = await stack.enter_async_context(http.AsyncClient(headers=self._headers, timeout=limit))
                streams = await stack.enter_async_context(streamable(self._url, http_client=client))
            else:
                program, *arguments = self._command
                environment = None if self._env is None else dict(self._env)
                server = mcp.StdioServerParameters(command=program, args=arguments, env=environment)
                streams = await stack.enter_async_context(mcp.stdio_client(server))
            session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
            await session.initialize()
            yield mcp, session


class _Connection:
    """One connection to a server, which a task of its own holds open."""

    def __init__(self, opening: AbstractAsyncContextManager[tuple[Any, Any]]) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when no further answer is to be expected."""
        self.mcp: Any = None
        self.session: Any = None
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold(opening), name="mcp-server")

    @property
    def refusal(self) -> type[Exception]:
        """The class of the errors that a server answers with."""
        found: type[Exception] = getattr(self.mcp, "MCPError", None) or self.mcp.McpError
        return found

    def is_closed_by(self, refusal: Any) -> bool:
        """Return True if an error says that the connection is closed."""
        return bool(refusal.error.code == self.mcp.types.CONNECTION_CLOSED)

    async def _hold(self, opening: AbstractAsyncContextManager[tuple[Any, Any]]) -> None:
        try:
            async with opening as (self.mcp, self.session):
                self.opened.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - the transport's, whatever it is
            if not self.opened.done():
                self.opened.set_exception(error)
        finally:
            self._end()

    async def is_alive(self) -> bool:
        """Return True if the server answers a ping."""
        try:
            async with asyncio.timeout(PING_LIMIT_S):
                await self.session.send_ping()
        except Exception:  # noqa: BLE001 - whatever it is, the server is of no use
            return False
        return True

    def close(self) -> None:
        """Let the calls in flight fail, and end the server; this does not wait for it."""
        self._end()
        self._closing.set()
        asyncio.get_running_loop().call_later(0 if self.session is None else _END_LIMIT_S, self._task.cancel)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _as_json(result: Any) -> dict[str, Any]:
    """Return a result with the names of the protocol, which differ from the attributes' in one of the versions."""
    found: dict[str, Any] = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def _text_of(content: dict[str, Any]) -> str:
    if content["type"] == "text":
        return str(content["text"])
    return str(content.get("resource", {}).get("text") or f"[{content['type']}]")


def _describe(reason: BaseException | str) -> str:
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    return reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp-servers", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, T]) -> Future[T]:
    with _LOCK:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(work, loop)
