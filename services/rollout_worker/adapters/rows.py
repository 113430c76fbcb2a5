"""Bookkeeping of an engine's requests: who waits, what each has made, when it ends, what was not yet drained. No torch.

The running requests are dense: row i of every array belongs to `requests[i]`, and rows 0..n-1 are in use. A row that
ends is filled with one from the end. Whoever keeps something per row elsewhere (the KV cache) repeats the moves that
the methods return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from services.rollout_worker.domain.kv_room import Room
from services.rollout_worker.domain.uniforms import as_u64
from services.rollout_worker.ports import Emission, Key, Request
from shared.errors import Conflict
from shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_RELEASED, FINISH_STOP

Ints = npt.NDArray[np.int64]

_ROW = np.dtype(
    [
        ("seed", "u8"),
        ("prompt", "i8"),  # length of the prompt
        ("length", "i8"),  # of prompt and completion
        ("drained", "i8"),  # tokens before this position have been handed out
        ("limit", "i8"),  # the length at which the row ends
        ("temperature", "f4"),
        ("top_p", "f8"),
        ("aborted", "?"),
    ],
    align=True,
)
NO_TOKEN = -1
"""Stands where a row has no token."""


class Moves:
    """Copies that keep the rows dense: row `sources[i]` goes to row `targets[i]`; no row is in both."""

    def __init__(self, ended: npt.NDArray[np.bool_]) -> None:
        """Plan the moves that close the gaps of the ended rows; `ended` has one entry per running row."""
        left = int(np.count_nonzero(~ended))
        self.targets: Ints = np.flatnonzero(ended[:left])
        self.sources: Ints = left + np.flatnonzero(~ended[left:])

    def __bool__(self) -> bool:
        return self.targets.size > 0


class Rows:
    """The requests of one engine and everything they have made. Not thread-safe.

    Args:
        slots: how many requests run at once.
        max_len: of prompt and completion together.
        vocabulary: token ids are 0..vocabulary-1.
        room: of the KV cache; requests that do not fit beside the running ones wait. None = there is always room.

    """

    def __init__(self, slots: int, max_len: int, vocabulary: int, room: Room | None = None) -> None:
        self.pending: deque[Request] = deque()
        self.requests: list[Request] = []
        self.version = -1
        self.made_total = 0
        self._slots = slots
        self._max_len = max_len
        self._vocabulary = vocabulary
        self.room = room
        # By position in prompt + completion. Empty, not zeros: the operating system gives the memory of what is used.
        self._tokens = np.empty((slots, max_len), np.int32)
        self._logprobs = np.empty((slots, max_len), np.float32)
        self._table = np.zeros(slots, _ROW)
        self._stops = np.full((slots, 1), NO_TOKEN, np.int32)
        self._outbox: list[Emission] = []

    # --- what the model is run on: arrays [n], one entry per running request ------------------------------------------

    @property
    def n(self) -> int:
        """How many requests run."""
        return len(self.requests)

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """Each row's seed."""
        return self._table["seed"][: self.n]

    @property
    def temperature(self) -> npt.NDArray[np.float32]:
        """Each row's temperature."""
        return self._table["temperature"][: self.n]

    @property
    def top_p(self) -> npt.NDArray[np.float64]:
        """Each row's top-p."""
        return self._table["top_p"][: self.n]

    @property
    def positions(self) -> Ints:
        """Position of each row's newest token, which is the next to go through the model."""
        positions: Ints = self._table["length"][: self.n] - 1
        return positions

    @property
    def newest(self) -> Ints:
        """Each row's newest token."""
        return self._tokens[np.arange(self.n), self.positions].astype(np.int64)

    @property
    def offsets(self) -> Ints:
        """Offset within the completion of each row's next token."""
        offsets: Ints = self._table["length"][: self.n] - self._table["prompt"][: self.n]
        return offsets

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a row's prompt and completion."""
        tokens: npt.NDArray[np.int32] = self._tokens[row, : self._table["length"][row]]
        return tokens

    def prefix(self, row: int) -> npt.NDArray[np.int32]:
        """Return the tokens of a row that come before its newest one."""
        return self.tokens(row)[:-1]

    # --- coming -------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            Conflict: a request with the same key is queued or running; none was taken.

        """
        known = {request.key for request in (*self.pending, *self.requests)}
        for request in requests:
            if request.key in known:
                raise Conflict(f"sample {request.sample}, attempt {request.attempt} is queued or running already")
            known.add(request.key)
        self.pending.extend(requests)

    def admit(self, budget_tokens: int) -> range:
        """Take queued requests into free rows, which are returned; answer those with nothing to generate.

        They are taken in the order in which they came: while the first one has no room, all wait.

        Args:
            budget_tokens: take no more once the prefixes taken, equal ones counted once, have as many tokens.

        """
        first = self.n
        prefixes: set[bytes] = set()
        while self.pending and self.n < self._slots and budget_tokens > 0 and self._has_room(self.pending[0]):
            request = self.pending.popleft()
            ids = np.array(request.prompt + request.tokens, np.int64)
            error, finish = self._why_not(request, ids), _finish_at_start(request)
            if error or finish:
                where = request.sample, request.attempt, len(request.tokens)
                self._outbox.append(Emission(*where, [], [], self.version, finish, error))
                continue
            self._take(request, ids)
            prefix = ids[:-1].tobytes()
            budget_tokens -= 0 if prefix in prefixes else ids.size
            prefixes.add(prefix)
        return range(first, self.n)

    def _limit(self, request: Request) -> int:
        """Return the length at which a request ends at the latest."""
        return min(len(request.prompt) + request.sampling.max_tokens, self._max_len)

    def _has_room(self, request: Request) -> bool:
        """Tell whether a request need not wait for the end of others; if it never fits, it has nothing to wait for."""
        if self.room is None or not self.room.fits(1, self._limit(request)):
            return True
        longest = int(self._table["limit"][: self.n].max(initial=self._limit(request)))
        return self.room.fits(self.n + 1, longest)

    def _why_not(self, request: Request, ids: Ints) -> str:
        sampling = request.sampling
        if ids.size == 0:
            return "prompt and completion are both empty"
        if ids.size >= self._max_len:
            return f"{ids.size} tokens of prompt and completion leave no room: the maximum length is {self._max_len}"
        if not (ids.min() >= 0 and ids.max() < self._vocabulary):
            return f"a token id is outside the model's 0..{self._vocabulary - 1}"
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1):
            return f"temperature {sampling.temperature} or top_p {sampling.top_p} is outside [0, inf) or (0, 1]"
        if self.room is not None and not self.room.fits(1, self._limit(request)):
            return (
                f"it may become {self._limit(request)} tokens long, and the KV cache holds {self.room.tokens}: raise "
                f"RLBOOST_WORKER_KV_CACHE_BYTES, or lower max_tokens"
            )
        return ""

    def _take(self, request: Request, ids: Ints) -> None:
        row, sampling = self.n, request.sampling
        self._tokens[row, : ids.size] = ids
        numbers = (as_u64(request.seed), len(request.prompt), ids.size, ids.size, self._limit(request))
        self._table[row] = (*numbers, sampling.temperature, sampling.top_p, False)
        stops = sampling.stop_token_ids
        if len(stops) > self._stops.shape[1]:
            more = np.full((self._slots, len(stops) - self._stops.shape[1]), NO_TOKEN, np.int32)
            self._stops = np.concatenate([self._stops, more], axis=1)
        self._stops[row] = NO_TOKEN
        self._stops[row, : len(stops)] = stops
        self.requests.append(request)

    # --- going on -----------------------------------------------------------------------------------------------------

    def commit(self, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> Moves:
        """Add the token that a decode step has made for each row, and take out the rows that end with it.

        `NO_TOKEN` is no token. A row that was aborted during the step gets none; one whose logprob is not a number
        ends with an error.
        """
        table = self._table[: self.n]
        failed = ~np.isfinite(logprobs)
        rows = np.flatnonzero(~(table["aborted"] | failed | (tokens == NO_TOKEN)))
        at = table["length"][rows]
        self._tokens[rows, at] = tokens[rows]
        self._logprobs[rows, at] = logprobs[rows]
        table["length"][rows] += 1
        self.made_total += rows.size
        stopped = (self._stops[: self.n] == tokens[:, None]).any(axis=1) & (tokens != NO_TOKEN)
        ended = table["aborted"] | failed | stopped | (table["length"] >= table["limit"])
        for row in np.flatnonzero(ended & ~table["aborted"]).tolist():
            if failed[row]:
                self._flush(row, error="the model's output is not a number")
            else:
                self._flush(row, finish=FINISH_STOP if stopped[row] else FINISH_LENGTH)
        return self._remove(ended)

    def abort(self, keys: Iterable[Key]) -> None:
        """Forget queued requests; mark running ones, for which nothing more is recorded until they are taken out."""
        wanted = set(keys)
        self.pending = deque(request for request in self.pending if request.key not in wanted)
        for row, request in enumerate(self.requests):
            if request.key in wanted:
                self._table["aborted"][row] = True

    def release(self, keys: Iterable[Key]) -> None:
        """Abort requests, and answer for each one where it stood; one that was aborted before is not answered for."""
        wanted = set(keys)
        for request in self.pending:
            if request.key in wanted:
                where = request.sample, request.attempt, len(request.tokens)
                self._outbox.append(Emission(*where, [], [], max(self.version, 0), FINISH_RELEASED))
        for row, request in enumerate(self.requests):
            if request.key in wanted and not self._table["aborted"][row]:
                self._flush(row, finish=FINISH_RELEASED)
        self.abort(wanted)

    @property
    def any_aborted(self) -> bool:
        """Whether marked rows wait to be taken out."""
        return bool(self._table["aborted"][: self.n].any())

    def retire_aborted(self) -> Moves:
        """Take out the rows that were aborted."""
        return self._remove(self._table["aborted"][: self.n].copy())

    def reorder(self, order: Ints) -> None:
        """Put the rows into the given order, a permutation of 0..n-1."""
        n, longest = self.n, int(self.positions.max(initial=0)) + 1
        self._table[:n] = self._table[order]
        self._stops[:n] = self._stops[order]
        self._tokens[:n, :longest] = self._tokens[order, :longest]
        self._logprobs[:n, :longest] = self._logprobs[order, :longest]
        self.requests = [self.requests[row] for row in order]

    def begin_version(self, version: int) -> None:
        """Stamp what comes from now on with `version`."""
        self._flush_all()
        self.version = version

    # --- leaving ------------------------------------------------------------------------------------------------------

    def drain(self) -> list[Emission]:
        """Return everything since the last drain."""
        self._flush_all()
        out, self._outbox = self._outbox, []
        return out

    def _flush_all(self) -> None:
        for row in np.flatnonzero(self._table["length"][: self.n] > self._table["drained"][: self.n]).tolist():
            self._flush(row)

    def _flush(self, row: int, *, finish: int = FINISH_NONE, error: str = "") -> None:
        table, request = self._table[row], self.requests[row]
        begin, end = int(table["drained"]), int(table["length"])
        if begin == end and finish == FINISH_NONE and not error:
            return
        tokens, logprobs = (array[row, begin:end].tolist() for array in (self._tokens, self._logprobs))
        where = request.sample, request.attempt, begin - len(request.prompt)
        self._outbox.append(Emission(*where, tokens, logprobs, self.version, finish, error))
        table["drained"] = end

    def _remove(self, ended: npt.NDArray[np.bool_]) -> Moves:
        for row in np.flatnonzero(ended).tolist():
            self._flush(row)
        moves = Moves(ended)
        if moves:
            self._table[moves.targets] = self._table[moves.sources]
            self._stops[moves.targets] = self._stops[moves.sources]
        for target, source in zip(moves.targets, moves.sources, strict=True):
            length = self._table["length"][target]
            for array in (self._tokens, self._logprobs):
                array[target, :length] = array[source, :length]
            self.requests[target] = self.requests[source]
        del self.requests[int(np.count_nonzero(~ended)) :]
        return moves


def _finish_at_start(request: Request) -> int:
    if request.tokens and request.tokens[-1] in request.sampling.stop_token_ids:
        return FINISH_STOP
    return FINISH_LENGTH if len(request.tokens) >= request.sampling.max_tokens else FINISH_NONE
