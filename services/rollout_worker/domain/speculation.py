"""Drafts of the next tokens from the samples of the same prompt, and when verifying them pays.

An engine that draws the token at each offset with a uniform number of its own (`requests.uniforms`) can verify drafts
exactly: one forward pass over the last token and the draft gives the distribution at each of these offsets, each token
is drawn from it as without drafts, and the tokens count up to the first that differs from the draft. So drafts, good or
bad, change only the number of passes. The samples of a prompt resemble each other, and what one has generated is a good
draft for another (Seer, arXiv 2511.14617, section 3.4).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlboost.services.rollout_worker.domain.request_table import RequestTable
from rlboost.services.rollout_worker.domain.requests import Request, RequestKey

Tokens = npt.NDArray[np.int32]

MAX_DRAFT = 8
"""Most tokens of a draft; few longer ones are accepted to their end."""

# --- What follows a context in some sequences -------------------------------------------------------------------------


_COUNTED_SUFFIXES = 32
"""Suffixes of a sequence that count a new token; a sequence that repeats one token has as many as tokens."""


class SuffixAutomaton:
    """The suffix automaton of sequences that grow at their ends, each from a state of its own; 0 is the empty sequence.

    A state stands for contexts that occur at the same places (Blumer et al., "The smallest automaton recognizing the
    subwords of a text", 1985). Its link leads to the longest context that occurs at more places.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        """Length of a state's longest context."""
        self._count = [0]
        """How often a state's contexts have occurred."""

    def __len__(self) -> int:
        """Return the number of states: about 1.5 per token, at most 2."""
        return len(self._link)

    def extend(self, state: int, tokens: Iterable[int]) -> int:
        """Return the state of a sequence after some more tokens."""
        count, link = self._count, self._link
        for token in tokens:
            state = self._grow(state, token)
            at = state
            for _ in range(_COUNTED_SUFFIXES):
                if at <= 0:
                    break
                count[at] += 1
                at = link[at]
        return state

    def _grow(self, p: int, token: int) -> int:
        nexts, link, length = self._next, self._link, self._length
        known = nexts[p].get(token)
        if known is not None:
            return known if length[known] == length[p] + 1 else self._clone(p, token, known)
        new = self._add(length[p] + 1, {}, 0, 0)
        while p != -1 and token not in nexts[p]:
            nexts[p][token] = new
            p = link[p]
        if p != -1:
            q = nexts[p][token]
            link[new] = q if length[q] == length[p] + 1 else self._clone(p, token, q)
        return new

    def _clone(self, p: int, token: int, q: int) -> int:
        """Split the contexts of q that are at most one longer than those of p into a state of their own."""
        nexts, link, length = self._next, self._link, self._length
        clone = self._add(length[p] + 1, dict(nexts[q]), link[q], self._count[q])
        link[q] = clone
        while p != -1 and nexts[p].get(token) == q:
            nexts[p][token] = clone
            p = link[p]
        return clone

    def _add(self, length: int, nexts: dict[int, int], link: int, count: int) -> int:
        self._next.append(nexts)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def draft(self, state: int, most: int, least_chance: float) -> tuple[list[int], list[float]]:
        """Return what probably follows a sequence, and the chance that each of these tokens and all before it follow.

        Each token is the one that followed the longest known context most often. One occurrence is weak evidence after
        a short context, and strong evidence after a long one.

        Args:
            state: of the sequence.
            most: maximum number of tokens.
            least_chance: chance below which a draft ends.

        """
        nexts, link, length, count = self._next, self._link, self._length, self._count
        tokens: list[int] = []
        chances: list[float] = []
        chance = 1.0
        while len(tokens) < most:
            while state > 0 and not nexts[state]:
                state = link[state]
            if state <= 0:
                break
            best = total = token = 0
            for candidate, target in nexts[state].items():
                seen = count[target]
                total += seen
                if seen > best:
                    best, token = seen, candidate
            chance *= best / (total + 1.0 / length[state])
            if best == 0 or chance < least_chance:
                break
            tokens.append(token)
            chances.append(chance)
            state = nexts[state][token]
        return tokens, chances


# --- When verifying drafts pays ---------------------------------------------------------------------------------------


_DECAY = 0.95
"""Factor by which each pass lowers the weight of earlier ones of its kind."""
_MIN_PASSES = 4.0
"""Weight of passes of each kind before their durations count."""
_MOST_SLOWER = 1.25
"""A pass counts as at most this multiple of what was expected: what disturbs single ones must not stop drafts."""
_MARGIN = 1.25
"""How many times its cost a pass with drafts must be expected to save: both are estimates."""


class PassTimes:
    """Seconds of a forward pass: a fixed part, a part per token in it, and a part of passes with drafts.

    While the part per token is small, which is where decoding is bound by memory, drafts cost little. Fitted by least
    squares to the engine's own passes of both kinds, without and with drafts, recent ones above all.
    """

    def __init__(self) -> None:
        self._products = np.zeros((2, 3, 3))
        """By kind."""
        self._targets = np.zeros((2, 3))
        self.fixed_s, self.token_s, self.verify_s = 0.0, 0.0, 0.0

    @property
    def known(self) -> bool:
        """Return True if there were enough passes of both kinds; before that, drafts appear to cost nothing."""
        return bool((self._products[:, 0, 0] >= _MIN_PASSES).all())

    def observe(self, seconds: float, n: int, drafted: int) -> None:
        """Take the duration of a pass over `n` samples with this many drafted tokens in all."""
        kind = int(drafted > 0)
        row = np.array([1.0, n + drafted, kind])
        if self.known:
            seconds = min(seconds, _MOST_SLOWER * float(np.array([self.fixed_s, self.token_s, self.verify_s]) @ row))
        self._products[kind] = _DECAY * self._products[kind] + np.outer(row, row)
        self._targets[kind] = _DECAY * self._targets[kind] + seconds * row
        if self.known:
            self._fit(n)

    def _fit(self, n: int) -> None:
        products = self._products.sum(0)
        # Where the passes do not tell the parts apart, tokens cost nothing.
        products += np.diag([1e-9, 1e-4 * products[1, 1], 1e-9])
        fixed_s, token_s, verify_s = np.linalg.solve(products, self._targets.sum(0)).tolist()
        plain_s = max(fixed_s + token_s * n, 1e-9)
        self.token_s = min(max(token_s, 0.0), plain_s / n)
        self.fixed_s, self.verify_s = plain_s - self.token_s * n, max(verify_s, 0.0)

    def least_chance(self, n: int) -> float:
        """Return the chance of acceptance above which a drafted token saves a batch of n more time than it takes."""
        return self.token_s * n / (self.fixed_s + self.token_s * n) if self.known else 0.0

    def pays(self, n: int, accepted: float, drafted: float) -> bool:
        """Return True if a pass with drafts is expected to save time.

        Args:
            n: samples in the batch.
            accepted: expected number of accepted tokens, of all samples together.
            drafted: number of drafted tokens, of all samples together.

        """
        # An accepted token saves its sample one pass, and a sample has one of the n parts of a pass.
        saved_s = accepted * (self.fixed_s + self.token_s * n) / n
        return saved_s > _MARGIN * (self.token_s * drafted + self.verify_s) if self.known else accepted > 0


# --- The drafts of an engine's running samples ------------------------------------------------------------------------


_REMEMBERED_TOKENS = 1 << 20
"""Tokens of ended samples that are kept for others of their prompts, 4 bytes each."""
_REMEMBERED_SAMPLES = 16
"""Ended samples of one prompt that are kept: more make hardly better drafts."""
_MAX_STATES = 1 << 18
"""States of all automata, about 400 bytes each; beyond it they are built again, of what is still of use."""
_REBUILD_REST = 512
"""Passes without drafts before that: what is of use may be too much, too."""
_LEARN_TOKENS = 1024
"""Tokens learned before a pass, about 2 us each; the rest waits for the next passes."""
_LARGEST_PART = 0.5
"""Drafts are looked for while the tokens of the batch take less than this part of a pass."""
_EXPLORE = 32
"""Every so many passes one is of the kind that is expected to be slower, so that both stay measured."""
_PATIENCE = 8
"""Looks for drafts in sequence that may not pay before the next ones are skipped."""
_FORGET = 0.95
"""Factor by which each draft of a sample lowers the weight of its earlier ones."""
_RECOVER = 0.98
"""The same factor for each look for one: after rejections, drafts are short and then grow again."""


@dataclass(slots=True)
class _Group:
    """What is known of a prompt with running samples."""

    prompt: list[int]
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    root: int = -1
    """State after the prompt; -1 before it was learned."""
    unlearned: deque[Tokens] = field(default_factory=deque)
    """Completions of other samples."""
    samples: int = 0
    """Number of its running samples."""


@dataclass(slots=True)
class _Sample:
    """A running sample."""

    group: _Group
    state: int = -1
    """Of its tokens so far; -1 before the prompt was learned."""
    known: int = 0
    """Tokens of its completion that were learned."""
    expected: float = 0.0
    """Recent sum of the accepted tokens that were expected."""
    accepted: float = 0.0
    """Recent sum of its accepted tokens."""

    @property
    def trust(self) -> float:
        """How many times as many tokens as expected were accepted lately; scales the length of later drafts."""
        return (self.accepted + 1.0) / (self.expected + 1.0)

    def forget(self, factor: float) -> None:
        """Lower the weight of earlier drafts."""
        self.expected *= factor
        self.accepted *= factor


@dataclass(slots=True)
class Drafts:
    """The drafts of a pass."""

    tokens: list[list[int]] = field(default_factory=list)
    """Of each slot."""
    samples: list[_Sample | None] = field(default_factory=list)
    """Of each slot; None without a draft."""
    expected: list[float] = field(default_factory=list)
    """Of each slot: accepted tokens that the occurrences of its draft let expect."""
    total: int = 0
    """Number of drafted tokens."""
    likely: float = 0.0
    """Number of accepted tokens, by the samples' earlier drafts too."""


class Drafter:
    """Drafts for the running samples of one engine, as far as they are expected to save time. Not thread-safe.

    It learns tokens as they come, but only while drafts are looked for: in a large batch it merely keeps the tokens of
    ended samples. What an earlier weight version has generated stays a likely draft, and no more than a draft.

    Args:
        max_tokens: maximum number of tokens in a pass with drafts, which bounds its memory.
        times: the engine's, measured with `PassTimes.observe`.

    """

    def __init__(self, max_tokens: int, times: PassTimes | None = None) -> None:
        self.times = times or PassTimes()
        self._max_tokens = max_tokens
        self.drafted_total = 0
        """Drafted tokens that passes have verified."""
        self.accepted_total = 0
        """Those that were drawn."""
        self._ended: OrderedDict[bytes, list[Tokens]] = OrderedDict()
        """By prompt: completions of ended samples; the prompts with the newest come last."""
        self._n_ended = 0
        self._groups: dict[bytes, _Group] = {}
        self._samples: dict[RequestKey, _Sample] = {}
        self.n_states = 0
        """States of the automata of running samples' prompts."""
        self._passes = 0
        """With drafts."""
        self.looks = True
        """False while the batch is too large for drafts."""
        self._misses = 0
        """Latest looks in sequence whose drafts were not expected to pay."""
        self._rest = 0
        """Passes without a look that are left."""

    # --- what it learns from ------------------------------------------------------------------------------------------

    def on_end(self, request: Request, completion: Tokens) -> None:
        """Take the completion of a request that has ended, or was aborted."""
        key, sample = _key(request.prompt), self._samples.pop(request.key, None)
        if sample is not None:
            self._learn(sample, completion)
            sample.group.samples -= 1
            if not sample.group.samples:
                self.n_states -= len(sample.group.automaton)
                del self._groups[key]
        self._remember(key, completion, learned=sample is not None)

    def hint(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Take what another worker has generated for a prompt."""
        self._remember(_key(prompt), np.array(completion, np.int32), learned=False)

    def _remember(self, key: bytes, completion: Tokens, *, learned: bool) -> None:
        if not completion.size:
            return
        if not learned and key in self._groups:
            self._groups[key].unlearned.append(completion)
        ended = self._ended.setdefault(key, [])
        ended.append(completion)
        self._ended.move_to_end(key)
        self._n_ended += completion.size
        if len(ended) > _REMEMBERED_SAMPLES:
            self._n_ended -= ended.pop(0).size
        while self._n_ended > _REMEMBERED_TOKENS:
            _, oldest = self._ended.popitem(last=False)
            self._n_ended -= sum(tokens.size for tokens in oldest)

    def _learn(self, sample: _Sample, completion: Tokens) -> int:
        """Learn the new tokens of a sample and, if it has none, of a sibling; return their number."""
        group, automaton = sample.group, sample.group.automaton
        states, learned = len(automaton), 0
        if group.root < 0:
            group.root = automaton.extend(0, group.prompt)
            learned += len(group.prompt)
        if sample.state < 0:
            sample.state = group.root
        new = completion[sample.known :].tolist()
        sample.state = automaton.extend(sample.state, new)
        sample.known += len(new)
        learned += len(new)
        while group.unlearned and learned < _LEARN_TOKENS:
            sibling = group.unlearned.popleft().tolist()
            automaton.extend(group.root, sibling)
            learned += len(sibling)
        self.n_states += len(automaton) - states
        return learned

    def _start(self, request: Request) -> _Sample:
        key = _key(request.prompt)
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = _Group(request.prompt, unlearned=deque(self._ended.get(key, ())))
            self.n_states += len(group.automaton)
        group.samples += 1
        sample = self._samples[request.key] = _Sample(group)
        return sample

    # --- drafts -------------------------------------------------------------------------------------------------------

    def drafts(self, table: RequestTable) -> Drafts | None:
        """Return the drafts of the next pass; None if one without is expected to be faster."""
        n, times = table.n, self.times
        least_chance = times.least_chance(n)
        self.looks = least_chance <= _LARGEST_PART and n < self._max_tokens
        if self._rest or not self.looks:
            self._rest = max(0, self._rest - 1)
            return None
        if self.n_states > _MAX_STATES:
            self._groups.clear()
            self._samples.clear()
            self.n_states, self._rest = 0, _REBUILD_REST
            return None
        found = self._find(table, least_chance)
        if not found.total:
            return None
        # The next look is later and later, and the last one of a sequence is tried, so that such passes are measured.
        rest = min(1 << self._misses >> _PATIENCE, _EXPLORE)
        if rest < _EXPLORE and not times.pays(n, found.likely, found.total):
            self._misses, self._rest = self._misses + 1, rest
            return None
        self._passes, self._misses = self._passes + 1, 0
        self._rest = int(self._passes % _EXPLORE == 0)
        return found

    def _find(self, table: RequestTable, least_chance: float) -> Drafts:
        found, to_learn, left = Drafts(), _LEARN_TOKENS, self._max_tokens - table.n
        for slot, (request, room) in enumerate(zip(table.requests, table.room.tolist(), strict=True)):
            tokens: list[int] = []
            expected = 0.0
            sample = self._samples.get(request.key)
            # A grammar follows the tokens one by one, without a way back.
            if to_learn > 0 and not request.sampling.grammar:
                sample = sample or self._start(request)
                to_learn -= self._learn(sample, table.completion(slot))
                most = min(MAX_DRAFT, room, left // (table.n - slot))
                tokens, expected = self._draft(sample, request, most, least_chance, table.vocabulary)
            found.tokens.append(tokens)
            found.expected.append(expected)
            found.samples.append(sample if tokens else None)
            found.total += len(tokens)
            found.likely += expected * min(1.0, sample.trust) if sample else 0.0
            left -= len(tokens)
        return found

    def _draft(
        self, sample: _Sample, request: Request, most: int, least_chance: float, vocabulary: int
    ) -> tuple[list[int], float]:
        sample.forget(_RECOVER)
        tokens, chances = sample.group.automaton.draft(sample.state, most, least_chance / sample.trust)
        for at, token in enumerate(tokens):
            # Nothing follows a stop token, and a hint may have any token.
            if token in request.sampling.stop_token_ids or not 0 <= token < vocabulary:
                tokens, chances = tokens[:at], chances[:at]
                break
        return tokens, sum(chances)

    def on_verified(self, drafts: Drafts, accepted: Sequence[int]) -> None:
        """Take the number of drafted tokens of each slot that were drawn."""
        for sample, expected, n in zip(drafts.samples, drafts.expected, accepted, strict=True):
            if sample is not None:
                sample.forget(_FORGET)
                sample.expected += expected
                sample.accepted += n
        self.drafted_total += drafts.total
        self.accepted_total += sum(accepted)

    def on_failed(self, drafts: Drafts) -> None:
        """Take that a pass gave no numbers; the next one has no drafts."""
        self.on_verified(drafts, [0] * len(drafts.tokens))
        self._rest = 1


def _key(prompt: Sequence[int]) -> bytes:
    return np.array(prompt, np.int64).tobytes()
