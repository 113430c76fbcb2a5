"""Checks the record of a run against its files, and compares the records of two runs of the same job.

Everything is read from the run's folder: no system runs, and no library of models is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rlboost.shared.errors import ConfigError, Corrupt
from rlboost.shared.job.run_record import (
    CHAIN,
    FINAL_FOLDERS,
    FOLDER,
    Link,
    damage_of,
    digest_of,
    digest_of_file,
    link_of,
    samples_path,
    unpack_groups,
)
from rlboost.shared.weights.access import is_key
from rlboost.shared.wire import F32, floats, ints, length

_SHOWN = 20
"""Most problems or steps that are listed."""

# --- One run: the chain, and the files that its links name ------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """What the folder of a run has."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    """What does not match, each with its file; the first of a chain explains the others."""
    starts: list[Link] = field(default_factory=list)
    steps: dict[int, Link] = field(default_factory=dict)
    """Step -> its last link."""
    superseded: dict[int, Link] = field(default_factory=dict)
    """Step -> its link before a trainer continued at this step or an earlier one."""
    n_repeated: int = 0
    """How many steps were trained again, each time counted."""
    changed: list[int] = field(default_factory=list)
    """Steps that had other samples or weights when they were trained again."""
    end: Link | None = None
    head: str = ""
    """Digest of the last line of the chain: the name of the certificate."""

    @property
    def key(self) -> str:
        """Return the public key of the last trainer."""
        return str(self.starts[-1].fields["key"]) if self.starts else ""

    def summary(self) -> Iterator[str]:
        """Yield what the check found, for people."""
        if self.problems:
            yield f"{self.folder}: {len(self.problems)} problems"
            yield from (f"  {problem}" for problem in self.problems[:_SHOWN])
            return
        again = f", {self.n_repeated} of them trained again" if self.n_repeated else ""
        end = "the job has ended" if self.end else "the job still runs, was cancelled or has failed"
        but = "" if self.end else f"; {' and '.join(FINAL_FOLDERS)} are not covered"
        last = _n_trained(self)
        n_steps = sum(step < last for step in self.steps) if last else len(self.steps)
        final = " and the evaluation after the last" if n_steps < len(self.steps) else ""
        yield f"{self.folder}: {n_steps} steps{final}{again}; {end}. All files are those that were written{but}"
        if self.changed:
            steps = ", ".join(str(step + 1) for step in self.changed[:_SHOWN])
            yield f"  trained again with other samples or weights, which count: steps {steps}"
        code = self.starts[-1].fields["code"]
        yield f"  certificate {self.head}"
        yield f"  signed with {self.key}, by rlboost {code['rlboost']} with code {code['digest'][:16]}"

    def read(self, path: str) -> bytes | None:
        """Return the content of a file of the run, None if there is none."""
        try:
            return (self.folder / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.folder / path} cannot be read: {error.strerror or error}") from error

    def groups(self, step: int) -> dict[str, dict[str, Any]]:
        """Return a step's groups by name; of a record without problems."""
        packed = self.read(samples_path(step)) if self.steps[step].fields["samples"] else None
        return {} if packed is None else {group["group"]: group for group in unpack_groups(packed)}

    def rows(self) -> dict[int, bytes]:
        """Return the lines of the run log by step; a line that is no row has a negative number."""
        rows: dict[int, bytes] = {}
        for number, line in enumerate((self.read("metrics.jsonl") or b"").splitlines(keepends=True)):
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError):
                step = None
            # A step has one line: a trainer that trains it again replaces the first.
            rows[step if type(step) is int and step >= 0 and step not in rows else -1 - number] = line
        return rows


def _n_trained(record: Record) -> int:
    """Return the number of steps that the job trains, 0 if it only evaluates; of a record without problems.

    The evaluation of the last weights is recorded under this number.
    """
    job = json.loads(record.read("job.json") or b"{}")
    return 0 if job.get("kind") == "eval" else int(job.get("steps", 0))


def check(folder: Path, public_key: str = "") -> Record:
    """Check a run's record.

    Args:
        folder: the run's folder.
        public_key: the key that it must be signed with; empty: the one that it names.

    Raises:
        ConfigError: the folder has no record, or a file cannot be read.

    """
    if public_key and not is_key(public_key):
        raise ConfigError(f"{public_key!r} is not a public key: give 64 hexadecimal digits")
    record = Record(folder)
    chain = record.read(CHAIN)
    if chain is None:
        raise ConfigError(f"{folder} has no {CHAIN}: name the folder of a run, such as .rlboost/runs/JOB")
    for number, line in enumerate(chain.splitlines(keepends=True), 1):
        if problem := _take(record, line, public_key):
            record.problems.append(f"{CHAIN}, line {number}: {problem}")
        if not record.starts:
            break  # without the key, each line would be a problem
    if not record.starts and not record.problems:
        record.problems.append(f"{CHAIN}: it is empty")
    if record.starts:
        record.problems += [*_steps_missing(record), *_files_differ(record), *_rows_differ(record)]
        record.problems += _samples_differ(record)
    return record


def _take(record: Record, line: bytes, public_key: str) -> str:
    """Add a line of the chain; return what is wrong with it, empty if nothing is."""
    previous, record.head = record.head, digest_of(line)
    try:
        link = link_of(line)
        fields, kind = link.fields, link.fields["kind"]
        # Nothing in a link counts before its signature is checked.
        own = str(fields["key"]) if kind == "start" else record.key
        if not link.is_signed_by(public_key or own):
            named = f", but names {own}: give the key of the system that ran it with --key"
            return f"it is not signed with the key {public_key or own}{named if public_key not in ('', own) else ''}"
        record.end = link if kind == "end" else None
        if kind == "start":
            record.starts.append(link)
            for again in [step for step in record.steps if step >= fields["step"]]:
                record.superseded[again] = record.steps.pop(again)
        elif kind == "step":
            _take_step(record, link)
        follows = fields["previous"] == previous
    except (Corrupt, KeyError, ValueError, TypeError):
        return "it is not a link as a trainer writes it"
    if not follows:
        return "it does not follow the line before it: that one was changed, or lines were removed or inserted"
    return "" if record.starts else "it is not the start of a trainer"


def _take_step(record: Record, link: Link) -> None:
    step = int(link.fields["step"])
    if (earlier := record.steps.get(step, record.superseded.get(step))) is not None:
        record.n_repeated += 1
        if any(earlier.fields[name] != link.fields[name] for name in ("samples", "weights")):
            record.changed.append(step)
    record.steps[step] = link


def _steps_missing(record: Record) -> Iterator[str]:
    first = int(record.starts[0].fields["step"])
    for step in range(first, max(record.steps, default=first - 1) + 1):
        if step not in record.steps:
            yield f"{CHAIN}: step {step + 1} is missing"
            return
    resume = json.loads(record.read("job.json") or b"{}").get("trainer", {}).get("resume", "auto") if first else ""
    if resume in ("auto", "never"):
        yield f"{CHAIN}: it begins with step {first + 1}: the steps before are recorded where they were trained"


def _files_differ(record: Record) -> Iterator[str]:
    expected = {"job.json": record.starts[-1].fields["job_file"]}
    if record.end is not None:
        expected |= record.end.fields["files"]
        found = (path for name in FINAL_FOLDERS for path in (record.folder / name).rglob("*") if path.is_file())
        for path in sorted(str(path.relative_to(record.folder)) for path in found):
            if path not in expected:
                yield f"{path}: the record has no such file"
    for path, digest in expected.items():
        file = record.folder / path
        if not file.is_file():
            yield f"{path}: it is missing"
        elif digest_of_file(file) != digest:
            yield f"{path}: it is not the file that was written"


def _rows_differ(record: Record) -> Iterator[str]:
    rows = record.rows()
    for step in sorted({*rows, *record.steps}):
        if step < 0:
            yield f"metrics.jsonl, line {-step}: it is not a row"
        elif step not in record.steps:
            yield f"metrics.jsonl: the record has no step {step + 1}"
        elif step not in rows:
            yield f"metrics.jsonl: the row of step {step + 1} is missing"
        elif digest_of(rows[step]) != record.steps[step].fields["metrics"]:
            yield f"metrics.jsonl: the row of step {step + 1} is not the one that was written"


def _samples_differ(record: Record) -> Iterator[str]:
    links = {**record.superseded, **record.steps}
    expected = {samples_path(step): link.fields["samples"] for step, link in sorted(links.items())}
    for path, digest in expected.items():
        data = record.read(path)
        if digest and data is None:
            yield f"{path}: it is missing"
        elif data is not None and digest_of(data) != digest:
            place = damage_of(data)
            yield f"{path}: it is not the file that was written" + (f"; {place} has changed" if place else "")
    for file in sorted((record.folder / FOLDER).iterdir()):
        if (path := f"{FOLDER}/{file.name}") not in expected and path != CHAIN:
            yield f"{path}: the record has no such file"


# --- The samples of a step, for people --------------------------------------------------------------------------------


def lines_of(record: Record, step: int) -> Iterator[str]:
    """Yield a line per sample of a step: its prompt, its reward, and which worker and version made its tokens.

    Raises:
        ConfigError: the record has no such step.

    """
    if step not in record.steps:
        raise ConfigError(f"the record has no step {step + 1}; its last is step {max(record.steps, default=-1) + 1}")
    for name, group in record.groups(step).items():
        kind, number = ("evaluation ", name[1:]) if name.startswith("e") else ("", name)
        for member, sample in enumerate(group["samples"]):
            spans = ", ".join(
                f"{n} tokens by {worker} with version {version}" for worker, version, n in sample["spans"]
            )
            yield f"{kind}group {number}, sample {member}: prompt {group['row']}, reward {sample['reward']:g}: {spans}"


# --- Two runs of the same job -----------------------------------------------------------------------------------------


_LIKE_EACH_OTHER = ("name", "log", "trainer.checkpoint_every", "trainer.checkpoints", "trainer.resume")
"""Keys of the job file that change nothing of what is computed."""
_MEASURED = ("time/", "perf/", "samples/duplicates", "turns/model_s", "turns/outside_s")
"""Prefixes of metrics that depend on the time."""
_PLACE = "step {}, group {}, sample {}"
_COLUMNS: tuple[tuple[str, int, Callable[[bytes], Sequence[float]]], ...] = (
    *(("tokens", 0, ints), ("tokens", 1, ints), ("tokens", 2, list), ("log-probabilities", 3, floats)),
)
"""Columns of a sequence: what differs, its place, and how to read it."""


@dataclass(slots=True)
class Comparison:
    """What two runs have in common, and where they differ."""

    differences: dict[str, list[str]] = field(default_factory=dict)
    """What differs, such as `tokens` -> where, in order of the steps."""
    n_steps: int = 0
    n_samples: int = 0
    n_tokens: int = 0

    def add(self, what: str, where: str) -> None:
        """Add a difference."""
        self.differences.setdefault(what, []).append(where)

    def summary(self) -> Iterator[str]:
        """Yield what the comparison found, for people."""
        counted = f"{self.n_steps} steps, {self.n_samples:,} samples, {self.n_tokens:,} tokens"
        yield f"identical: {counted}" if not self.differences else f"not identical: {counted}"
        for what, places in self.differences.items():
            yield f"  {what}: {len(places)}, the first: {places[0]}"


def compare(a: Record, b: Record) -> Comparison:
    """Compare two records without problems, step by step."""
    found = Comparison()
    _compare_keys(found, _flat(json.loads(a.read("job.json") or b"{}")), _flat(json.loads(b.read("job.json") or b"{}")))
    for what in ("data", "user_code"):
        if (one := a.starts[-1].fields[what]) != (other := b.starts[-1].fields[what]):
            found.add(what.replace("_", " "), f"{one} and {other}")
    rows_a, rows_b = a.rows(), b.rows()
    for step in sorted({*a.steps, *b.steps}):
        if step not in a.steps or step not in b.steps:
            found.add("steps", f"step {step + 1} is only in {(a if step in a.steps else b).folder}")
            continue
        found.n_steps += 1
        _compare_groups(found, step, a.groups(step), b.groups(step))
        _compare_metrics(found, step, json.loads(rows_a[step]), json.loads(rows_b[step]))
        weights_a, weights_b = (one.steps[step].fields["weights"] for one in (a, b))
        if weights_a != weights_b:
            found.add("weights", f"step {step + 1}: {weights_a} and {weights_b}")
    if a.end and b.end and (one := a.end.fields["weights"]) != (other := b.end.fields["weights"]):
        found.add("weights", f"the last version: {one} and {other}")
    return found


def _compare_keys(found: Comparison, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key) and not any(key == same or key.startswith(f"{same}.") for same in _LIKE_EACH_OTHER):
            found.add("job file", f"{key}: {a.get(key)} and {b.get(key)}")


def _flat(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _compare_metrics(found: Comparison, step: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for name in sorted({*a, *b}):
        # As text: not a number equals itself.
        if repr(a.get(name)) != repr(b.get(name)) and not name.startswith(_MEASURED):
            found.add("losses and other metrics", f"step {step + 1}, {name}: {a.get(name)} and {b.get(name)}")


def _compare_groups(found: Comparison, step: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            found.add("groups", f"step {step + 1}, group {name}: only the {'first' if name in a else 'second'} has it")
        elif len(a[name]["samples"]) != len(b[name]["samples"]):
            sizes = f"{len(a[name]['samples'])} and {len(b[name]['samples'])} samples"
            found.add("groups", f"step {step + 1}, group {name}: {sizes}")
        else:
            for what in ("row", "prompt"):
                if a[name][what] != b[name][what]:
                    found.add("prompts", f"step {step + 1}, group {name}: {a[name]['row']} and {b[name]['row']}")
                    break
            for member, (one, other) in enumerate(zip(a[name]["samples"], b[name]["samples"], strict=True)):
                found.n_samples += 1
                _compare_samples(found, _PLACE.format(step + 1, name, member), one, other)


def _compare_samples(found: Comparison, place: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    if len(a["sequences"]) != len(b["sequences"]):
        found.add("tokens", f"{place}: {len(a['sequences'])} and {len(b['sequences'])} sequences")
        return
    for one, other in zip(a["sequences"], b["sequences"], strict=True):
        found.n_tokens += length(one[3], F32)
        for what, i, read in _COLUMNS:
            if one[i] != other[i]:
                found.add(what, f"{place}, {_first(read, one[i], other[i])}")
    values = {name for name in (*a, *b) if name.startswith("reward")}
    for name in sorted(values):
        if repr(a.get(name)) != repr(b.get(name)):
            found.add("rewards", f"{place}: {name} {a.get(name)} and {b.get(name)}")
    if (one := (a["finish"], _versions(a))) != (other := (b["finish"], _versions(b))):
        found.add("versions", f"{place}: {one} and {other}")


def _first(read: Callable[[bytes], Sequence[float]], a: bytes, b: bytes) -> str:
    """Return the first position at which two columns differ."""
    pairs = enumerate(zip_longest(read(a), read(b)))
    position, (one, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"token {position}: {one} and {other}"


def _versions(sample: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (weight version, number of tokens): which worker made them may differ."""
    counted: list[tuple[int, int]] = []
    for _, version, n in sample["spans"]:
        if counted and counted[-1][0] == version:
            counted[-1] = version, counted[-1][1] + n
        else:
            counted.append((version, n))
    return counted
