"""The requests of an engine: which are queued and running, the tokens of each, when it ends, and the emissions.

Running requests fill the slots 0..n-1: index i of every array belongs to `requests[i]`. When a request ends, the last
one moves to its slot. Other per-slot state (the KV cache) must repeat the `SlotMoves` that the methods return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlboost.services.rollout_worker.domain.load import KvCapacity
from rlboost.services.rollout_worker.domain.requests import (
    NOT_A_NUMBER,
    Emission,
    PromptImages,
    Request,
    RequestKey,
    as_u64,
    finish_at_start,
    require_new,
    validation_error,
)
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_RELEASED, FINISH_STOP, SamplingOption
from rlboost.shared.wire import I32, RoutedShape, unpack

Ints = npt.NDArray[np.int64]

_SLOT_DTYPE = np.dtype(
    [
        ("seed", "u8"),
        ("prompt", "i8"),  # length of the prompt
        ("length", "i8"),  # of prompt and completion
        ("taken", "i8"),  # tokens before this position have been taken
        ("limit", "i8"),  # the length at which the request ends
        ("temperature", "f4"),
        ("top_p", "f8"),
        ("top_k", "i8"),
        ("min_p", "f8"),
        ("top_logprobs", "i8"),
        ("restricted", "?"),  # some tokens may not be drawn, or are drawn more or less often
        ("aborted", "?"),
    ],
    align=True,
)
NO_TOKEN = -1
"""Stands for no token."""
FORCED_TOKENS = 256
"""Maximum given tokens that are scored in one pass, which has logits and probabilities of each: bounds its memory. At
least one of each slot is."""


_MISMATCH = "its tokens so far do not match its grammar"
_RESTRICTING: frozenset[SamplingOption] = frozenset({"min_tokens", "logit_bias", "grammar", "forced"})


class Matcher(Protocol):
    """What a grammar allows after the tokens of one request."""

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance to the end of a completion, which continues the one before; return False if it does not match."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens [vocabulary] may follow; only stop tokens may at the end."""


class SlotMoves:
    """Copies that keep the slots dense: slot `sources[i]` goes to slot `targets[i]`; no slot is in both."""

    def __init__(self, ended: npt.NDArray[np.bool_]) -> None:
        """Plan the moves that fill the slots of ended requests; `ended` has one entry per running request."""
        n = int(np.count_nonzero(~ended))
        self.targets: Ints = np.flatnonzero(ended[:n])
        self.sources: Ints = n + np.flatnonzero(~ended[n:])

    def __bool__(self) -> bool:
        return self.targets.size > 0


class RequestTable:
    """The requests of one engine and their tokens. Not thread-safe.

    Args:
        slots: maximum number of running requests.
        max_len: maximum length of prompt and completion together.
        vocabulary: token ids are 0..vocabulary-1.
        capacity: limits of the KV cache; requests that do not fit are queued. None = unlimited.
        shape: shape of the model's routed experts; None if the engine does not return them.
        options: those that the engine supports; with "grammar", `set_grammar` must be called for each request with one,
            with "images" `set_images`.

    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        vocabulary: int,
        capacity: KvCapacity | None = None,
        shape: RoutedShape | None = None,
        options: Collection[str] = (),
    ) -> None:
        self.pending: deque[Request] = deque()
        self.requests: list[Request] = []
        self.version = -1
        self.job_versions: dict[str, int] = {}
        """Job -> version of its adapter, of an engine that holds several; other requests have `version`."""
        self.generated_total = 0
        self._slots = slots
        self._max_len = max_len
        self.vocabulary = vocabulary
        self.capacity = capacity
        # By position in prompt + completion. `empty`, not `zeros`: only memory that is written gets allocated.
        self._tokens = np.empty((slots, max_len), np.int32)
        self._logprobs = np.empty((slots, max_len), np.float32)
        self._slot_state = np.zeros(slots, _SLOT_DTYPE)
        self._stops = np.full((slots, 1), NO_TOKEN, np.int32)
        self._emissions: list[Emission] = []
        self._shape = shape
        self._routed: npt.NDArray[Any] | None = None
        """Experts of each position, [slots, max_len, layers, experts per token]; None until a request asks for them."""
        self.options = frozenset(options)
        """Those that the engine supports."""
        self._awaited: dict[RequestKey, set[str]] = {}
        """Queued requests that wait for `set_grammar` or `set_images`."""
        self._without_images: dict[RequestKey, str] = {}
        """Queued requests whose images cannot be had, and why."""
        self._matchers: dict[RequestKey, Matcher | str] = {}
        """Of requests with a grammar; text: why there is none."""
        self._top_logprobs: dict[RequestKey, bytearray] = {}
        """Of tokens that have not been taken; of requests that ask for them."""
        self.on_end: Callable[[Request, npt.NDArray[np.int32]], None] | None = None
        """Called with each running request that ends or was aborted, and its completion."""

    # --- model inputs: arrays [n], one entry per running request ------------------------------------------------------

    @property
    def n(self) -> int:
        """Number of running requests."""
        return len(self.requests)

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """Each slot's seed."""
        return self._slot_state["seed"][: self.n]

    @property
    def temperature(self) -> npt.NDArray[np.float32]:
        """Each slot's temperature."""
        return self._slot_state["temperature"][: self.n]

    @property
    def top_p(self) -> npt.NDArray[np.float64]:
        """Each slot's top-p."""
        return self._slot_state["top_p"][: self.n]

    @property
    def top_k(self) -> Ints:
        """Each slot's top-k; 0: all tokens."""
        return self._slot_state["top_k"][: self.n]

    @property
    def min_p(self) -> npt.NDArray[np.float64]:
        """Each slot's min-p."""
        return self._slot_state["min_p"][: self.n]

    @property
    def top_logprobs(self) -> Ints:
        """How many of the most likely tokens each slot's request asks for."""
        return self._slot_state["top_logprobs"][: self.n]

    @property
    def restricted(self) -> npt.NDArray[np.bool_]:
        """Whether each slot's request has a grammar, a logit bias, a minimum of tokens, or gives its tokens."""
        return self._slot_state["restricted"][: self.n]

    @property
    def jobs(self) -> list[str]:
        """The job whose adapter each slot needs."""
        return [request.job_id for request in self.requests]

    @property
    def is_batch_invariant(self) -> bool:
        """True if a running request asks for it."""
        return any(request.sampling.batch_invariant for request in self.requests)

    def allowed(self, slot: int) -> npt.NDArray[np.bool_] | None:
        """Return which tokens [vocabulary] the grammar of a slot allows next; None without one."""
        request = self.requests[slot]
        matcher = self._matchers.get(request.key)
        if matcher is None or isinstance(matcher, str):
            return None
        if not matcher.accept(self.tokens(slot)[len(request.prompt) :].tolist()):
            self._matchers[request.key] = _MISMATCH  # `commit` ends it
            return None
        allowed = matcher.allowed()
        if not allowed.any():
            self._matchers[request.key] = "its grammar allows none of the model's tokens"
        return allowed

    @property
    def positions(self) -> Ints:
        """Position of each slot's last token, the next input of the model."""
        positions: Ints = self._slot_state["length"][: self.n] - 1
        return positions

    @property
    def last_tokens(self) -> Ints:
        """Each slot's last token."""
        return self._tokens[np.arange(self.n), self.positions].astype(np.int64)

    @property
    def offsets(self) -> Ints:
        """Offset within the completion of each slot's next token."""
        offsets: Ints = self._slot_state["length"][: self.n] - self._slot_state["prompt"][: self.n]
        return offsets

    def tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a slot's prompt and completion."""
        tokens: npt.NDArray[np.int32] = self._tokens[slot, : self._slot_state["length"][slot]]
        return tokens

    def completion(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a slot's completion."""
        return self.tokens(slot)[self._slot_state["prompt"][slot] :]

    def forced_drafts(self) -> list[list[int]] | None:
        """Return the given tokens that may follow each slot's next one in a pass; None to decode one token of each."""
        slots = [slot for slot, request in enumerate(self.requests) if request.sampling.forced]
        if not slots or self.is_batch_invariant:
            return None
        each, room, offsets = max(0, FORCED_TOKENS // len(slots) - 1), self.room, self.offsets
        drafts: list[list[int]] = [[] for _ in range(self.n)]
        for slot in slots:
            given, start = unpack(self.requests[slot].sampling.forced, I32), int(offsets[slot])
            drafts[slot] = given[start : start + min(each, int(room[slot]))].tolist()
        return drafts

    @property
    def room(self) -> Ints:
        """How many tokens after its next one each slot may get."""
        room: Ints = self._slot_state["limit"][: self.n] - self._slot_state["length"][: self.n] - 1
        return room

    def prompts(self) -> dict[int, list[int]]:
        """Return the prompt of each sample with a running or queued request."""
        return {request.sample: request.prompt for request in (*self.requests, *self.pending)}

    def prefix(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a slot except its last one."""
        return self.tokens(slot)[:-1]

    # --- admission ----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            Conflict: a request with the same key is queued or running; none was taken.

        """
        require_new(requests, {request.key for request in (*self.pending, *self.requests)})
        self.pending.extend(requests)
        for request in requests:
            if awaited := request.sampling.options & self.options & {"grammar", "images"}:
                self._awaited[request.key] = {*awaited}

    def set_grammar(self, key: RequestKey, matcher: Matcher | str) -> None:
        """Let a queued request start with its grammar, or end with why there is none; ignored if it has ended."""
        if self._arrived(key, "grammar"):
            self._matchers[key] = matcher

    def set_images(self, key: RequestKey, images: PromptImages | str) -> None:
        """Let a queued request start with its images, or end with why there are none; ignored if it has ended."""
        if not self._arrived(key, "images"):
            return
        if isinstance(images, str):
            self._without_images[key] = images
        else:
            self.pending = deque(replace(one, images=images) if one.key == key else one for one in self.pending)

    def _arrived(self, key: RequestKey, what: str) -> bool:
        """Let a queued request wait no longer for something; return True if it did."""
        awaited = self._awaited.get(key, set())
        did = what in awaited
        awaited.discard(what)
        if not awaited:
            self._awaited.pop(key, None)
        return did

    @property
    def is_idle(self) -> bool:
        """True if no request runs or can start."""
        return self.n == 0 and len(self.pending) <= len(self._awaited)

    def _next(self) -> Request | None:
        """Return the queued request that starts next."""
        return next((request for request in self.pending if request.key not in self._awaited), None)

    def admit(self, budget_tokens: int) -> range:
        """Admit queued requests into free slots, which are returned; end those with nothing to generate.

        Requests are admitted in order of submission, but for those without their grammar or images: while the first one
        does not fit, all are queued.

        Args:
            budget_tokens: stop once the admitted prefixes, equal ones counted once, have this many tokens.

        """
        first = self.n
        prefixes: set[bytes] = set()
        while self.n < self._slots and budget_tokens > 0 and (request := self._next()) and self._fits(request):
            self.pending.remove(request)
            ids = np.array(request.prompt + request.tokens, np.int64)
            if request.images is not None:
                ids[: len(request.prompt)] = request.images.ids
            error, finish = self._validation_error(request), finish_at_start(request)
            if error or finish:
                self._matchers.pop(request.key, None)
                self._emissions.append(request.emission_without_tokens(self._version_of(request), finish, error))
                continue
            self._start(request, ids)
            prefix = ids[:-1].tobytes()
            budget_tokens -= 0 if prefix in prefixes else ids.size
            prefixes.add(prefix)
        return range(first, self.n)

    def _limit(self, request: Request) -> int:
        """Return the maximum length of a request's prompt and completion."""
        return min(len(request.prompt) + request.sampling.max_tokens, self._max_len)

    def _fits(self, request: Request) -> bool:
        """Return True if a request fits next to the running ones, or never fits."""
        if self.capacity is None or not self.capacity.fits(1, self._limit(request)):
            return True
        longest = int(self._slot_state["limit"][: self.n].max(initial=self._limit(request)))
        return self.capacity.fits(self.n + 1, longest)

    def _validation_error(self, request: Request) -> str:
        if error := validation_error(request, self._max_len, self.vocabulary, self._shape, self.options):
            return error
        if error := self._without_images.pop(request.key, ""):
            return error
        match self._matchers.get(request.key):
            case str(error):
                return error
            case matcher if matcher is not None and not finish_at_start(request) and not matcher.accept(request.tokens):
                return _MISMATCH
        if self.capacity is not None and not self.capacity.fits(1, self._limit(request)):
            return (
                f"the sample may reach {self._limit(request)} tokens, and the KV cache holds "
                f"{self.capacity.tokens}: raise RLBOOST_WORKER_KV_CACHE_BYTES, or lower max_tokens"
            )
        return ""

    def _start(self, request: Request, ids: Ints) -> None:
        slot, sampling = self.n, request.sampling
        self._tokens[slot, : ids.size] = ids
        numbers = (as_u64(request.seed), len(request.prompt), ids.size, ids.size, self._limit(request))
        narrowing = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.top_logprobs)
        self._slot_state[slot] = (*numbers, *narrowing, not _RESTRICTING.isdisjoint(sampling.options), False)
        if sampling.top_logprobs:
            self._top_logprobs[request.key] = bytearray()
        stops = sampling.stop_token_ids
        if len(stops) > self._stops.shape[1]:
            more = np.full((self._slots, len(stops) - self._stops.shape[1]), NO_TOKEN, np.int32)
            self._stops = np.concatenate([self._stops, more], axis=1)
        self._stops[slot] = NO_TOKEN
        self._stops[slot, : len(stops)] = stops
        if sampling.routed_experts and self._routed is None:
            assert self._shape is not None
            dims = self._shape.layers, self._shape.experts_per_token
            self._routed = np.zeros((self._slots, self._max_len, *dims), self._shape.dtype)
        self.requests.append(request)

    # --- routed experts -----------------------------------------------------------------------------------------------

    @property
    def returns_routed_experts(self) -> bool:
        """True if requests may ask for routed experts."""
        return self._shape is not None

    @property
    def records_routing(self) -> bool:
        """True if a request has asked for routed experts."""
        return self._routed is not None

    def record_routing(self, slots: Ints, starts: Ints, lengths: Ints, experts: Sequence[Ints] | Ints) -> None:
        """Record the experts of a pass.

        Args:
            slots: [batch].
            starts: [batch], position of each slot's first token in the pass.
            lengths: [batch], number of tokens of each slot; the rest is padding.
            experts: of each slot [at least its length, layers, experts per token].

        """
        assert self._routed is not None
        for slot, start, length, one in zip(slots, starts, lengths, experts, strict=True):
            self._routed[slot, start : start + length] = one[:length]

    def share_routing(self, targets: Ints, sources: Ints, lengths: Ints) -> None:
        """Copy the experts of common prefixes to other slots; no slot is in both."""
        if self._routed is not None:
            for target, source, length in zip(targets, sources, lengths, strict=True):
                self._routed[target, :length] = self._routed[source, :length]

    def _routed_experts(self, slot: int) -> bytes:
        """Return the column of a completion: the experts of the positions before its tokens."""
        if self._routed is None or not self.requests[slot].sampling.routed_experts:
            return b""
        state = self._slot_state[slot]
        return self._routed[slot, state["prompt"] - 1 : state["length"] - 1].tobytes()

    # --- decoding -----------------------------------------------------------------------------------------------------

    def commit(
        self, tokens: Ints, logprobs: npt.NDArray[np.float32], top_logprobs: Mapping[int, bytes] | None = None
    ) -> SlotMoves:
        """Append the tokens that a decode step has generated for each slot, and remove requests that end with one.

        `NO_TOKEN` appends nothing, nor does a slot that was aborted during the step, nor a token after a request's end.
        A request whose logprob is not a number ends with an error.

        Args:
            tokens: [n] or [n, tokens per slot], token ids or `NO_TOKEN`.
            logprobs: of the same shape.
            top_logprobs: of the tokens of slots that ask for them, by flat index: entries of `shared.wire.TOP`.

        """
        if tokens.ndim == 1:
            tokens, logprobs = tokens[:, None], logprobs[:, None]
        ended = self._slot_state["aborted"][: self.n].copy()
        width = tokens.shape[1]
        for column in range(width):
            top = {key // width: top for key, top in (top_logprobs or {}).items() if key % width == column}
            ended |= self._append(tokens[:, column], logprobs[:, column], top, ended)
        return self._remove(ended)

    def _append(
        self,
        tokens: Ints,
        logprobs: npt.NDArray[np.float32],
        top_logprobs: Mapping[int, bytes],
        ended: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Append a token of each slot [n] that has not ended; return the slots that end with it [n]."""
        state = self._slot_state[: self.n]
        errors = dict.fromkeys(np.flatnonzero(~np.isfinite(logprobs) & ~ended).tolist(), NOT_A_NUMBER)
        for slot in np.flatnonzero(self.restricted & ~ended).tolist():
            if isinstance(error := self._matchers.get(self.requests[slot].key), str):
                errors[slot] = error
        failed = np.zeros(self.n, np.bool_)
        failed[list(errors)] = True
        slots = np.flatnonzero(~(ended | failed | (tokens == NO_TOKEN)))
        at = state["length"][slots]
        self._tokens[slots, at] = tokens[slots]
        self._logprobs[slots, at] = logprobs[slots]
        state["length"][slots] += 1
        for slot in slots.tolist() if top_logprobs else ():
            if slot in top_logprobs:
                self._top_logprobs[self.requests[slot].key] += top_logprobs[slot]
        self.generated_total += slots.size
        stopped = (self._stops[: self.n] == tokens[:, None]).any(axis=1) & (tokens != NO_TOKEN)
        ends: npt.NDArray[np.bool_] = (failed | stopped | (state["length"] >= state["limit"])) & ~ended
        for slot in np.flatnonzero(ends).tolist():
            if failed[slot]:
                self._emit(slot, error=errors[slot])
            else:
                self._emit(slot, finish=FINISH_STOP if stopped[slot] else FINISH_LENGTH)
        return ends

    def abort(self, keys: Iterable[RequestKey]) -> None:
        """Drop queued requests; mark running ones, which get no more tokens until `remove_aborted` removes them."""
        aborted = set(keys)
        for request in self.pending:
            if request.key in aborted:
                self._awaited.pop(request.key, None)
                self._without_images.pop(request.key, None)
                self._matchers.pop(request.key, None)
        self.pending = deque(request for request in self.pending if request.key not in aborted)
        for slot, request in enumerate(self.requests):
            if request.key in aborted:
                self._slot_state["aborted"][slot] = True

    def release(self, keys: Iterable[RequestKey]) -> None:
        """Abort requests; each one that was not aborted before gets a last emission with FINISH_RELEASED."""
        released = set(keys)
        for request in self.pending:
            if request.key in released:
                self._emissions.append(request.emission_without_tokens(self._version_of(request), FINISH_RELEASED))
        for slot, request in enumerate(self.requests):
            if request.key in released and not self._slot_state["aborted"][slot]:
                self._emit(slot, finish=FINISH_RELEASED)
        self.abort(released)

    @property
    def any_aborted(self) -> bool:
        """True if `remove_aborted` has requests to remove."""
        return bool(self._slot_state["aborted"][: self.n].any())

    def remove_aborted(self) -> SlotMoves:
        """Remove the requests that are marked as aborted."""
        return self._remove(self._slot_state["aborted"][: self.n].copy())

    def reorder(self, order: Ints) -> None:
        """Reorder the slots: slot i gets what was in slot `order[i]`; a permutation of 0..n-1."""
        n, longest = self.n, int(self.positions.max(initial=0)) + 1
        self._slot_state[:n] = self._slot_state[order]
        self._stops[:n] = self._stops[order]
        self._tokens[:n, :longest] = self._tokens[order, :longest]
        self._logprobs[:n, :longest] = self._logprobs[order, :longest]
        if self._routed is not None:
            self._routed[:n, :longest] = self._routed[order, :longest]
        self.requests = [self.requests[slot] for slot in order]

    def begin_version(self, version: int, job_id: str = "") -> None:
        """Mark tokens from now on as generated by `version`: those of one job, or all."""
        self._emit_all(job_id)
        if job_id:
            self.job_versions[job_id] = version
        else:
            self.version = version
            self.job_versions.clear()

    def _version_of(self, request: Request) -> int:
        """Return an emission's version. Without weights (-1) it has no tokens, and frames hold no negatives."""
        return max(self.job_versions.get(request.job_id, self.version), 0)

    # --- emissions ----------------------------------------------------------------------------------------------------

    def take_emissions(self) -> list[Emission]:
        """Return everything since the last call."""
        self._emit_all()
        emissions, self._emissions = self._emissions, []
        return emissions

    def _emit_all(self, job_id: str = "") -> None:
        """Emit the new tokens of one job, or all."""
        state = self._slot_state[: self.n]
        for slot in np.flatnonzero(state["length"] > state["taken"]).tolist():
            if not job_id or self.requests[slot].job_id == job_id:
                self._emit(slot)

    def _emit(self, slot: int, *, finish: int = FINISH_NONE, error: str = "") -> None:
        state, request = self._slot_state[slot], self.requests[slot]
        begin, end = int(state["taken"]), int(state["length"])
        if begin == end and finish == FINISH_NONE and not error:
            return
        tokens, logprobs = (array[slot, begin:end].tolist() for array in (self._tokens, self._logprobs))
        top = self._top_logprobs.get(request.key, b"")
        emission = Emission(
            sample=request.sample,
            attempt=request.attempt,
            offset=begin - len(request.prompt),
            tokens=tokens,
            logprobs=logprobs,
            version=self._version_of(request),
            finish=finish,
            error=error,
            routed_experts=self._routed_experts(slot) if finish in {FINISH_STOP, FINISH_LENGTH} else b"",
            top_logprobs=bytes(top),
            is_forced=bool(request.sampling.forced),
        )
        self._emissions.append(emission)
        if top:
            self._top_logprobs[request.key] = bytearray()
        state["taken"] = end

    def _remove(self, ended: npt.NDArray[np.bool_]) -> SlotMoves:
        for slot in np.flatnonzero(ended).tolist():
            self._emit(slot)
            if self.on_end is not None:
                self.on_end(self.requests[slot], self.completion(slot).copy())
            self._matchers.pop(self.requests[slot].key, None)
            self._top_logprobs.pop(self.requests[slot].key, None)
        moves = SlotMoves(ended)
        if moves:
            self._slot_state[moves.targets] = self._slot_state[moves.sources]
            self._stops[moves.targets] = self._stops[moves.sources]
        for target, source in zip(moves.targets, moves.sources, strict=True):
            length = self._slot_state["length"][target]
            for array in (self._tokens, self._logprobs, self._routed):
                if array is not None:
                    array[target, :length] = array[source, :length]
            self.requests[target] = self.requests[source]
        del self.requests[int(np.count_nonzero(~ended)) :]
        return moves
