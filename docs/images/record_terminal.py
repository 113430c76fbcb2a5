"""Record a command in a terminal and write it as an animated SVG.

It needs pyte (`pip install pyte`). The demo's picture:

python docs/images/record_terminal.py docs/images/demo.svg -- .venv/bin/rlboost demo --steps 12
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

COLUMNS, ROWS = 104, 32
FONT_PX, ADVANCE_PX, LINE_PX = 14, 8.43, 18
SHOWN_S = 4.0
"""How long the last frame is shown before the animation starts again."""
PLAYED_S = 24.0
"""How long the frames before take together, whatever the recorded command took."""
FRAMES = 160
"""Most frames of the animation."""
COLORS = {
    "default": "#d0d4dc",
    "black": "#5c6370",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#e6e6e6",
}
Run = tuple[str, str, bool]
"""Text, color, and whether it is bold."""
Frame = tuple[tuple[Run, ...], ...]


def record(command: list[str]) -> list[tuple[float, Frame]]:
    """Run a command in a pseudo-terminal; return its screens with the seconds since the start."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    began, frames = time.monotonic(), []
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:  # noqa: S603 - the caller's command
        os.close(follower)
        while True:
            if select.select([leader], [], [], 0.05)[0]:
                try:
                    data = os.read(leader, 65536)
                except OSError:  # the command ended
                    break
                if not data:
                    break
                stream.feed(data)
            elif process.poll() is not None:
                break
            frame = tuple(_row(screen.buffer[y]) for y in range(ROWS))
            if not frames or frame != frames[-1][1]:
                frames.append((time.monotonic() - began, frame))
    os.close(leader)
    return frames


def _row(cells: pyte.screens.StaticDefaultDict) -> tuple[Run, ...]:
    def style(x: int) -> tuple[str, bool]:
        return cells[x].fg, cells[x].bold

    last = max((x for x in range(COLUMNS) if cells[x].data.strip()), default=-1)
    return tuple(
        ("".join(cells[x].data for x in places), color, bold)
        for (color, bold), group in groupby(range(last + 1), style)
        for places in [list(group)]
    )


def svg(frames: list[tuple[float, Frame]]) -> str:
    """Return the animation: a strip of frames that moves past a window; equal lines are stored once."""
    frames = _thinned(frames)
    total = frames[-1][0] + SHOWN_S
    width, height = COLUMNS * ADVANCE_PX + 24, ROWS * LINE_PX + 24
    lines: dict[tuple[Run, ...], int] = {}
    strip, steps = [], []
    for index, (at, frame) in enumerate(frames):
        uses = [
            f'<use href="#l{lines.setdefault(row, len(lines))}" y="{y * LINE_PX}"/>'
            for y, row in enumerate(frame)
            if row
        ]
        strip.append(f'<g transform="translate({index * width:.0f})">{"".join(uses)}</g>')
        steps.append(f"{100 * at / total:.3f}%{{transform:translateX(-{index * width:.0f}px)}}")
    defined = "".join(f'<g id="l{number}">{_text(row)}</g>' for row, number in lines.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
        f"<style>text{{font:{FONT_PX}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}"
        f".b{{font-weight:bold}}#strip{{animation:play {total:.1f}s steps(1,end) infinite}}"
        f"@keyframes play{{{''.join(steps)}}}</style><defs>{defined}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="#1e2127"/>'
        f'<svg x="12" y="12" width="{width - 24:.0f}" height="{height - 24}"><g id="strip">{"".join(strip)}</g></svg>'
        "</svg>\n"
    )


def _thinned(frames: list[tuple[float, Frame]]) -> list[tuple[float, Frame]]:
    """Scale the time to `PLAYED_S`, and keep the last frame of each interval."""
    first, last = frames[0][0], frames[-1][0]
    scale = PLAYED_S / max(last - first, 1e-9)
    kept = {int((at - first) * scale / PLAYED_S * (FRAMES - 1)): frame for at, frame in frames}
    return [(slot * PLAYED_S / (FRAMES - 1), frame) for slot, frame in kept.items()]


def _text(row: tuple[Run, ...]) -> str:
    x, parts = 0, []
    for text, color, bold in row:
        if text.strip():
            fill = COLORS.get(color, f"#{color}" if len(color) == 6 else COLORS["default"])
            weight = ' class="b"' if bold else ""
            length = f'textLength="{len(text) * ADVANCE_PX:.1f}" lengthAdjust="spacingAndGlyphs"'
            parts.append(
                f'<text x="{x * ADVANCE_PX:.1f}" y="{FONT_PX}" fill="{fill}"{weight} {length}>{escape(text)}</text>'
            )
        x += len(text)
    return "".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    arguments.out.write_text(svg(record(arguments.command)), encoding="utf-8")
