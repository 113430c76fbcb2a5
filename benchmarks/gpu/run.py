"""Everything that needs a GPU, in order of value: `make gpu`, or `python -m benchmarks.gpu.run [PART ...] [--again]`.

Each part is a process with a limit, and is recorded in build/gpu.json as soon as it ends; the limits add up to 25
minutes. A run that was cut off continues with the parts that have not succeeded for the present commit; `--again`
repeats all. At the end
it prints a table for docs/performance.md. Without a GPU it says so in one line and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rlboost.local.layout import list_gpus
from rlboost.shared.errors import ConfigError

RESULTS = Path("build/gpu.json")
_SHOWN_LINES = 30


class Part(NamedTuple):
    """One measurement; `arguments` follow `python -m`."""

    name: str
    what: str
    arguments: tuple[str, ...]
    limit_s: float


_BENCH = ("--device", "cuda", "--dtype", "bfloat16")
PARTS = (
    Part("gsm8k", "steps, memory and engine start of the recipe GSM8K", ("benchmarks.gpu.recipe",), 420.0),
    Part(
        "engines",
        "tokens/s of torch, vLLM and a plain loop",
        ("benchmarks.engines", *_BENCH, "--model", "0.6b", "--requests", "8", "64", "--rounds", "2"),
        300.0,
    ),
    Part(
        "trainer",
        "the trainer against a bare loop",
        ("benchmarks.trainer", *_BENCH, "--end-to-end", "0", "--rounds", "3"),
        180.0,
    ),
    Part("tests", "tests of one GPU pass", ("pytest", "-q", "-m", "gpu", "tests/gpu"), 360.0),
    Part("warm start", "the recipe with vLLM's compilation cache", ("benchmarks.gpu.recipe", "--steps", "2"), 240.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--again", action="store_true", help="also repeat parts that have succeeded")
    args = parser.parse_args()
    if unknown := set(args.parts) - {part.name for part in PARTS}:
        parser.error(f"no such part: {', '.join(unknown)}")
    try:
        device = list_gpus()[0].name
    except ConfigError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 1
    record = load(device, commit(), again=args.again)
    for part in PARTS:
        if (not args.parts or part.name in args.parts) and not record["parts"].get(part.name, {}).get("ok"):
            print(f"== {part.name}: {part.what}", flush=True)
            record["parts"][part.name] = run(part)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(table(record))
    return 0 if all(part["ok"] for part in record["parts"].values()) else 1


def load(device: str, at: str, *, again: bool) -> dict[str, Any]:
    """Return the record to continue: an empty one for another GPU or commit."""
    fresh: dict[str, Any] = {"device": device, "commit": at, "parts": {}}
    if again or not RESULTS.exists():
        return fresh
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found if (found["device"], found["commit"]) == (device, at) else fresh


def commit() -> str:
    """Return the present commit, with a mark if files differ from it; "unknown" outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def run(part: Part) -> dict[str, Any]:
    """Run one part; return whether it succeeded, its seconds and the last lines of its output."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *part.arguments], capture_output=True, text=True, timeout=part.limit_s, check=False
        )
        ok, output, errors = done.returncode == 0, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        ok, output, errors = False, _text(error.stdout), f"it took longer than {part.limit_s:.0f} s"
    lines = [line for line in (output + ("" if ok else errors)).splitlines() if line.strip()]
    print("\n".join(lines[-_SHOWN_LINES:]), flush=True)
    return {"ok": ok, "seconds": round(time.monotonic() - began, 1), "output": lines[-_SHOWN_LINES:]}


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def table(record: dict[str, Any]) -> str:
    """Return a Markdown table of the parts."""
    lines = [
        f"\n{record['device']}, {record['commit']}\n",
        "| part | passed | seconds | last line |",
        "|---|---|---|---|",
    ]
    for name, part in record["parts"].items():
        last = (part["output"] or [""])[-1].replace("|", "/")
        lines.append(f"| {name} | {'yes' if part['ok'] else 'no'} | {part['seconds']} | {last} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
