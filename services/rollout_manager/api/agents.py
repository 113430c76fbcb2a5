"""The REST routes of hosts that run agents: taking sessions, renewing their leases, rewards."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlboost.services.rollout_manager.api.leader import Routes, TheManager, as_leader, find_job, of_app
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.session_offers import Named, SessionOffers
from rlboost.shared.http.guard import principal_of
from rlboost.shared.http.problem import Problem, problems
from rlboost.shared.job.agent import MAX_REWARDS, SessionId, turn_of_answer
from rlboost.shared.messages import SessionRewarded
from rlboost.shared.user_code import MAX_REWARD

MAX_SESSIONS = 1024
"""Of one request."""
MAX_WAIT_S = 60.0
MAX_TEXT = 4096

ROUTES = Routes()
Offers = Annotated[SessionOffers, of_app("offers")]


def _answer(text: str) -> str:
    turn_of_answer(text)
    return text


Answer = Annotated[str, AfterValidator(_answer)]


def _named(text: str) -> str:
    Named.parse(text)
    return text


class RenewBody(BaseModel):
    """The sessions that a host runs."""

    model_config = ConfigDict(extra="forbid")

    sessions: Annotated[list[Annotated[str, AfterValidator(_named)]], Field(max_length=MAX_SESSIONS)]


class RewardBody(BaseModel):
    """The end of a session."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    reward: float | None = Field(None, ge=-MAX_REWARD, le=MAX_REWARD)
    rewards: Annotated[
        dict[Answer, Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]], Field(max_length=MAX_REWARDS)
    ] = Field({}, description="`id` of an answer: reward of the training row that ends with it, in place of `reward`")
    cost: float = Field(0.0, ge=0, le=MAX_REWARD, description="of the session, such as dollars; not part of the reward")
    infrastructure: str | None = Field(
        None, min_length=1, max_length=MAX_TEXT, description="why it has none; another session begins in its place"
    )

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (self.reward is None) == (self.infrastructure is None):
            raise ValueError("give either reward, a finite number, or infrastructure: why there is none")
        if self.rewards and self.reward is None:
            raise ValueError("rewards: a session without a reward has none for its answers: leave them out")
        return self


@ROUTES("POST", "/jobs/{job_id}/sessions/next", "agent", "agents", responses=problems(404, 410))
async def next_sessions(
    job_id: str,
    http: Request,
    manager: TheManager,
    offers: Offers,
    count: Annotated[int, Query(ge=1, le=MAX_SESSIONS)] = 1,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="seconds until an empty answer")] = 30.0,
) -> list[dict[str, Any]]:
    """Take sessions of a job with a remote agent, each for one run of the agent; its id or name names the job."""
    return await as_leader(offers.wait(_of_name(manager, job_id), count, wait, http.is_disconnected))


@ROUTES("POST", "/jobs/{job_id}/sessions/renew", "agent", "agents", responses=problems(404))
async def renew_sessions(job_id: str, body: RenewBody, manager: TheManager, offers: Offers) -> dict[str, list[str]]:
    """Renew the leases of the sessions that a host runs; returns those that are over, whose agents must end."""
    job, given = _of_name(manager, job_id), [Named.parse(text) for text in body.sessions]
    over = await as_leader(offers.renew(job, given))
    return {"over": list(map(str, over))}


@ROUTES("POST", "/sessions/{session}/reward", "session", "agents", status_code=204, responses=problems(409))
async def reward_session(session: str, body: RewardBody, http: Request, offers: Offers) -> None:
    """End a session with its own key, once; the same again is accepted."""
    subject = principal_of(http).subject
    if not subject or SessionId.parse(subject).subject != session:
        raise Problem(403, "Forbidden", "this needs the key of the session: a host gets it with the session")
    found = SessionId.parse(subject)
    rewarded = SessionRewarded(
        session=found.sample,
        start=found.start,
        reward=body.reward or 0.0,
        cost=body.cost,
        reason="" if body.infrastructure is None else "infrastructure",
        detail=body.infrastructure or "",
        rewards=tuple((turn_of_answer(answer), reward) for answer, reward in body.rewards.items()),
    )
    await as_leader(offers.reward(found, rewarded))


def _of_name(manager: TheManager, given: str) -> Job:
    """Return the job with this id, or else the newest of this name."""
    named = [job.record for job in manager.world.jobs.values() if job.record.spec.name == given]
    if given in manager.world.jobs or not named:
        return find_job(manager.world.jobs, given)
    return max(named, key=lambda job: job.no)
