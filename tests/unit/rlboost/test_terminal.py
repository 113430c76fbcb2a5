"""What is printed: no text controls the terminal, and any terminal can show it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.text import Text

from rlboost.commands.common import print_table
from rlboost.terminal import chart, console, echo, printable

ROOT = Path(__file__).parents[3]
ATTACKS = [
    "\x1b]0;title\x07",
    "\x1b]52;c;QUJD\x07",
    "\x9b31m",
    "\x1b[2J",
    "a\rb",
    "\x08\x08",
    "\u202egnp.exe",
    "\x7f",
    "\ud800",
]
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize("text", ATTACKS)
def test_no_text_controls_the_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"error: {text}")
    echo(text, err=True)
    print_table(f"of {text}", ("id", text), [(text, f"{text}\n{text}")])
    console().print(Text(text), text)
    printed = capsys.readouterr()
    assert not CONTROL.search(printed.out + printed.err)
    assert "error: " in printed.out


def test_text_of_people_is_kept() -> None:
    for text in ("línea 漢字 🎉", "👩\u200d🔬", "क\u200cष", "a\u00a0b\u3000c", "two\nlines"):
        assert printable(text) == text
    assert printable("a\tb") == "a    b"


def test_styles_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console().print(Text("red\x1b]0;x\x07", style="red"))
    assert out.getvalue().startswith("\x1b[31mred\\x1b]0;x\x1b[0m")


def test_terminal_without_utf_8_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console().print(chart([0.0, 0.5, 1.0], 0.0, 1.0, 10), "é")
    sys.stdout.flush()
    assert raw.getvalue() == b"??? ?\n"


def test_only_one_module_writes_to_the_terminal() -> None:
    """What a process of a service prints goes to its log; `print` is for those."""
    pattern = re.compile(r"typer\.s?echo\(|[^.\w]Console\(|rich\.print|from rich import print")
    sources = [*(ROOT / "rlboost").rglob("*.py")]
    found = {path.name for path in sources if pattern.search(path.read_text(encoding="utf-8"))}
    assert found == {"terminal.py"}
    assert not [path for path in sources if "commands" in path.parts and re.search(r"[^\w.]print\(", path.read_text())]
