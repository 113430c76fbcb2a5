"""Writes the record of a run; see `shared.job.run_record`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlboost.shared import files
from rlboost.shared.files import append_line, replace_file
from rlboost.shared.job.run_record import (
    CHAIN,
    FINAL_FOLDERS,
    FOLDER,
    digest_of,
    digest_of_file,
    line_of,
    samples_path,
)
from rlboost.shared.weights.access import RecordKey

_TAIL_BYTES = 1 << 16
"""More than a line of the chain has, but for that of a final model of thousands of files."""


class RunRecord:
    """The record in one run's folder. All calls block and raise errors of the file system; each may be repeated."""

    def __init__(self, folder: Path, key: RecordKey) -> None:
        """Use the run's `folder`, and sign with `key`."""
        self._folder = folder
        self._chain = folder / CHAIN
        self._key = key

    def begin(self, step: int, data_digest: str) -> None:
        """Record that a trainer continues at `step`, after the run's job file is written.

        Args:
            step: the first step that it trains.
            data_digest: of the training prompts.

        """
        (self._folder / FOLDER).mkdir(parents=True, exist_ok=True)
        if self._chain.exists():
            self._drop_unfinished_line()
        file = (self._folder / "job.json").read_bytes()
        self._append(
            {
                "kind": "start",
                "job": self._folder.name,
                "step": step,
                "job_file": digest_of(file),
                "data": data_digest,
                "code": {
                    "rlboost": version("rlboost"),
                    "torch": version("torch"),
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                    "digest": _code_digest(),
                },
                "user_code": user_code_digests(json.loads(file)),
                "key": self._key.public,
            }
        )

    def add_step(self, step: int, metrics: bytes, groups: bytes, weights: str) -> None:
        """Record a finished step.

        Args:
            step: number of the step.
            metrics: its line of the run log.
            groups: its samples (`pack_groups`); empty if none were generated.
            weights: digest of the weights that it has trained; empty if it has published none.

        """
        if groups:
            replace_file(self._folder / samples_path(step), groups)
        samples = digest_of(groups) if groups else ""
        self._append(
            {"kind": "step", "step": step, "metrics": digest_of(metrics), "samples": samples, "weights": weights}
        )

    def end(self, weights: str) -> None:
        """Record that the job is done, once its final model is written, with the digest of its last weights."""
        files = (file for name in FINAL_FOLDERS for file in (self._folder / name).rglob("*") if file.is_file())
        digests = {str(file.relative_to(self._folder)): digest_of_file(file) for file in files}
        self._append({"kind": "end", "weights": weights, "files": digests})

    def _append(self, fields: dict[str, Any]) -> None:
        # The file's own last line: another trainer may have written it meanwhile, on a shared disk.
        previous = digest_of(last) if (last := self._last_line()) else ""
        with self._chain.open("ab", buffering=0) as file:
            append_line(file, line_of(fields, previous, self._key))

    def _last_line(self) -> bytes:
        if not self._chain.exists():
            return b""
        size = self._chain.stat().st_size
        for n_bytes in (_TAIL_BYTES, size):
            with self._chain.open("rb") as file:
                file.seek(max(0, size - n_bytes))
                lines = file.read().splitlines(keepends=True)
            if len(lines) > 1:
                break
        return lines[-1] if lines else b""

    def _drop_unfinished_line(self) -> None:
        """Remove the line that a killed trainer has not finished: it is no link, and no step has ended with it."""
        content = self._chain.read_bytes()
        if not content.endswith(b"\n") and content:
            replace_file(self._chain, content[: content.rfind(b"\n") + 1])


# --- The code of a run ------------------------------------------------------------------------------------------------


@lru_cache
def _code_digest() -> str:
    """Return the digest of all Python files of the trainer and of what services share."""
    lines = [
        f"{root.name}/{file.relative_to(root)} {digest_of_file(file)}\n"
        for root in (Path(__file__).parents[1], Path(files.__file__).parent)
        for file in sorted(root.rglob("*.py"))
    ]
    return digest_of("".join(lines).encode())


def user_code_digests(spec: Any) -> dict[str, str]:
    """Return the digest of the file of each function that a job file names as `module:function`, of those found here.

    Args:
        spec: the job file, or a part of it, as it is in JSON.

    """
    if isinstance(spec, Mapping | list):
        values = spec.values() if isinstance(spec, Mapping) else spec
        return {name: digest for value in values for name, digest in user_code_digests(value).items()}
    module, found, function = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if not (found and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        return {}
    top, *rest = module.split(".")
    origin = find_spec(top)  # imports nothing, unlike that of a module in a package
    for folder in (origin.submodule_search_locations or ()) if origin else ():
        for path in (Path(folder, *rest, "__init__.py"), Path(folder, *rest).with_suffix(".py")):
            if path.is_file():
                return {spec: digest_of_file(path)}
    if origin and origin.origin and origin.has_location and not rest:
        return {spec: digest_of_file(Path(origin.origin))}
    return {}
