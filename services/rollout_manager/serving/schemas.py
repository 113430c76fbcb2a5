"""OpenAI's request bodies and errors, as far as the fleet supports them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)

from rlboost.services.rollout_manager.serving.structured import check_tools, form_of_response_format, form_of_vllm
from rlboost.services.rollout_manager.serving.tools import tools_of_request
from rlboost.shared.data.messages import ASSISTANT, template_kwargs_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.server import ErrorFormat
from rlboost.shared.messages import MAX_TOP_LOGPROBS
from rlboost.shared.validation import describe
from rlboost.shared.wire import I32, pack

# --- errors -----------------------------------------------------------------------------------------------------------
#
# The format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.


ROUTES = (
    "of OpenAI's API, this server has GET /v1/models, GET /v1/models/{model}, and POST /v1/completions, "
    "/v1/chat/completions and /v1/responses; of Anthropic's, POST /v1/messages and /v1/messages/count_tokens"
)

_WITHOUT_VERSION = ("/completions", "/chat/completions", "/responses", "/models")
"""What clients request whose base URL lacks the version."""


def openai_problem(
    status: int, title: str, detail: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Problem:
    """Return an error that names the request's field `param`; its code is the title in snake case."""
    return Problem(status, title, detail, headers=headers, error=_error(status, title, detail, param))


def unavailable(error: Exception) -> Problem:
    """Return the error of a request that may succeed a moment later."""
    return openai_problem(503, "Unavailable", f"{error}: try again", headers={"Retry-After": "1"})


def invalid_value(param: str, detail: str) -> Problem:
    """Return the error of a field with a value that is not supported."""
    return openai_problem(400, "Invalid value", detail, param=param)


def require_defaults(
    given: Mapping[str, Any], defaults: Mapping[str, Sequence[Any]], advice: Mapping[str, str] | None = None
) -> None:
    """Check that fields without support have a value that changes nothing.

    Args:
        given: the fields.
        defaults: field -> its values that are accepted, none by default.
        advice: field -> what to do instead of removing it.

    Raises:
        Problem: 400, naming the first field with another value.

    """
    for name, value in given.items():
        accepted = defaults.get(name, ())
        if value not in accepted:
            only = f", except for {' or '.join(map(json.dumps, accepted))}" if accepted else ""
            raise invalid_value(name, f"{name}: not supported{only}: {(advice or {}).get(name, 'remove it')}")


def error_object(problem: Problem) -> dict[str, Any]:
    """Return the content of an error's `error`."""
    return dict(problem.extra.get("error") or _error(problem.status, problem.title, problem.detail))


def openai_error_format(own_paths: Collection[str]) -> ErrorFormat:
    """Return a function that gives errors this format on all routes below `/v1`, known or not, but RLBoost's own.

    Args:
        own_paths: the first part of the path of each of RLBoost's own routes below `/v1`, such as `jobs`.

    """

    def format_error(method: str, path: str, document: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if document["status"] in {404, 405} and path.rstrip("/") in _WITHOUT_VERSION:
            detail = f"{method} {path} is not supported: end the client's base_url with /v1, for {method} /v1{path}"
            return 404, {"error": _error(404, "Unknown URL", detail)}
        version, _, rest = path.strip("/").partition("/")
        if version != "v1" or rest.partition("/")[0] in own_paths:
            return None
        status, title, detail = document["status"], document["title"], document["detail"]
        if status == 401:
            title = "Invalid API key"
        elif "error" not in document and status in {404, 405}:
            title = "Unknown URL"
            detail = f"{method} {path} is not supported: {ROUTES}"
            if rest.startswith("v1/"):
                detail = (
                    f"{method} {path} is not supported: leave /v1 out of the client's base_url, for {method} /{rest}"
                )
        elif fields := document.get("errors"):
            status, detail = 400, "; ".join(f"{item['field']}: {item['error']}" for item in fields)
        error = document.get("error") or _error(status, title, detail)
        return status, {"error": error}

    return format_error


def _error(status: int, title: str, detail: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": detail, "type": kind, "param": param, "code": code_of(title)}


def code_of(title: str) -> str:
    """Return the code of errors with this title."""
    return title.lower().replace(" ", "_")


# --- unsupported fields -----------------------------------------------------------------------------------------------
#
# Fields of OpenAI's and vLLM's requests that the fleet does not support, and those that change no completion.


IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "stream_interval",
        "user",
    }
)
"""Fields that are accepted because they do not change the completion."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": (),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Unsupported field -> its values that mean the default behavior and are therefore accepted."""


def supported_fields(raw: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Return a body without null, ignored and default fields; `known` and unknown fields stay in it.

    Raises:
        Problem: 400, naming the first unsupported field.

    """
    given = {name: value for name, value in raw.items() if value is not None}  # null means the default
    unsupported = {name: defaults for name, defaults in UNSUPPORTED.items() if name not in known}
    for name, defaults in unsupported.items():
        if name in given and given[name] not in defaults:
            raise _unsupported(name, defaults)
    return {name: value for name, value in given.items() if name not in IGNORED and name not in unsupported}


def _unsupported(name: str, defaults: tuple[Any, ...]) -> Problem:
    if not defaults:
        return openai_problem(400, "Unsupported parameter", f"{name}: not supported: remove it", param=name)
    accepted = " or ".join(map(json.dumps, defaults))
    detail = f"{name}: not supported, except for the default {accepted}: remove it"
    return openai_problem(400, "Unsupported value", detail, param=name)


# --- bodies -----------------------------------------------------------------------------------------------------------


MAX_N = 128
MAX_STOPS = 16
MAX_BIAS = 100
MAX_BIASES = 1024
MAX_STOP_CHARACTERS = 1024
"""The end of a completion's text is compared with each beginning of a stop string, at each token."""

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Line = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def _prompts(value: object) -> list[str | bytes]:
    """Return the prompts: the value is one text, one list of token ids, or a list of them; token ids as a column."""
    if isinstance(value, str | bytes):
        return [_prompt(value)]
    if not isinstance(value, list) or not value:
        raise ValueError("should be text, a list of token ids, or a list of these, and not empty")
    if type(value[0]) is int:  # one list of token ids
        return [_prompt(value)]
    return [_prompt(prompt, f"entry {i} ") for i, prompt in enumerate(value)]


def _prompt(prompt: Any, entry: str = "") -> str | bytes:
    """Return one prompt; `entry` names its place in a list of several."""
    if not isinstance(prompt, str | bytes | list):
        # A TypeError would not become an error of the field.
        raise ValueError(f"{entry}is {reprlib.repr(prompt)}: should be text or a list of token ids")  # noqa: TRY004
    if not prompt:
        raise ValueError(f"{entry}is empty: give at least one character or token id")
    if isinstance(prompt, list):
        at = next((i for i, token in enumerate(prompt) if type(token) is not int or not 0 <= token < 1 << 31), None)
        if at is not None:
            where = (
                f"{entry}has {reprlib.repr(prompt[at])} as token {at}"
                if entry
                else (f"entry {at} is {reprlib.repr(prompt[at])}")
            )
            raise ValueError(f"{where}: should be a token id from 0 to 2147483647")
        return pack(prompt, I32)
    return prompt


def _template_kwargs(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} should be an object of arguments of the chat template")  # noqa: TRY004
    try:
        return template_kwargs_of(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _tool_choice(value: object) -> object:
    """Return 'none', 'auto', 'required', or the name of the function that must be called in a list of its own."""
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        name = value["function"].get("name") if isinstance(value.get("function"), dict) else None
        if isinstance(name, str):
            return [name]
    raise ValueError(
        f"{reprlib.repr(value)} should be 'none', 'auto', 'required' or "
        '{"type": "function", "function": {"name": NAME}}'
    )


def _top_k(value: object) -> object:
    return 0 if value == -1 else value


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} should be an object of token ids and biases")  # noqa: TRY004
    biases = {}
    for token, bias in value.items():
        if not token.isdecimal() or not token.isascii() or int(token) >= 1 << 31:
            raise ValueError(f"{reprlib.repr(token)} should be a token id, as text")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of {token} is {reprlib.repr(bias)}: should be from -{MAX_BIAS} to {MAX_BIAS}")
        biases[int(token)] = float(bias)
    if len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} token ids: at most {MAX_BIASES} are possible")
    return tuple(sorted(biases.items()))


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored."""


class _CompletionBase(_Body):
    """The fields that completions and chat completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Whether logprobs name a token by its id, `token_id:5`, in place of its text."""
    top_k: Annotated[int, Field(ge=0, lt=1 << 31), BeforeValidator(_top_k)] = 0
    """0: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0, le=1 << 24)
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias)] = ()
    """(Token id, bias), sorted."""

    @property
    def stops(self) -> Sequence[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(_CompletionBase):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | bytes], PlainValidator(_prompts)]
    """One prompt or more, each as text or as a column of token ids."""
    max_tokens: int = Field(16, ge=0, le=1 << 24)
    """0 only with `echo`."""
    echo: bool = False
    """Whether text and log-probabilities of a choice begin with those of its prompt."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """How many of the most likely tokens at each position are requested, besides the sampled one."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """The same for the positions of the prompt, besides its own tokens."""

    @property
    def has_logprobs(self) -> bool:
        """Return True if the log-probabilities of the sampled tokens are requested: 0 requests no others."""
        return self.logprobs is not None

    @property
    def n_top_logprobs(self) -> int:
        """Return how many of the most likely tokens at each position are requested."""
        return self.logprobs or 0

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Return how many of the most likely tokens of the prompt are requested, None if it is not to be scored."""
        return self.logprobs if self.echo else self.prompt_logprobs

    @property
    def requested_tokens(self) -> int | None:
        """Return the number of tokens that the client asks for, None if it leaves it to us.

        With 0 one is generated, and left out.
        """
        return max(self.max_tokens, 1) if "max_tokens" in self.model_fields_set else None


class TextPart(_Body):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    """Accepted and ignored, as in the Messages API."""


class ChatMessage(BaseModel):
    """One message; additional fields are passed to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Line
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template takes it, with the parts of its content joined to one text."""
        content = "".join(p.text for p in self.content) if isinstance(self.content, list) else self.content
        if content is None and self.role == ASSISTANT:
            content = ""  # of an answer with tool calls only, or without any text
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatBody(_CompletionBase):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: Annotated[dict[str, Any] | None, PlainValidator(form_of_response_format)] = None
    """What the answer must be, as a format of xgrammar; None for text."""
    structured_outputs: Annotated[dict[str, Any] | None, PlainValidator(form_of_vllm)] = None
    """The same, by vLLM's name for it."""
    tools: Annotated[list[dict[str, Any]], PlainValidator(tools_of_request)] = []
    """As the chat template takes them."""
    tool_choice: Annotated[str | list[str], PlainValidator(_tool_choice)] = "auto"
    """As in a request, or the name of the function to call in a list."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one tool call."""
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(_template_kwargs)] = {}
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """For a chat template that reads it, as in vLLM; agents send it to each model."""

    @property
    def has_logprobs(self) -> bool:
        """Return True if the log-probabilities of the sampled tokens are requested."""
        return self.logprobs

    @property
    def n_top_logprobs(self) -> int:
        """Return how many of the most likely tokens at each position are requested."""
        return self.top_logprobs

    @property
    def form_of_answer(self) -> dict[str, Any] | None:
        """Return the form that the answer must have, as a format of xgrammar; None for any text."""
        return self.response_format if self.response_format is not None else self.structured_outputs

    @property
    def must_call(self) -> bool:
        """Return True if the answer must be a tool call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call."""
        if isinstance(self.tool_choice, list):
            return [tool for tool in self.tools if tool["function"]["name"] in self.tool_choice]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def reads_calls(self) -> bool:
        """Return True if tool calls are read from the answers."""
        return bool(self.callable_tools)

    @property
    def requested_tokens(self) -> int | None:
        """Return the number of tokens that the client asks for, None if it leaves it to us."""
        return self.max_completion_tokens or self.max_tokens


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse_completion(raw: dict[str, Any]) -> CompletionBody:
    """Return the request in a body.

    Raises:
        Problem: 400, naming the first invalid field.

    """
    body = _parse(CompletionBody, raw)
    if body.stream and body.prompt_logprobs is not None:
        raise _conflict("prompt_logprobs", "they are not streamed: leave out stream")
    if body.stream and body.echo:
        raise _conflict("echo", "prompts are not streamed: leave out stream")
    if body.echo and body.prompt_logprobs is not None:
        raise _conflict("prompt_logprobs", "echo with logprobs has those of the prompt: leave it out")
    if not body.max_tokens and not body.echo:
        raise _conflict("max_tokens", "0 tokens need echo: give at least 1")
    return body


def parse_chat(raw: dict[str, Any]) -> ChatBody:
    """Return the request in a body; see `parse_completion`."""
    body = _parse(ChatBody, raw)
    if body.top_logprobs and not body.logprobs:
        raise _conflict("top_logprobs", "give logprobs: true with it")
    if body.must_call and not body.callable_tools:
        raise _conflict("tool_choice", "tools has no function that it allows")
    if body.structured_outputs is not None and body.response_format is not None:
        raise _conflict("structured_outputs", "give it or response_format, not both")
    if body.must_call or body.form_of_answer is not None:
        try:
            check_tools(body.callable_tools)
        except ValueError as error:
            raise _conflict("tools", str(error)) from error
    return body


def _conflict(param: str, detail: str) -> Problem:
    return openai_problem(400, "Invalid value", f"{param}: {detail}", param=param)


def _parse(body: type[Body], raw: dict[str, Any]) -> Body:
    try:
        return body.model_validate(supported_fields(raw, body.model_fields))
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        lines = [line for line in describe(error, body) if line.partition(":")[0].partition(".")[0] == field]
        raise openai_problem(400, "Invalid value", "; ".join(lines), param=field) from error
