"""`/v1/tokens`: create, list and revoke access tokens."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from rlboost.services.rollout_manager.access import SECRET_BYTES, AccessToken, TokenTable, digest_of_secret
from rlboost.services.rollout_manager.api.leader import AsLeader, Routes, TheManager, find_job, of_app
from rlboost.shared.http.access import TokenScope
from rlboost.shared.http.problem import Problem, problems
from rlboost.shared.ids import new_token
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashDelete, HashSet

_ID = r"^[0-9a-f]{8,32}$"
TokenId = Annotated[str, PathParameter(pattern=_ID)]


class TokenBody(BaseModel):
    """An access token to create."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    scope: TokenScope
    job: str = Field("", max_length=128, description="of scope trainer: id of the external job that it is for")
    name: str = Field("", max_length=100, description="what it is for, shown in lists")
    expires_s: float | None = Field(None, gt=0, le=1e10, description="seconds until it expires; null = never")
    id: str | None = Field(None, pattern=_ID, description="replaces a token of this id; null = a new id")


Table = Annotated[TokenTable, of_app("tokens")]
ROUTES = Routes()


@ROUTES("POST", "/tokens", "admin", "tokens", status_code=201, responses=problems(404, 409))
async def create_token(body: TokenBody, table: Table, manager: TheManager, write: AsLeader) -> dict[str, Any]:
    """Create an access token of a scope. The answer is the only one that has its secret."""
    if (body.scope == "trainer") != bool(body.job):
        raise Problem(422, "Invalid token", "job: name the job of a token of scope trainer, and of no other scope")
    if body.job and find_job(manager.world.jobs, body.job).spec.kind != "external":
        raise Problem(409, "Not an external job", f"job {body.job} is not of kind external: it needs no trainer token")
    secret, now = f"rlb_{new_token(SECRET_BYTES)}", time.time()
    token = AccessToken(
        id=body.id or new_token(8),
        scope=body.scope,
        job_id=body.job,
        name=body.name,
        sha256=digest_of_secret(secret),
        created_at=now,
        expires_at=None if body.expires_s is None else now + body.expires_s,
    )
    await write([HashSet(names.TOKENS, {token.id: token.model_dump_json()})])
    table.invalidate()
    return {**token.public(), "secret": secret}


@ROUTES("GET", "/tokens", "admin", "tokens")
async def list_tokens(table: Table) -> list[dict[str, Any]]:
    """Return all access tokens, expired ones too, without their secrets."""
    table.invalidate()
    return [token.public() for token in await table.tokens()]


@ROUTES("DELETE", "/tokens/{token_id}", "admin", "tokens", status_code=204, responses=problems(404))
async def revoke_token(token_id: TokenId, table: Table, write: AsLeader) -> None:
    """Revoke an access token; every manager rejects it within 2 seconds."""
    table.invalidate()
    if all(token.id != token_id for token in await table.tokens()):
        detail = f"there is no token {token_id!r}: list them with 'rlboost token list' or GET /v1/tokens"
        raise Problem(404, "No such token", detail)
    await write([HashDelete(names.TOKENS, (token_id,))])
    table.invalidate()
