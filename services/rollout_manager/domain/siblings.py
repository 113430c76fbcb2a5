"""Completions of samples that have ended, as drafts for their siblings on other workers.

A worker knows what it has generated itself. In the long tail of a step most of a group has ended, and the last samples
run in small batches, where drafts save most. What is sent is best effort: no decision and no sample depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlboost.services.rollout_manager.domain.effects import Effect, Now, Send
from rlboost.services.rollout_manager.domain.tokens import Ledger, Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.shared.messages import Siblings
from rlboost.shared.wire import I32, U32, U64, length, pack

SEND_EVERY_S = 0.2
"""How often completions are sent."""
MAX_BYTES = 256 << 10
"""About how much one turn sends to all workers together; the rest follows in the next ones."""
MAX_COMPLETIONS = 8
"""Completions of a group that are kept: more of them make hardly better drafts."""


@dataclass(slots=True)
class _Completion:
    tokens: bytes
    workers: set[str]
    """Those that have it."""


class EndedSiblings:
    """The newest completions of groups that have open samples."""

    def __init__(self) -> None:
        self._is_used = False
        """True once a worker has used drafts: before that, nothing is kept."""
        self._of: dict[int, list[_Completion]] = {}
        self._sent_at = -1.0e9

    @property
    def n_groups(self) -> int:
        """Return the number of groups whose completions are kept."""
        return len(self._of)

    def add(self, sample: Sample, ledger: Ledger) -> None:
        """Keep the completion of a sample that has ended and is still in the ledger, if it has open siblings."""
        group = sample.request.group
        if not self._is_used or ledger.open_in_group.get(group, 0) < 2:
            return
        kept = self._of.setdefault(group, [])
        kept.append(_Completion(bytes(sample.tokens), {sample.attempt_worker}))
        del kept[:-MAX_COMPLETIONS]

    def forget(self, group: int) -> None:
        """Drop the completions of a group whose samples have all ended."""
        self._of.pop(group, None)

    def send(self, fleet: Fleet, now: Now) -> list[Effect]:
        """Send workers that use drafts the completions that they lack."""
        if now.mono - self._sent_at < SEND_EVERY_S:
            return []
        self._sent_at = now.mono
        effects: list[Effect] = []
        n_bytes = 0
        for worker in fleet.workers.values():
            if not worker.uses_drafts:
                continue
            self._is_used = True
            sent: list[tuple[int, bytes]] = []
            for sample, completion in self._lacking(worker):
                if n_bytes > MAX_BYTES:
                    break
                completion.workers.add(worker.id)
                sent.append((sample.id, completion.tokens))
                n_bytes += len(completion.tokens)
            if sent:
                effects.append(Send(worker.id, _message(sent)))
        return effects

    def _lacking(self, worker: Worker) -> Iterator[tuple[Sample, _Completion]]:
        for sample in worker.samples.values():
            for completion in self._of.get(sample.request.group, ()):
                if worker.id not in completion.workers:
                    yield sample, completion


def _message(completions: list[tuple[int, bytes]]) -> Siblings:
    return Siblings(
        samples=pack([sample for sample, _ in completions], U64),
        lengths=pack([length(tokens, I32) for _, tokens in completions], U32),
        tokens=b"".join(tokens for _, tokens in completions),
    )
