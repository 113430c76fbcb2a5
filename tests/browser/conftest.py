"""Headless Chromium, through Playwright for Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="run 'make test-browser', which installs it")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT_MS = 120_000


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of a new browser; an error in one of its scripts fails the test."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on PATH: install one, such as Debian's package chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        sync_api.expect.set_options(timeout=WAIT_MS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
        assert not errors
