"""`POST /v1/notice`: whoever has the token may say that a worker's machine will be taken away."""

from __future__ import annotations

import httpx
import pytest

from rlboost.services.rollout_worker.api import notice_routes
from rlboost.services.rollout_worker.domain.preemption import Notice
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import create_app


async def post(body: str, token: str = "token") -> tuple[int, list[Notice]]:
    taken: list[Notice] = []
    app = create_app("a worker", guard=Guard.of_token("token"), not_ready_reason=lambda: None)
    app.include_router(notice_routes(taken.append, Guard.of_token("token")))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
        answer = await client.post("/v1/notice", content=body, headers=headers)
    return answer.status_code, taken


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        ('{"lead_s": 11, "reason": "our fleet manager"}', Notice("our fleet manager", 11.0)),
        ('{"lead_s": 0}', Notice("requested over REST", 0.0)),
        ("{}", Notice("requested over REST")),
    ],
)
async def test_a_notice_reaches_the_worker(body: str, notice: Notice) -> None:
    assert await post(body) == (202, [notice])


@pytest.mark.parametrize(
    "body",
    ['{"lead_s": -1}', '{"lead_s": NaN}', '{"lead_s": 1e999}', '{"leads": 3}', '{"reason": ""}', "soon", "[]"],
)
async def test_invalid_notice_is_refused(body: str) -> None:
    assert await post(body) == (422, [])


async def test_notice_without_the_token_is_refused() -> None:
    assert await post("{}", token="another") == (401, [])
