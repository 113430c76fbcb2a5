"""Rows of data, wherever they are: in files, a folder or an id of Hugging Face datasets.

A source is one file, several in a list, those that match a pattern, or those in a folder.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob, has_magic
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeGuard

from pydantic import BeforeValidator

from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import pip_install
from rlboost.shared.validation import parse_json

AGENT_ROWS = "agent:rows"
"""Names the rows that the job's agent has itself."""
FILE_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
"""Those of shards in a folder; Hugging Face datasets loads a folder of others."""
_SINGLE_KINDS = (".json", ".csv", ".jsonl.zst")
_DATA_KINDS = (*FILE_KINDS, ".csv", ".jsonl.zst", ".tsv", ".arrow", ".ndjson")
"""Those that have rows for certain: a folder's `.json` and `.txt` files may describe it."""
_SPLIT = re.compile(
    r"(?:^|[\W_\d])(?:train|training|test|testing|eval|evaluation|valid|validation|val|dev)(?:[\W_\d]|$)", re.IGNORECASE
)
"""What Hugging Face datasets take for the name of a split in a file's name."""


def _checked(value: object) -> object:
    given = value if isinstance(value, list | tuple) else (value,)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError("give the name of a file, a folder, a pattern or a dataset, or a list of such names")
    return value


Source = Annotated[str | tuple[str, ...], BeforeValidator(_checked)]
"""Where rows are: a name, or several whose rows follow each other."""


def names_of(source: Source) -> tuple[str, ...]:
    """Return a source's names as a tuple."""
    return (source,) if isinstance(source, str) else tuple(source)


def format_source(source: Source) -> str:
    """Return a source as text for a message."""
    return ", ".join(names_of(source))


def exists_locally(name: str) -> bool:
    """Return True if a file or folder of this name exists, or files match it as a pattern."""
    return Path(name).expanduser().exists() or bool(_matches(name))


def shards(name: str) -> list[str]:
    """Return the files of one name, sorted by name: `part-2` before `part-10`.

    A name that is neither a pattern nor a folder of shards is returned as it is. A folder is one of shards if it has
    only files of `FILE_KINDS`, ignoring names that begin with `.` or `_`, and no file is named after a split (train,
    test, ...).

    Raises:
        ConfigError: a pattern matches nothing, or a folder cannot be read.

    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(name, path) or [name]
    if path.exists() or not has_magic(name):
        return [name]
    if found := _matches(name):
        return found
    raise ConfigError(f"{name}: no file matches: correct the pattern, or name files that the trainer can read")


def _matches(name: str) -> list[str]:
    if not has_magic(name):
        return []
    found = glob(str(Path(name).expanduser()), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    return sorted((one for one in found if Path(one).is_file()), key=_order)


def _in_folder(name: str, folder: Path) -> list[str]:
    try:
        files = [file for file in folder.iterdir() if not file.name.startswith((".", "_"))]
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}: name a folder that the trainer can read") from error
    if all(file.is_file() and file.name.endswith(FILE_KINDS) and not _SPLIT.search(file.name) for file in files):
        return sorted(map(str, files), key=_order)
    return []


def _order(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


_OTHER_FILES = {".arrow", ".csv", ".gz", ".json", ".tsv", ".txt", ".yaml", ".yml", ".zst"}
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SAVED = ("dataset_dict.json", "dataset_info.json")
"""One of them lies in a folder that `Dataset.save_to_disk` made."""
_UNNAMED = "__index_level_0__"
"""Where Hugging Face datasets puts the first field of each row of a .csv file if the header has fewer fields."""
_INSTALL = f"install it with: {pip_install('data')}"


class Row(NamedTuple):
    """One row of data."""

    source: str
    """The file, or the dataset."""
    place: str
    """`line 3` or `row 3`, from 1."""
    values: dict[str, Any]


class BadRow(ConfigError):
    """One row cannot be read."""

    def __init__(self, source: str, place: str, why: str) -> None:
        super().__init__(f"{source}, {place}: {why}")
        self.source = source
        self.place = place
        self.why = why


def is_remote(name: str) -> bool:
    """Return True if a name is an id of Hugging Face datasets, and no such file or folder exists."""
    path = Path(name).expanduser()
    if path.suffix in _OTHER_FILES or name.endswith(FILE_KINDS) or path.exists():
        return False
    return _ID.fullmatch(name) is not None and not path.parent.exists()


def may_have_splits(source: Source, *, subsets: bool = False) -> bool:
    """Return True if a name of a source may have splits, or with `subsets` configurations: files have neither."""
    return any(_may_have_splits(name, subsets) for name in names_of(source))


def _may_have_splits(name: str, subsets: bool) -> bool:
    if name == AGENT_ROWS:
        return not subsets
    path = Path(name).expanduser()
    if path.is_dir():
        saved = [file for file in _SAVED if (path / file).is_file()]
        return not _in_folder(name, path) and not (saved if subsets else _SAVED[1] in saved)
    return not has_magic(name) and not name.endswith((*FILE_KINDS, *_SINGLE_KINDS))


def is_messages(prompt: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return True if a prompt is chat messages; else it has to be text."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and "role" in m for m in prompt)


def read_rows(
    source: Source,
    split: str = "train",
    subset: str | None = None,
    agent_rows: Callable[[str], Iterator[Row]] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a source, in the order of its names and of the shards of each.

    Args:
        source: a file, a pattern, a folder, or an id such as `openai/gsm8k`; or several.
        split: which part, of Hugging Face datasets and of an agent's rows only.
        subset: which configuration of a dataset, for those that have several.
        agent_rows: returns the rows of the job's agent, for a split.

    Raises:
        ConfigError: it cannot be read, or a library for it is missing; `BadRow` names the row.

    """
    for name in names_of(source):
        if name == AGENT_ROWS and agent_rows is not None:
            yield from agent_rows(split)
            continue
        for shard in shards(name):
            yield from _read(shard, split, subset)


def _read(source: str, split: str, subset: str | None) -> Iterator[Row]:
    path = Path(source).expanduser()
    if path.is_dir() or is_remote(source):
        return _dataset(source, path, split, subset)
    if source.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return _jsonl(source, path)
    if path.suffix == ".json":
        return _json(source, path)
    if path.suffix == ".parquet":
        return _parquet(source, path)
    if path.suffix == ".csv":
        with _reading(source):
            _require_distinct(source, _csv_header(path))
        return _dataset(source, path.absolute(), "train", None)
    if not path.suffix and not path.exists():
        raise ConfigError(
            f"{source}: no such file or folder: name one that the trainer can read, or the id of a dataset"
        )
    kinds = ", ".join((*FILE_KINDS, *_SINGLE_KINDS))
    raise ConfigError(f"{source}: only {kinds} files are read, and folders and ids of Hugging Face datasets")


def _jsonl(source: str, path: Path) -> Iterator[Row]:
    with _reading(source):
        openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": _open_zstd}
        opened = openers.get(path.suffix, open)
        with opened(path, "rt", encoding="utf-8-sig") as lines:  # with or without a byte order mark
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"line {number}"
                if number == 1 and line.lstrip().startswith("["):
                    raise BadRow(
                        source, place, "a JSON array begins: name such a file .json, or give an object per line"
                    )
                try:
                    values = parse_json(line, interns=True)
                except (ValueError, RecursionError) as error:
                    raise BadRow(source, place, f"not JSON: {error}") from error
                yield Row(source, place, _required_object(source, place, values))


def _json(source: str, path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON array, or of lines, which others name .json, too."""
    with _reading(source), path.open(encoding="utf-8-sig") as file:
        first = next((line.strip() for line in file if line.strip()), "")
        file.seek(0)
        text = file.read() if first.startswith("[") else ""
    if first == "{":
        raise ConfigError(f"{source} is one JSON object of several lines: give an array of objects, or one per line")
    if not text:
        yield from _jsonl(source, path)
        return
    try:
        rows = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}: correct the file") from error
    for number, values in enumerate(rows, 1):
        yield Row(source, f"row {number}", _required_object(source, f"row {number}", values))


def _required_object(source: str, place: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise BadRow(source, place, "a JSON object is expected")
    return values


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Name the file in the errors of its reading."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{source} is not a gzip file that can be read: {error}: write it again") from error
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}: name a file that the trainer can read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8: {error}") from error


def _open_zstd(path: Path, _: str, encoding: str) -> TextIOWrapper:
    try:
        from pyarrow import input_stream  # noqa: PLC0415 - an extra, which `.jsonl` does without
    except ImportError as error:
        raise ConfigError(f"{path}: .jsonl.zst files need pyarrow: {_INSTALL}") from error
    return TextIOWrapper(input_stream(path, compression="zstd"), encoding=encoding)


def _parquet(source: str, path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException  # noqa: PLC0415 - an extra, which `.jsonl` does without
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise ConfigError(f"{source}: .parquet files need pyarrow: {_INSTALL}") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            _require_distinct(source, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024):
                rows = batch.to_pylist(maps_as_pydicts="strict")
                for number, values in enumerate(rows, number + 1):  # noqa: B020 - it goes on counting
                    yield Row(source, f"row {number}", values)
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: No such file or directory: name a file that the trainer can read") from error
    except (ArrowException, OSError, KeyError) as error:  # the last one for two keys of one name in a map
        raise ConfigError(f"{source} is not a parquet file that can be read: {error}") from error


def _csv_header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            return next(csv.reader(file), [])
        except csv.Error:
            return []  # the library that reads the rows says so


def _require_distinct(source: str, columns: Sequence[str]) -> None:
    """Refuse two columns of one name: a row would have only the last."""
    if twice := [name for name, n in Counter(columns).items() if n > 1]:
        raise ConfigError(f"{source}: the column {twice[0]!r} is there twice: remove or rename one")


def _require_all_read(source: str, folder: Path, builder: Any) -> None:
    """Refuse a folder if `datasets` reads only some of its data files: those of the most frequent kind, or of a split.

    What a card (`README.md`) assigns to configurations is its author's choice.
    """
    card = folder / "README.md"
    if card.is_file() and re.search(r"^configs:", card.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        return
    used = {Path(one).resolve() for files in (builder.config.data_files or {}).values() for one in files}
    unread = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.name.lower().endswith(_DATA_KINDS)
        and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        and file.resolve() not in used
    ]
    if used and unread:
        raise ConfigError(
            f"{source}: Hugging Face datasets reads {len(used)} of its files and leaves out {unread[0]}"
            f"{f' and {len(unread) - 1} more' if len(unread) > 1 else ''}: name the files that you want in a list, or "
            "move the others away"
        )


def _require_named_fields(source: str, found: Any) -> None:
    if found.info.builder_name == "csv" and _UNNAMED in found.column_names:
        raise ConfigError(
            f"{source}: rows have more fields than the header, so each column would have the values of the next: quote "
            f"texts with commas, remove commas at the end of rows, or name every column, and none {_UNNAMED}"
        )


def _require_remote_files(files: Any) -> None:
    """Refuse a dataset whose card names files of this machine, which `datasets` would read."""
    for name in [str(one) for several in (files or {}).values() for one in several]:
        place = name.rpartition("::")[2]  # such as zip://a.jsonl::hf://datasets/owner/name/a.zip
        if "://" not in place or place.startswith(("file:", "local:")):
            raise ValueError(f"it names {name}, a file of this machine")


def _dataset(source: str, path: Path, split: str, subset: str | None) -> Iterator[Row]:
    try:
        import datasets  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise ConfigError(f"{source}: a dataset of Hugging Face needs the library datasets: {_INSTALL}") from error
    try:
        if any((path / name).is_file() for name in _SAVED):
            found = datasets.load_from_disk(str(path))
        elif path.is_dir():
            _require_all_read(source, path, datasets.load_dataset_builder(str(path), name=subset))
            found = datasets.load_dataset(str(path), name=subset)
        elif path.suffix == ".csv":
            # It takes names for patterns, and those such as file:/a.csv for URLs.
            found = datasets.load_dataset("csv", data_files=escape(str(path)))
        else:
            _require_remote_files(datasets.load_dataset_builder(source, name=subset).config.data_files)
            found = datasets.load_dataset(source, name=subset)
    except ConfigError:
        raise
    except Exception as error:  # its loaders raise whatever the file formats and the network do
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ConfigError(
            f"{source}: Hugging Face datasets cannot load it ({type(error).__name__}: {reason}): name a folder or an "
            "id that it loads (HF_TOKEN for private ones), and data.subset where there are several"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(
                f"{source} has no split {split!r}, but {', '.join(found)}: set data.train_split, data.eval_split, "
                "or the split of the set in eval.sets"
            )
        found = found[split]
    _require_named_fields(source, found)
    # Images stay as they are stored: decoding them here would open any path or URL that the dataset names.
    for number, values in enumerate(found.to_iterable_dataset().decode(enable=False), 1):
        yield Row(source, f"row {number}", values)
