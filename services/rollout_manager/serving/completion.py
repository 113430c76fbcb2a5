"""Completion requests as groups for the fleet, and their tokens as response bodies.

Consumes: parsed requests, and the chunks of their groups from `CompletionWaiters`.
Produces: one `GroupRequested` a prompt, and one more if it is scored, response bodies or server-sent events, and saved
conversation turns.
Waits for: the next chunk, in `CompletionWaiters.follow`, which the manager's loop wakes.
Ends when: all completions of the request have ended, a client disconnects, or no more tokens will come.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import structlog

from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.serving.answers import Choice, Delta, PromptLogprobs, ResponseFormatter
from rlboost.services.rollout_manager.serving.schemas import (
    ChatBody,
    CompletionBody,
    error_object,
    openai_problem,
    unavailable,
)
from rlboost.services.rollout_manager.serving.sessions import Sessions, SessionTurn
from rlboost.services.rollout_manager.serving.structured import grammar, has_json_arguments
from rlboost.services.rollout_manager.serving.text import Conversations, ServedModel, Turn
from rlboost.services.rollout_manager.serving.tools import CallReader, call_ids
from rlboost.services.rollout_manager.waiters import (
    CompletionChunk,
    CompletionFailed,
    CompletionUnavailable,
    Waiter,
)
from rlboost.shared.errors import BusUnavailable, Fenced
from rlboost.shared.http.access import SYSTEM, Principal
from rlboost.shared.http.problem import Problem
from rlboost.shared.ids import MAX_REQUESTS, request_group
from rlboost.shared.messages import GroupRequested, Sampling, SamplingOption
from rlboost.shared.model.tool_calls import HERMES, CallStyle, opens_thought
from rlboost.shared.process.stalls import let_others_run
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Op
from rlboost.shared.wire import I32, MAX_SAMPLE_BYTES, TOP, ints, length, pack, unpack

log = structlog.get_logger(__name__)

MAX_SAMPLES_IN_FLIGHT = 1024
"""Samples of clients in flight, of all jobs; beyond it, requests are rejected with 429."""
KEEP_ALIVE = ": keep-alive\n\n"
"""A server-sent event without content."""
TOKENS_OF_TAG = 32
"""Tokens at the end of a prompt that show whether it opens a thought: a tag may have one for each character."""
RESERVED_SAMPLES = 64
"""Further samples that only clients with the system token may request."""


@dataclass(slots=True, eq=False)
class Completion:
    """One client's request with its prompts as tokens: `start` it, then `collect` or `stream` the response."""

    manager: Manager
    conversations: Conversations
    limit_s: float
    """The fleet ends what takes longer."""
    body: CompletionBody | ChatBody
    job: Job
    model: ServedModel
    prompts: list[bytes]
    """Columns of token ids."""
    principal: Principal
    """Who sent it."""
    idempotency_key: str | None = None
    """With a key, the client may disconnect and request the same completion again."""
    turn: Turn | None = None
    """The turn of a conversation."""
    style: CallStyle | None = None
    """How the model writes tool calls; None to leave calls in the text."""
    session: SessionTurn | None = None
    """The turn of a trainable session."""
    sessions: Sessions | None = None
    """Set with `session`."""
    _grammar: str = ""
    """What the answer must be; empty for any text."""
    _response: ResponseFormatter = field(init=False)
    _waiters: list[Waiter] = field(default_factory=list)
    """One for each prompt, then one for each of `_scored`."""
    _choices: list[Choice] = field(default_factory=list)
    """The choices of the first prompt, then those of the next."""
    _scored: list[int] = field(default_factory=list)
    """The prompts that are scored: a first token has no log-probability."""
    _scores: list[PromptLogprobs] = field(default_factory=list)
    """One for each prompt."""
    _deltas: list[Delta] = field(default_factory=list)
    """All deltas so far of a conversation's turn."""

    async def start(self) -> None:
        """Request the completions from the fleet.

        Raises:
            Problem: the request is invalid, conflicts with another one, or cannot be accepted now.

        """
        self._grammar = self._required_form()
        if self._prompt_logprobs is not None:
            self._scored = [i for i, prompt in enumerate(self.prompts) if length(prompt) > 1]
        if isinstance(self.body, CompletionBody):
            given = zip(self.prompts, self.body.prompt, strict=True)
            self._scores = [PromptLogprobs(self.model, self.body, *prompt) for prompt in given]
        self._validate()
        self._check_options()
        if not self.model.has_tokenizer:
            self.body = self.body.model_copy(update={"return_token_ids": True})  # there is no text to return
        if self.session is not None:
            groups = [self.session.request]
            self._waiters = await self._open_turn(self.session)
        else:
            groups = [*map(self._group, range(len(self.prompts))), *self._scoring()]
            self._waiters = await self._register(groups)
        of_choice = [prompt for prompt in self.prompts for _ in range(self.body.n)]
        self._choices = [
            Choice(i, self.model, prompt, self.body, self._call_reader(prompt, f"{groups[0].group}/{i}"))
            for i, prompt in enumerate(of_choice)
        ]
        self._response = ResponseFormatter(self.body, groups[0].group, self.job.id, self.prompts)

    async def collect(self) -> dict[str, Any]:
        """Return the whole response.

        Raises:
            Problem: the completions will not come.

        """
        collected: dict[int, Delta] = {}
        try:
            async with aclosing(self._generated()) as deltas:
                async for delta in deltas:
                    if delta is not None:
                        earlier = collected.get(delta.index)
                        collected[delta.index] = earlier.merged(delta) if earlier else delta
        except (CompletionUnavailable, CompletionFailed) as error:
            raise _problem_of(error) from error
        if self.body.max_tokens == 0:
            nothing = {i: Delta(i, "", [], [], [], [], [], "length") for i in collected}
            response = self._response.response([nothing[i] for i in sorted(nothing)], 0)
        else:
            response = self._response.response([collected[i] for i in sorted(collected)], self._n_tokens)
        if isinstance(self.body, CompletionBody) and (self.body.echo or self._prompt_logprobs is not None):
            for choice in response["choices"]:
                scores = self._scores[choice["index"] // self.body.n]
                choice.update(scores.echoed(choice) if self.body.echo else scores.fields)
                await let_others_run()  # its prompt may be long
        return response

    async def chunks(self) -> AsyncGenerator[dict[str, Any] | None]:
        """Yield the chunks of a streamed response; None while there is nothing new.

        Raises:
            Problem: the rest of the completions will not come.

        """
        started = set[int]()
        try:
            async with aclosing(self._generated()) as deltas:
                async for delta in deltas:
                    if delta is None:
                        yield None
                        continue
                    for part in delta.parts():
                        yield self._response.chunk(part, first=part.index not in started)
                        started.add(part.index)
        except (CompletionUnavailable, CompletionFailed) as error:
            raise _problem_of(error) from error
        except Exception as error:
            log.exception("stream_failed", job_id=self.job.id)
            raise openai_problem(
                500, "Internal error", "the stream failed: see 'stream_failed' in the manager's log"
            ) from error
        if usage := self._response.usage_chunk(self._n_tokens):
            yield usage

    async def stream(self) -> AsyncGenerator[str]:
        """Yield the response as server-sent events; an error is the last event."""
        try:
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    yield KEEP_ALIVE if chunk is None else _event(chunk)
        except Problem as problem:
            yield _event({"error": error_object(problem)})
            return
        yield "data: [DONE]\n\n"

    def close(self) -> None:
        """Stop waiting for it, if a response has not: one that its client left early never began."""
        self._unregister(self._waiters)

    def _call_reader(self, prompt: bytes, answer: str) -> CallReader | None:
        """Return a reader of the tool calls in an answer, None if none are to be read."""
        if self.style is None or not isinstance(self.body, ChatBody):
            return None
        return CallReader(
            self.style,
            self.body.callable_tools,
            call_ids(answer),
            in_thought=not self.body.must_call
            and opens_thought(self.model.decode_raw(ints(prompt[-TOKENS_OF_TAG * I32.itemsize :]))),
            only_first=not self.body.parallel_tool_calls,
        )

    @property
    def _n_tokens(self) -> int:
        """Return the number of tokens of all choices so far."""
        return sum(choice.n_tokens for choice in self._choices)

    # --- the request ---

    def _validate(self) -> None:
        """Reject what cannot be generated: raise a `Problem` that names the field."""
        body, files = self.body, self.model.files
        param = "prompt" if isinstance(body, CompletionBody) else "messages"
        for i, prompt in enumerate(self.prompts):
            if found := _invalid_prompt(prompt, self.model):
                title, detail = found
                where = f"prompt {i}: " if len(self.prompts) > 1 else ""
                raise openai_problem(400, title, where + detail, param=param)
        requested, n_prompt = body.requested_tokens, max(map(length, self.prompts))
        if requested is not None and files.max_len is not None and n_prompt + requested > files.max_len:
            detail = (
                f"this model's maximum context length is {files.max_len} tokens, and you requested {requested} output "
                f"tokens after a prompt of {n_prompt}: request {files.max_len - n_prompt} at most"
            )
            is_chat = isinstance(body, ChatBody) and body.max_completion_tokens
            field_name = "max_completion_tokens" if is_chat else "max_tokens"
            raise openai_problem(400, "Context length exceeded", detail, param=field_name)
        self._validate_size(param)
        if body.stops and not self.model.has_tokenizer:
            detail = "the manager has no tokenizer of this model, which stop strings need: give stop_token_ids"
            raise openai_problem(400, "Invalid stop", detail, param="stop")
        if files.vocab_size is not None and body.logit_bias and body.logit_bias[-1][0] >= files.vocab_size:
            detail = f"logit_bias: token id {body.logit_bias[-1][0]} is outside the model's 0..{files.vocab_size - 1}"
            raise openai_problem(400, "Invalid value", detail, param="logit_bias")
        if body.min_tokens > (shortest := min(map(self._max_tokens, self.prompts))):
            detail = f"min_tokens: {body.min_tokens} are more than the {shortest} tokens that a completion may have"
            raise openai_problem(400, "Invalid value", detail, param="min_tokens")
        has_end = bool(files.stop_token_ids or body.stop_token_ids)
        if self._grammar and (body.ignore_eos or body.min_tokens or not has_end):
            param = self._field_of("grammar")
            detail = "leave out ignore_eos and min_tokens" if has_end else "the model has none"
            detail = f"{param}: a structured output ends with a stop token: {detail}"
            raise openai_problem(400, "Invalid value", detail, param=param)

    def _validate_size(self, param: str) -> None:
        """Reject too many samples, and too many log-probabilities, as `_validate` does."""
        n_samples, n_scored = len(self.prompts) * self.body.n, len(self._scored)
        if n_samples + n_scored > MAX_SAMPLES_IN_FLIGHT:
            what = f"{n_samples} completions{f' and {n_scored} prompts to score' if n_scored else ''}"
            detail = f"{what} in one request: at most {MAX_SAMPLES_IN_FLIGHT} are possible"
            raise openai_problem(400, "Too many completions", detail, param=param)
        n_tokens = max(map(self._max_tokens, self.prompts)) * n_samples
        n_prompt = sum(map(length, self.prompts)) * self.body.n  # each choice has those of its prompt
        for name, n in (
            (self._field_of("top_logprobs"), n_tokens * self.body.n_top_logprobs),
            (self._field_of("forced"), 0 if self._prompt_logprobs is None else n_prompt * (1 + self._prompt_logprobs)),
        ):
            if (most := n * TOP.itemsize) > MAX_SAMPLE_BYTES:
                limit = f"{MAX_SAMPLE_BYTES >> 20} MiB is the limit of a request"
                detail = f"{name}: up to {most >> 20} MiB, and {limit}: request fewer, or fewer tokens"
                raise openai_problem(400, "Invalid value", detail, param=name)

    def _field_of(self, option: SamplingOption) -> str:
        """Return the field that asks for an option."""
        if isinstance(self.body, CompletionBody):
            if option == "forced" or (option == "top_logprobs" and not self.body.logprobs):
                return "echo" if self.body.echo else "prompt_logprobs"
            return "logprobs" if option == "top_logprobs" else option
        if option != "grammar":
            return option
        if self.body.must_call:
            return "tool_choice"
        return "response_format" if self.body.structured_outputs is None else "structured_outputs"

    def _required_form(self) -> str:
        """Return the grammar of the answer; raises a `Problem` if none can guarantee what is requested."""
        if not isinstance(self.body, ChatBody):
            return ""
        form, style = self.body.form_of_answer, self.style
        if form is None and not self.body.must_call:
            return ""
        if style is not None and not has_json_arguments(style):
            param = self._field_of("grammar")
            advice = "tool_choice, or give 'auto'" if self.body.must_call else f"{param} or the tools"
            detail = f"{param}: no grammar is known for this model's tool calls: leave out {advice}"
            raise openai_problem(400, "Unsupported value", detail, param=param)
        return grammar(None if self.body.must_call else form, self.body.callable_tools, style or HERMES)

    def _check_options(self) -> None:
        """Reject what no worker of the job supports: a `Problem` that names the field."""
        requested = [self._sampling(self.prompts[0]), *(group.sampling for group in self._scoring())]
        options = frozenset[SamplingOption]().union(*(sampling.options for sampling in requested))
        workers = self.manager.world.fleet.workers.values()
        # One without weights has no engine yet, and may support all of them.
        engines = [
            worker for worker in workers if self.job.id in (worker.job_id, *worker.alongside) and worker.version >= 0
        ]
        missing = min((options - worker.sampling_options for worker in engines), key=len, default=frozenset())
        for option in sorted(missing):
            param = self._field_of(option)
            advice = "install xgrammar on workers, or leave it out" if option == "grammar" else "leave it out"
            detail = f"{param}: no worker of this job supports it: {advice}"
            raise openai_problem(400, "Unsupported parameter", detail, param=param)

    def _max_tokens(self, prompt: bytes) -> int:
        """Return the number of tokens of a prompt's completion: as many as requested, or else up to a default."""
        if self.body.requested_tokens is not None:
            return self.body.requested_tokens
        default = self.body.max_tokens if isinstance(self.body, CompletionBody) else self.job.spec.sampling.max_tokens
        max_len = self.model.files.max_len
        return default if max_len is None else min(default, max_len - length(prompt))

    def _sampling(self, prompt: bytes) -> Sampling:
        body = self.body
        stop_token_ids = () if body.ignore_eos else self.model.files.stop_token_ids
        return Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            max_tokens=self._max_tokens(prompt),
            stop_token_ids=tuple(sorted({*stop_token_ids, *body.stop_token_ids})),
            top_k=body.top_k,
            min_p=body.min_p,
            min_tokens=body.min_tokens,
            logit_bias=body.logit_bias,
            top_logprobs=body.n_top_logprobs,
            grammar=self._grammar,
        )

    @property
    def _prompt_logprobs(self) -> int | None:
        return self.body.n_prompt_logprobs if isinstance(self.body, CompletionBody) else None

    def _scoring(self) -> list[GroupRequested]:
        """Return the groups whose samples are the prompts themselves, from the second token on, to score them."""
        groups = []
        for i in self._scored:
            prompt, given = self.prompts[i][: I32.itemsize], self.prompts[i][I32.itemsize :]
            sampling = Sampling(
                max_tokens=length(given), whole_logprobs=True, top_logprobs=self._prompt_logprobs or 0, forced=given
            )
            changes = {"n": 1, "prompt": prompt, "sampling": sampling}
            groups.append(self._group(i, "prompt/").model_copy(update=changes))
        return groups

    def _group(self, index: int, what: str = "") -> GroupRequested:
        """Return the group of one of the prompts."""
        body, job, files, key = self.body, self.job, self.model.files, self.idempotency_key
        number = secrets.randbelow(MAX_REQUESTS) if key is None else _hashed(f"{what}{index}/{key}") % MAX_REQUESTS
        group = request_group(job.no, number)
        seed = number if body.seed is None else body.seed
        return GroupRequested(
            job_id=job.id,
            group=group,
            n=body.n,
            prompt=self.prompts[index],
            sampling=self._sampling(self.prompts[index]),
            version=self.manager.world.jobs.committed_version(job.id),
            # A sample is drawn by the sum of this and its id: the same seed gives the same tokens under any id.
            seed=(_hashed(str(seed)) - group) & 0x7FFF_FFFF_FFFF_FFFF,
            expires_at=time.time() + self.limit_s,
            preferred_worker=self.turn.preferred_worker if self.turn else "",
            vocab_size=files.vocab_size or 0,
        )

    async def _register(self, groups: Sequence[GroupRequested]) -> list[Waiter]:
        """Register waiters and request the groups that no earlier try has requested, if there are not too many."""
        manager, waiters = self.manager, self.manager.completion_waiters
        registered, new = [], []
        for group in groups:
            known = manager.world.ledger.samples.get(group.group)
            if known is None:
                if manager.world.is_known(group):
                    raise openai_problem(409, "Just ended", "an earlier try has just ended: try again")
                new.append(group)
            elif not _is_same(known.request, group):
                detail = "another request with this Idempotency-Key is in flight: use a new key"
                raise openai_problem(409, "Key in use", detail)
            registered.append(known.request if known else group)
        limit = MAX_SAMPLES_IN_FLIGHT + (RESERVED_SAMPLES if self.principal == SYSTEM else 0)
        if new and waiters.n_samples + sum(group.n for group in new) > limit:
            detail = f"{waiters.n_samples} completions of at most {limit} are in flight: try again"
            raise openai_problem(429, "Too many requests", detail, headers={"Retry-After": "1"})
        resumable = self.idempotency_key is not None
        ours = waiters.register(registered, manager.world, resumable=resumable, whole=self._is_whole)
        try:
            if new:
                await manager.write([Append(names.rollouts_requested(group.job_id), group) for group in new])
        except (Fenced, BusUnavailable) as error:
            self._unregister(ours)
            raise unavailable(error) from error
        return ours

    async def _open_turn(self, turn: SessionTurn) -> list[Waiter]:
        """Open a turn of a session, unless it is open, and wait for it."""
        waiters, world = self.manager.completion_waiters, self.manager.world
        ours = waiters.register([turn.request], world, resumable=True, whole=self._is_whole)
        try:
            if turn.ops:
                await self.manager.write(turn.ops)
            if turn.end is None and self.sessions is not None and not any(_requests(op) for op in turn.ops):
                turn.end = await self.sessions.end(turn)  # it may have ended before this call waited for it
        except (Fenced, BusUnavailable) as error:
            self._unregister(ours)
            raise unavailable(error) from error
        if turn.end is not None:
            ours[0].end(turn.end)
        return ours

    @property
    def _is_whole(self) -> bool:
        """Return True if nothing is to be done before a completion has ended."""
        return not self.body.stream and not self.body.stops

    def _unregister(self, waiters: Sequence[Waiter]) -> None:
        for waiter in waiters:
            self.manager.completion_waiters.unregister(waiter)

    # --- its tokens ---

    async def _generated(self) -> AsyncGenerator[Delta | None]:
        try:
            async with aclosing(self.manager.completion_waiters.follow(self._waiters)) as chunks:
                async for found in chunks:
                    yield None if found is None else await self._delta(*found)
        finally:
            self._unregister(self._waiters)

    async def _delta(self, prompt: int, chunk: CompletionChunk) -> Delta | None:
        waiter = self._waiters[prompt]
        if (n := prompt - len(self.prompts)) >= 0:
            self._scores[self._scored[n]].add(chunk)
            return None
        delta = self._choices[prompt * waiter.request.n + chunk.member].add(chunk)
        if self.turn is not None or self.session is not None:
            self._deltas.append(delta)
            if delta.finish:
                await self._save_turn(chunk.worker)
        if delta.finish and not chunk.finish:  # it ended at a stop string
            self.manager.completion_waiters.complete(self._waiters, prompt, chunk.member)
        return delta

    async def _save_turn(self, worker: str) -> None:
        """Store a turn before the client receives its end, so that the next turn finds it."""
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(delta.text for delta in self._deltas)}
        if calls := [call.public() for delta in self._deltas for call in delta.calls]:
            answer["tool_calls"] = calls
        completion = pack([token for delta in self._deltas for token in delta.tokens], I32)
        try:
            if self.turn is not None:
                await self.conversations.save(self.turn, answer, completion, worker)
            if self.session is not None and self.sessions is not None:
                await self.sessions.save_answer(self.session, answer)
        except (Fenced, BusUnavailable) as error:
            raise CompletionUnavailable(f"the conversation could not be stored: {error}") from error


def _invalid_prompt(prompt: bytes, model: ServedModel) -> tuple[str, str] | None:
    """Return title and text of the error about a prompt that the model does not take; None if it takes it."""
    files, n_tokens = model.files, length(prompt)
    if not prompt:
        return "Invalid prompt", "the prompt has no tokens"
    if files.max_len is not None and n_tokens >= files.max_len:
        detail = f"a prompt of {n_tokens} tokens leaves none for a completion: the model takes {files.max_len}"
        return "Context length exceeded", detail
    if files.vocab_size is not None and (highest := int(unpack(prompt, I32).max())) >= files.vocab_size:
        return "Invalid prompt", f"token id {highest} is outside the model's 0..{files.vocab_size - 1}"
    return None


def _problem_of(error: CompletionUnavailable | CompletionFailed) -> Problem:
    if isinstance(error, CompletionFailed):
        return openai_problem(
            400, "Cannot be generated", f"{error}: change the request, or its model if the job has ended"
        )
    return unavailable(error)


def _requests(op: Op) -> bool:
    return isinstance(op, Append) and isinstance(op.message, GroupRequested)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _is_same(one: GroupRequested, other: GroupRequested) -> bool:
    return (one.n, one.prompt, one.sampling, one.seed) == (other.n, other.prompt, other.sampling, other.seed)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
