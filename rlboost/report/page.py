"""The report: one HTML page without any external part, and its figures as PNG files.

A pure function of the record: made again, it is the same byte for byte with the same libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from rlboost.report import figures, tables
from rlboost.report.checks import checks
from rlboost.report.fleet import fleet
from rlboost.report.record import Record
from rlboost.report.style import look, png, svg
from rlboost.report.template import PAGE


class Section(NamedTuple):
    """A figure with what is said about it."""

    name: str
    title: str
    draw: Callable[[Record], Figure]
    caption: str


SECTIONS = (
    Section(
        name="learning",
        title="What it learned",
        draw=figures.learning,
        caption="Held-out problems are distinct from all training problems and are answered at temperature 1. Most of "
        "the gain is to go on searching rather than to answer at once or to give up, so samples become longer.",
    ),
    Section(
        name="fleet",
        title="What happened to the fleet",
        draw=fleet,
        caption="A row a worker. Crosses are machines that vanished, triangles are notices. Each dark line leads from "
        "a preempted worker to one that went on with its unfinished samples; the small ticks are samples that the "
        "reserved engine hands over at each step, when the trainer takes the device.",
    ),
    Section(
        name="steps",
        title="Where each step's time went",
        draw=figures.steps,
        caption="The trainer's view: until the reserved engine leaves it the device, without samples to train on, "
        "training, and publishing the new weights.",
    ),
    Section(
        name="tokens",
        title="What moving samples cost",
        draw=figures.tokens,
        caption="Tokens that a sample takes along to another worker need not be generated again. Tokens are made again "
        "when they reach the log after their sample has moved on. Those that a killed worker had not sent yet, a few "
        "hundredths of a second's worth, never reach it and are not counted.",
    ),
)


def write(record: Record, out: Path) -> Path:
    """Write `index.html` and `figures/*.png` into a folder; return the page's path."""
    (out / "figures").mkdir(parents=True, exist_ok=True)
    drawings: dict[str, str] = {}
    with look():
        for section in SECTIONS:
            drawn = section.draw(record)
            drawings[section.name] = svg(drawn, section.name)
            (out / "figures" / f"{section.name}.png").write_bytes(png(drawn))
    page = out / "index.html"
    page.write_text(render(record, drawings), encoding="utf-8")
    return page


def render(record: Record, drawings: dict[str, str]) -> str:
    """Return the page, given each figure as an SVG element by its name."""
    kept = all(check.kept for check in checks(record))
    return PAGE.substitute(
        name=escape(str(record.job.get("name", "no job"))),
        verdict="Every promise was kept" if kept else "Not every promise was kept",
        verdict_class="good" if kept else "bad",
        intro=tables.intro(record),
        cards=tables.cards(record),
        promises=tables.promises(record),
        sections="\n".join(_sections(drawings)),
        journeys=tables.journeys(record),
        counters=tables.counters(record),
        processors=tables.processors(record),
        settings=tables.settings(record),
    )


def _sections(drawings: dict[str, str]) -> Iterator[str]:
    for section in SECTIONS:
        title = escape(section.title)
        yield (
            f'<section id="{section.name}"><h2>{title}</h2><figure role="img" aria-label="{title}">'
            f"{drawings[section.name]}<figcaption>{escape(section.caption)}</figcaption></figure></section>"
        )
