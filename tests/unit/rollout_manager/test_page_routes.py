"""The page's files are open; they load nothing from elsewhere, and the API behind them stays guarded."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import FastAPI

from rlboost.services.rollout_manager.api.jobs import add_page
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import create_app
from rlboost.shared.page import STATIC


@pytest.fixture
def app() -> FastAPI:
    app = create_app("a manager", guard=Guard.of_token("secret"), not_ready_reason=lambda: None)
    add_page(app)
    return app


async def get(app: FastAPI, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test") as client:
        return await client.get(path)


async def test_page_needs_no_token_and_runs_only_its_own_scripts(app: FastAPI) -> None:
    answer = await get(app, "/")
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert (await get(app, "/metrics")).status_code == 401


async def test_page_refers_only_to_files_that_are_served(app: FastAPI) -> None:
    referred = set(re.findall(r'(?:src|href)="(page/[^"]+)"', (STATIC / "index.html").read_text(encoding="utf-8")))
    for script in STATIC.glob("*.js"):
        referred |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text(encoding="utf-8"))}
    assert referred >= {"page/main.js", "page/style.css", "page/api.js"}
    for path in referred:
        assert (await get(app, f"/{path}")).status_code == 200, path


def test_page_names_no_other_host() -> None:
    for file in STATIC.iterdir():
        hosts = set(re.findall(r"https?://[^/\"']+", file.read_text(encoding="utf-8")))
        assert hosts <= {"http://www.w3.org"}, file.name
