"""Parses and tokenizes texts and renders conversations in processes of their own, which no request blocks or bloats.

A tokenizer holds Python's lock and takes hundreds of bytes for each character of a text, a chat template is a program,
and parsing JSON takes up to 40 ms for each megabyte. In the manager's process each could stop the loop that renews the
leader's lease.

Consumes: bodies, texts and conversations of clients.
Produces: values, tokens and rendered texts.
Waits for: a free process, for at most `QUEUE_LIMIT_S`, its start, for at most `START_LIMIT_S`, and its answer, for at
    most `LIMIT_S`.
Ends when: `close` is called; a process also ends after a timeout, or when it retains too much memory.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlboost.services.rollout_manager.adapters.request_bodies import (
    NOT_PACKED,
    SMALL_BODY_BYTES,
    packed_value,
    parse_json,
    unpacked_value,
    unpacker_of,
)
from rlboost.services.rollout_manager.ports import (
    NO_OPTIONS,
    InvalidJson,
    ModelFiles,
    TemplateOptions,
    TextProcessesBusy,
    TokenizationError,
)
from rlboost.shared.data.messages import Messages, clean_messages
from rlboost.shared.errors import ConfigError
from rlboost.shared.framing import send
from rlboost.shared.model.chat_template import ChatTemplate, template_extensions
from rlboost.shared.model.folder import is_classifier, merge_eos_ids
from rlboost.shared.model.tool_calls import CallStyle, style_of_turns
from rlboost.shared.process.stalls import let_others_run
from rlboost.shared.process.waiting import count_timeout
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.wire import I32, pack

if TYPE_CHECKING:
    import tokenizers


# --- chat templates ---------------------------------------------------------------------------------------------------


_DEVELOPER = re.compile("""(['"])developer\\1""")


class JinjaChatTemplate:
    """`ports.ChatTemplate` of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Take the template's source, and the special tokens that it may use, such as `bos_token`."""
        self._source = source
        self._special_tokens = special_tokens
        self._template = ChatTemplate(source, self._render)
        self._knows_developer = _DEVELOPER.search(source) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS) -> str:
        try:
            cleaned = clean_messages(messages)
            if not self._knows_developer:
                cleaned = [{**one, "role": "system"} if one["role"] == "developer" else one for one in cleaned]
            kwargs = {**self._template.arguments_among(options.hints), **options.kwargs}
            return self._template.render(cleaned, tools=options.tools, kwargs=kwargs).text
        except ConfigError as error:
            raise TokenizationError(f"the chat template rejects the messages: {error}") from error

    def render_unchecked(self, messages: Messages, tools: list[dict[str, Any]], is_prompt: bool) -> str:
        return self._render(messages, tools=tools, add_generation_prompt=is_prompt)

    def _render(self, messages: Messages, *, tools: Any, **options: Any) -> str:
        return str(_compiled(self._source).render(messages=messages, tools=tools, **options, **self._special_tokens))


def call_style_of(files: ModelFiles) -> CallStyle:
    """Return how a model's chat template writes tool calls; see `ports.TextProcessor.call_style`."""
    tokenizer, template = files.tokenizer, files.chat_template
    if tokenizer is None or template is None:
        raise TokenizationError(f"model {files.name} has no {'tokenizer' if tokenizer is None else 'chat template'}")
    return style_of_turns(
        template.render_unchecked,
        files.stop_token_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
    )


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    from jinja2.exceptions import TemplateError  # noqa: PLC0415 - only a manager that serves chats needs it
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - likewise

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=template_extensions())
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(source)


# --- model folders ----------------------------------------------------------------------------------------------------


_SHOWN_CHARACTERS = 80
MAX_DECODER_GROWTH = 64
"""By how much a tokenizer's decoder may lengthen the text of tokens: it runs in the manager, for each token."""
MAX_TOKEN_CHARACTERS = 4096
"""Of the text of a token that is decoded, for the same reason."""
_PANIC = "pyo3_runtime"
"""Module of the error that a fault of the library raises, which is no `Exception`."""


class FastTokenizer:
    """`ports.Tokenizer` by the library tokenizers."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Wrap a tokenizer, which must neither truncate nor pad."""
        self._tokenizer = tokenizer
        self._short = set[int]()
        """Tokens with at most `MAX_TOKEN_CHARACTERS`, of those decoded so far."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises a bare Exception
            _check_unicode(text)
            raise TokenizationError(
                f"the tokenizer has no tokens for {_shortened(text)}: {error}; use characters of its vocabulary"
            ) from error
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            if not self._short.issuperset(tokens):
                self._check_lengths({*tokens} - self._short)
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _without_panic(error, "the tokenizer cannot decode these tokens") from error
        return text

    def _check_lengths(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if (text := self._tokenizer.id_to_token(token)) is None:
                continue
            if len(text) > MAX_TOKEN_CHARACTERS:
                raise ValueError(f"token {token} has {len(text)} characters, more than {MAX_TOKEN_CHARACTERS}")
            self._short.add(token)


def _without_panic(error: BaseException, what: str) -> BaseException:
    """Return an error of the library tokenizers with what it prevents; any other one that is no `Exception` as is."""
    if not isinstance(error, Exception) and type(error).__module__ != _PANIC:
        return error
    return TokenizationError(f"{what}: {error}")


def _growth(decoder: Mapping[str, Any]) -> int:
    """Return by how much a decoder, as the library writes it, may lengthen a text.

    Raises:
        ValueError: it may take long.

    """
    if decoder["type"] == "Sequence":
        return prod(map(_growth, decoder["decoders"]))
    if decoder["type"] != "Replace":
        return 1
    if "Regex" in decoder["pattern"]:
        raise ValueError("its decoder searches for a regular expression, which may take long: search for a string")
    return max(1, len(decoder["content"]) // max(1, len(decoder["pattern"].get("String", ""))))


def _check_unicode(text: str) -> None:
    """Refuse half of a character, as JavaScript leaves it when it cuts a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizationError(
            f"character {error.start} is {text[error.start]!a}, half of a character that UTF-16 writes as two: cut the "
            "text between characters"
        ) from error


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}..."


def load_model_files(name: str) -> ModelFiles:
    """Read a model folder; see `ports.LoadModelFiles`."""
    folder = Path(name)
    if not (folder / "tokenizer.json").is_file():
        return ModelFiles(name)
    from tokenizers import Tokenizer  # noqa: PLC0415 - only a manager that serves text needs it

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings, config = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        template = _read_template(folder, settings)
        growth = _growth(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else 1
    except BaseException as error:
        raise _without_panic(error, f"the tokenizer of model {name} cannot be read") from error
    if growth > MAX_DECODER_GROWTH:
        what = f"the decoder of the tokenizer of model {name} makes texts {growth} times as long"
        raise TokenizationError(f"{what}: at most {MAX_DECODER_GROWTH} times is possible")
    if is_classifier(config):
        raise TokenizationError(f"model {name} is a reward model, which scores and generates nothing")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**config, **(config.get("text_config") or {})}
    special_tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    eos_id = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return ModelFiles(
        name=name,
        tokenizer=FastTokenizer(tokenizer),
        chat_template=None if template is None else JinjaChatTemplate(template, special_tokens),
        stop_token_ids=merge_eos_ids(eos_id, config.get("eos_token_id"), generation.get("eos_token_id")),
        max_len=config.get("max_position_embeddings"),
        vocab_size=config.get("vocab_size"),
    )


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default template, from its own file or from the tokenizer's settings, which may hold several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        return next((str(each["template"]) for each in given if each["name"] == "default"), None)
    return None if given is None else str(given)


# --- processes --------------------------------------------------------------------------------------------------------


PROCESSES = 2
START_LIMIT_S = 60.0
LIMIT_S = 30.0
"""How long one request may take, with the loading of its model."""
QUEUE_LIMIT_S = 60.0
"""How long a request waits for a process."""
MAX_MEMORY_BYTES = 2 << 30
"""A process that needs more ends."""
MAX_GROWTH_BYTES = 64 << 20
"""A process that retains more than this beyond its models ends after its answer, so that the memory is returned."""
MAX_TEXT_CHARACTERS = 64 << 20
"""The longest text that a template may render."""
MODELS_CACHED = 8
_JSON_HEAD = b"\x81\xa4json\xc6"
"""How msgpack begins a map of `json` to bytes, whose number follows in four bytes, and then they."""


class TextProcesses:
    """`ports.TextProcessor`: up to `PROCESSES` processes, each with one request at a time, started when needed."""

    def __init__(self, *, limit_s: float = LIMIT_S, queue_limit_s: float = QUEUE_LIMIT_S) -> None:
        self._limit_s, self._queue_limit_s = limit_s, queue_limit_s
        self._places = asyncio.Semaphore(PROCESSES)
        self._idle: list[Process] = []
        self._processes: set[Process] = set()
        """All that may still run."""

    async def parse(self, body: Sequence[bytes]) -> Any:
        """See `TextProcessor.parse`. Only a large body is parsed in another process."""
        n_bytes = sum(map(len, body))
        if n_bytes <= SMALL_BODY_BYTES:
            return parse_json(b"".join(body))
        try:
            value = await self._send([_JSON_HEAD, n_bytes.to_bytes(4, "big"), *body], "the request")
        except TokenizationError as error:
            raise InvalidJson(str(error)) from error
        await let_others_run()  # what comes next takes long, too
        return value

    async def encode(self, model: str, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        request = {"model": model, "texts": texts, "add_special_tokens": add_special_tokens}
        tokens: list[bytes] = await self._call(request, "the text")
        return tokens

    async def render(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        request = {"model": model, "messages": messages, **options._asdict()}
        return str(await self._call(request, "the chat template"))

    async def encode_chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> bytes:
        request = {"model": model, "messages": messages, **options._asdict()}
        tokens: bytes = await self._call({**request, "encodes": True}, "the conversation")
        return tokens

    async def call_style(self, model: str) -> CallStyle:
        return CallStyle(**await self._call({"model": model, "call_style": True}, "the chat template"))

    async def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))

    async def _call(self, request: Mapping[str, Any], what: str) -> Any:
        try:
            packed = packed_value(request)
        except (OverflowError, ValueError) as error:
            raise TokenizationError(f"{what} {NOT_PACKED}") from error
        await let_others_run()  # it may be large, and to send it takes long, too
        return await self._send([packed], what)

    async def _send(self, request: Sequence[bytes], what: str) -> Any:
        """Return the answer to a request in parts."""
        try:
            async with asyncio.timeout(self._queue_limit_s):
                await self._places.acquire()
        except TimeoutError as error:
            because = "other requests are tokenized"
            count_timeout("a text process", because, self._queue_limit_s)
            raise TextProcessesBusy(f"waited {self._queue_limit_s:g} s for a text process: {because}") from error
        try:
            return await self._answer(request, what)
        finally:
            self._places.release()

    async def _answer(self, request: Sequence[bytes], what: str) -> Any:
        process = await self._process()
        answer: dict[str, Any] = {"ends": True}
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await process.exchange(request)
        except TimeoutError as error:
            count_timeout("a text process", what, self._limit_s)
            raise TokenizationError(f"{what} took longer than {self._limit_s:g} s: shorten the request") from error
        except (EOFError, OSError) as error:
            reason = f"{what} needs more than {MAX_MEMORY_BYTES >> 30} GiB of memory, or crashes the tokenizer"
            raise TokenizationError(f"{reason}: shorten the request") from error
        finally:
            if answer["ends"]:
                process.kill()
            else:
                self._idle.append(process)
        if "error" in answer:
            raise TokenizationError(answer["error"])
        return answer["result"]

    async def _process(self) -> Process:
        """Return a process that waits for a request; start one if there is none."""
        self._processes = {process for process in self._processes if process.returncode is None}
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        process = await Process.start([sys.executable, "-m", __name__])
        self._processes.add(process)
        is_ready = False
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await process.receive()
            is_ready = True
        except (TimeoutError, EOFError) as error:
            count_timeout("the start of a text process", "it loads its libraries", START_LIMIT_S)
            raise TextProcessesBusy(f"a text process did not start within {START_LIMIT_S:g} s") from error
        finally:
            if not is_ready:
                process.kill()
        return process


class Process:
    """A program that answers requests on its standard input.

    It is started in a thread: uvloop would fork this process, which takes 50 ms and more where it has much memory.
    """

    def __init__(
        self, program: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take a program whose standard input and output are one connection."""
        self._program, self._reader, self._writer = program, reader, writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> Process:
        """Start a program."""
        starting = asyncio.ensure_future(asyncio.to_thread(_started, command))
        try:
            program, sock = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_unused)
            raise
        return cls(program, *await asyncio.open_connection(sock=sock))

    @property
    def returncode(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._program.poll()

    def kill(self) -> None:
        """End it now."""
        self._program.kill()
        self._writer.close()

    async def wait(self) -> None:
        """Wait until it has ended."""
        await asyncio.to_thread(self._program.wait)

    async def exchange(self, request: Sequence[bytes]) -> dict[str, Any]:
        """Return the answer to a request in parts."""
        n_bytes = sum(map(len, request))
        parts = [n_bytes.to_bytes(4, "big"), *request]
        for part in [b"".join(parts)] if n_bytes <= SMALL_BODY_BYTES else parts:  # each is a call of the system
            send(self._writer, part)
            await self._writer.drain()
        return await self.receive()

    async def receive(self) -> dict[str, Any]:
        """Return the next answer."""
        n_bytes = int.from_bytes(await self._reader.readexactly(4), "big")
        unpacker = unpacker_of(n_bytes)
        while n_bytes:
            if not (part := await self._reader.read(n_bytes)):
                raise EOFError("the process ended within an answer")
            unpacker.feed(part)
            n_bytes -= len(part)
        await let_others_run()  # a large value takes long
        answer: dict[str, Any] = unpacker.unpack()
        return answer


def _end_unused(starting: asyncio.Future[tuple[subprocess.Popen[bytes], socket.socket]]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        program, sock = starting.result()
        program.kill()
        sock.close()


def _started(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    environment = {**environment_without_settings(), "TOKENIZERS_PARALLELISM": "false"}
    with theirs:
        end = theirs.fileno()
        return subprocess.Popen(command, stdin=end, stdout=end, env=environment), ours  # noqa: S603 - our own


# --- in the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests on standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal; the manager ends this process
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    models: OrderedDict[str, ModelFiles] = OrderedDict()
    n_bytes_with_models = _memory_bytes()
    _send(sys.stdout.buffer, {})  # it has started
    while head := sys.stdin.buffer.read(4):
        request = unpacked_value(sys.stdin.buffer.read(int.from_bytes(head, "big")))
        signal.alarm(int(2 * LIMIT_S))  # ends this process if the manager has died
        try:
            if "json" in request:
                answer: dict[str, Any] = {"result": parse_json(request["json"])}
            else:
                if request["model"] not in models:
                    models[request["model"]] = _loaded(request["model"])
                    n_bytes_with_models = _memory_bytes()
                answer = {"result": process_request(models[request["model"]], request)}
        except (TokenizationError, InvalidJson) as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"more than {MAX_MEMORY_BYTES >> 30} GiB of memory are needed: shorten the request"}
        request.clear()
        while len(models) > MODELS_CACHED:
            models.popitem(last=False)
        answer["ends"] = _memory_bytes() > n_bytes_with_models + MAX_GROWTH_BYTES
        signal.alarm(0)
        _send(sys.stdout.buffer, answer)


def _loaded(name: str) -> ModelFiles:
    try:
        return load_model_files(name)
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        # The manager takes the end of this process for that of a request that needs too much memory.
        reason = f"{type(error).__name__}: {error}"
        raise TokenizationError(f"the files of model {name} cannot be read ({reason}): correct them") from error


def process_request(files: ModelFiles, request: Mapping[str, Any]) -> list[bytes] | bytes | str | dict[str, Any]:
    """Return tokens of texts, the text or the tokens of a conversation, or the fields of the model's `CallStyle`.

    Raises:
        TokenizationError: they cannot be tokenized or rendered.

    """
    if "messages" in request:
        if files.chat_template is None:
            raise TokenizationError(f"model {files.name} has no chat template")
        options = TemplateOptions(*(request[name] for name in TemplateOptions._fields))
        text = files.chat_template.render(request["messages"], options)
        if len(text) > MAX_TEXT_CHARACTERS:
            raise TokenizationError(f"the chat template renders {len(text)} characters: shorten the messages")
        return _encoded(files, text, add_special_tokens=False) if "encodes" in request else text
    if "call_style" in request:
        return asdict(call_style_of(files))
    return [_encoded(files, text, add_special_tokens=request["add_special_tokens"]) for text in request["texts"]]


def _encoded(files: ModelFiles, text: str, *, add_special_tokens: bool) -> bytes:
    if files.tokenizer is None:
        raise TokenizationError(f"model {files.name} has no tokenizer")
    return pack(files.tokenizer.encode(text, add_special_tokens=add_special_tokens), I32)


def _send(file: BinaryIO, answer: Mapping[str, Any]) -> None:
    body = packed_value(answer)
    file.write(len(body).to_bytes(4, "big") + body)
    file.flush()


def _memory_bytes() -> int:
    """Return this process's resident memory; its highest where the system does not tell the present one."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


if __name__ == "__main__":
    main()
