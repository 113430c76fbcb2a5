"""A report: the web page with the API's answers about one job in it, as one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlboost.shared.errors import ConfigError
from rlboost.shared.page.files import STATIC

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    """A table that only a report has."""

    title: str
    rows: Sequence[Sequence[str]]
    place: Literal["checks", "appendix"] = "checks"
    """The element that it is in: above the charts, or at the end."""


@dataclass(frozen=True)
class Report:
    """What the page shows instead of asking the API. Times are Unix seconds; steps count from 1."""

    at: float
    """When the answers were given."""
    job: str
    """The job's id."""
    text: str
    """Stands above everything else."""
    answers: Mapping[str, Any]
    """JSON answers by path below `/v1`, without the query."""
    events: Sequence[Mapping[str, Any]] = ()
    """The job's events, oldest first."""
    samples: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Samples by step: see `answers.shown_samples`."""
    tables: Sequence[Table] = ()


def job_answers(job: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the answers that the page needs of one job; parts are named as in `GET /v1/jobs/{job_id}/PART`."""
    base = f"jobs/{job['id']}"
    return {"jobs": [job], base: job, **{f"{base}/{name}": answer for name, answer in parts.items()}}


def write(report: Report, out: Path) -> Path:
    """Write `index.html` into a folder, which is created; return its path.

    Raises:
        ConfigError: it cannot be written.

    """
    page = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        page.write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: name a folder that can be written") from error
    return page


def render(report: Report) -> str:
    """Return the page as HTML. Its content security policy lets only the page's own script run."""
    script = "\n" + "\n".join(_modules("main.js", set()))
    style = "\n" + (STATIC / "style.css").read_text(encoding="utf-8")
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    data = json.dumps(asdict(report), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    for tag, inlined in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ('<link rel="stylesheet" href="page/style.css">', f"<style>{style}</style>"),
        ('<link rel="icon" href="page/icon.svg">', f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">'),
        (
            '<script type="module" src="page/main.js"></script>',
            f'<script type="application/json" id="report">{data}</script>\n<script type="module">{script}</script>',
        ),
    ):
        before, found, after = text.partition(tag)
        if not found:
            raise ValueError(f"{STATIC / 'index.html'} has no {tag}")
        text = before + inlined + after
    return text


def _modules(name: str, seen: set[str]) -> list[str]:
    """Return a module and those that it imports, each once and after its imports, as parts of one module."""
    seen.add(name)
    text = (STATIC / name).read_text(encoding="utf-8")
    parts: list[str] = []
    for imported in _IMPORT.findall(text):
        if imported not in seen:
            parts += _modules(imported, seen)
    return [*parts, _EXPORT.sub("", _IMPORT.sub("", text))]


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
