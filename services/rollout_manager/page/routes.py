"""The web page at `/`: static files without data; the page reads the REST API with the token its user gives."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from rlboost.shared.page.files import STATIC

_HEADERS = {
    # Texts of jobs, such as completions, are untrusted: only the page's own scripts may run.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its files below `/page`; neither needs a token."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=_HEADERS)

    app.mount("/page", StaticFiles(directory=STATIC), name="page")
