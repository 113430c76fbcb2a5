"""The report: one self-contained HTML page, and its figures as PNG files.

A pure function of the record: the same libraries produce the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from matplotlib.figure import Figure

from rlboost.report import figures, tables
from rlboost.report.checks import checks
from rlboost.report.fleet import fleet
from rlboost.report.record import Record
from rlboost.report.style import look, png, svg
from rlboost.report.template import DEMO, PAGE
from rlboost.shared.errors import ConfigError

Source = TypeVar("Source")


class Section(NamedTuple, Generic[Source]):
    """A figure with its caption."""

    name: str
    title: str
    draw: Callable[[Source], Figure]
    caption: str


SECTIONS = (
    Section(
        name="learning",
        title="What it learned",
        draw=figures.learning,
        caption="Held-out problems are distinct from all training problems and are answered at temperature 1. The "
        "policy mainly learns to keep searching instead of answering early or giving up, so completions become longer.",
    ),
    Section(
        name="fleet",
        title="What happened to the fleet",
        draw=fleet,
        caption="One row per worker. Crosses are kills without notice, triangles are notices. Each dark line leads "
        "from a preempted worker to the one that resumed its samples; small ticks are samples that the reserved engine "
        "hands over at each step, when the trainer takes the device.",
    ),
    Section(
        name="steps",
        title="Where each step's time went",
        draw=figures.steps,
        caption="The trainer's view: seeding by the reserved engine, waiting for samples, training, and publishing "
        "the new weights.",
    ),
    Section(
        name="tokens",
        title="Cost of migration",
        draw=figures.tokens,
        caption="A migrated sample keeps its tokens. Tokens are regenerated if they arrive after their sample has "
        "migrated. Tokens that a killed worker had not sent yet, at most one flush interval, never reach the log and "
        "are not counted.",
    ),
)


def write(record: Record, out: Path) -> Path:
    """Write `index.html` and `figures/*.png` into a folder; return the page's path."""
    return write_page(out, render(record, draw(SECTIONS, record, out)))


def draw(sections: Sequence[Section[Source]], source: Source, out: Path) -> dict[str, str]:
    """Write each section's figure into a folder as PNG; return them as SVG elements by name.

    Raises:
        ConfigError: the folder cannot be written.

    """
    drawings: dict[str, str] = {}
    with look(), writing(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for section in sections:
            drawn = section.draw(source)
            drawings[section.name] = svg(drawn, section.name)
            (out / "figures" / f"{section.name}.png").write_bytes(png(drawn))
    return drawings


def write_page(out: Path, text: str) -> Path:
    """Write `index.html`; return its path.

    Raises:
        ConfigError: it cannot be written.

    """
    page = out / "index.html"
    with writing(out):
        page.write_text(text, encoding="utf-8")
    return page


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Report errors of the file system as errors of `--out`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: name a folder that can be written") from error


def render(record: Record, drawings: dict[str, str]) -> str:
    """Return the page, given each figure as an SVG element by its name."""
    held = all(check.held for check in checks(record))
    return PAGE.substitute(
        name=escape(str(record.job.get("name", "no job"))),
        verdict="Every guarantee held" if held else "Some guarantees were violated",
        verdict_class="good" if held else "bad",
        intro=tables.intro(record),
        warnings=tables.warnings(record.job),
        cards=tables.cards(record),
        body=DEMO.substitute(
            guarantees=tables.guarantees(record),
            sections=figure_sections(SECTIONS, drawings),
            journeys=tables.journeys(record),
            counters=tables.counters(record.audit),
            cpu_time=tables.cpu_time(record),
            settings=tables.settings(record),
        ),
    )


def figure_sections(sections: Sequence[Section[Source]], drawings: dict[str, str]) -> str:
    """Return the figures with their titles and captions."""
    found = []
    for section in sections:
        title = escape(section.title)
        found.append(
            f'<section id="{section.name}"><h2>{title}</h2><figure role="img" aria-label="{title}">'
            f"{drawings[section.name]}<figcaption>{escape(section.caption)}</figcaption></figure></section>"
        )
    return "\n".join(found)
