"""Which version workers are commanded to use, and what happens to the samples that run."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Now, Send
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import InFlightPolicy, JobReport, Message, Resume, Suspend, UseVersion
from tests.support.builders import group_requested, heartbeat, job_created, job_spec, weights_committed, worker_joined

NOW = Now(mono=1.0, wall=1000.0)


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "finish"])
def test_use_version_carries_the_in_flight_policy_of_the_job(in_flight: InFlightPolicy) -> None:
    spec = job_spec(elastic={"max_staleness": 2, "in_flight": in_flight})
    world = World(lease_s=2.0)
    report = JobReport(job_id="j", state="running", step=0)
    beat = heartbeat(state="joining", job_id="", version=-1)
    for number, message in enumerate([job_created(spec=spec), report, worker_joined(), beat]):
        apply_message(world, message, f"{number + 1}-0", NOW)
    for version in range(2):
        apply_message(world, weights_committed(version=version), f"9-{version}", NOW)
        sent = [effect.message for effect in decide(world, NOW, []) if isinstance(effect, Send)]
        assert sent == [UseVersion(job_id="j", version=version, in_flight=in_flight)]


def test_reserved_worker_is_suspended_once_its_window_has_no_length() -> None:
    world = World(lease_s=2.0)
    messages = [
        job_created(),
        JobReport(job_id="j", state="running", step=0),
        worker_joined("reserved", role="reserved"),
        worker_joined("spot"),
        heartbeat("reserved", state="suspended", job_id="", version=-1),
        heartbeat("spot", state="joining", job_id="", version=-1),
        group_requested(),
        weights_committed(version=0),
    ]
    for number, message in enumerate(messages):
        apply_message(world, message, f"{number + 1}-0", NOW)

    def activations() -> list[Message]:
        sent = [effect.message for effect in decide(world, NOW, []) if isinstance(effect, Send)]
        return [message for message in sent if isinstance(message, Resume | Suspend)]

    assert activations() == [Resume(step=0)]
    assert activations() == []
    window = world.jobs["j"].progress.window
    assert window is not None
    window.length_s = 0.0
    assert activations() == [Suspend(step=0)]
