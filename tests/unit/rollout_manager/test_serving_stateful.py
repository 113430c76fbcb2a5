"""The stateful test of the manager once more, with clients of the REST API: they ask, read, hang up and come back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.waiters import CompletionUnavailable, Waiter, next_chunk
from rlboost.shared.errors import BusUnavailable, Fenced
from rlboost.shared.ids import MAX_STEPS, is_served, request_group
from rlboost.shared.messages import GroupRequested, Sampling
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append
from rlboost.shared.wire import I32, pack
from tests.support.sim_worker import check_completion
from tests.support.stateful_manager import JOBS, Spot


@dataclass
class Client:
    """One connection."""

    manager: Manager
    waiter: Waiter
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def read(self) -> None:
        """Take what is new of each member: what was there goes on, whatever has happened since."""
        for member in list(self.waiter.open):
            chunk = next_chunk(self.waiter, member)
            if chunk is None:
                continue
            tokens = self.tokens.setdefault(member, [])
            tokens += chunk.tokens
            sample = self.waiter.sample(member)
            assert sample is not None
            assert tokens == memoryview(sample.tokens).cast("i").tolist()
            check_completion(tokens, sample.spans)
            if chunk.finish:
                assert len(tokens) == self.waiter.request.sampling.max_tokens
                self.manager.completion_waiters.complete([self.waiter], 0, member)


class SpotWithClients(Spot):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[GroupRequested] = []
        self.clients: list[Client] = []

    @precondition(lambda self: self.leader and len(self.asked) < 6)
    @rule(no=st.integers(1, 2), n=st.integers(1, 3), max_tokens=st.integers(1, 12), resumable=st.booleans())
    def a_client_asks(self, no: int, n: int, max_tokens: int, resumable: bool) -> None:
        leader = self.leader
        if no not in self.jobs or leader is None:
            return
        request = GroupRequested(
            job_id=JOBS[no],
            group=request_group(no, len(self.asked)),
            n=n,
            prompt=pack([1, 2], I32),
            sampling=Sampling(max_tokens=max_tokens),
            version=0,
            seed=3,
            expires_at=self.clock + 60.0,
        )
        self.asked.append(request)
        (waiter,) = leader.completion_waiters.register([request], leader.world, resumable=resumable)
        self.clients.append(Client(leader, waiter))
        with contextlib.suppress(BusUnavailable, Fenced):
            self.run(leader.write([Append(names.rollouts_requested(request.job_id), request)]))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def a_client_comes_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.asked))
        leader = self.leader
        if leader is not None and leader.world.ledger.knows(request):
            (waiter,) = leader.completion_waiters.register([request], leader.world, resumable=True)
            self.clients.append(Client(leader, waiter))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def a_client_hangs_up(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        client.manager.completion_waiters.unregister(client.waiter)
        self.clients.remove(client)

    @rule()
    def clients_read(self) -> None:
        for client in list(self.clients):
            gone = client.manager not in self.managers or isinstance(client.waiter.error, CompletionUnavailable)
            if gone or not client.waiter.open:
                client.manager.completion_waiters.unregister(client.waiter)
                self.clients.remove(client)
            elif client.manager.leads:
                client.read()

    def teardown(self) -> None:
        self.clients_read()
        super().teardown()

    def _check_everything_delivered(self, no: int) -> None:
        self.turn()
        leader = self.leader
        assert leader is not None
        assert not leader.world.ledger.served
        assert not leader.world.periodic.unattended_since
        assert not any(step >= MAX_STEPS for job in leader.world.jobs.values() for step in job.progress.delivered)
        assert not any(is_served(message.sample) for message in self._finished(no))
        super()._check_everything_delivered(no)


TestSpotWithClients = pytest.mark.timeout(600)(SpotWithClients.TestCase)
TestSpotWithClients.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
