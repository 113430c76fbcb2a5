"""What a Hugging Face model directory says of itself, read without torch and without transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LONGEST_HEADER_BYTES = 100_000_000
"""Of a .safetensors file, as its format says."""

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Endings of files that hold weights."""

Shape = tuple[int, ...]


def check_tokenizer(model: Path) -> None:
    """See that there is a tokenizer.

    Raises:
        ConfigError: there is none.

    """
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model {model} has no tokenizer ({', '.join(TOKENIZER_FILES)}): put its files there")


def config_of(model: Path) -> dict[str, Any]:
    """Return `config.json`.

    Raises:
        ConfigError: it is missing, or no JSON object.

    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {model}: config.json is no JSON object")
    return config


def tensors_of(model: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors in all of the directory's .safetensors files, by name.

    Raises:
        ConfigError: one of them is none.

    """
    shapes: dict[str, Shape] = {}
    for path in sorted(model.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                n_bytes = int.from_bytes(file.read(8), "little")
                if n_bytes > _LONGEST_HEADER_BYTES:
                    raise ValueError("its header is too long")  # noqa: TRY301 - one text for all
                header = json.loads(file.read(n_bytes))
            header.pop("__metadata__", None)
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"model {model}: {path.name} is no .safetensors file: {error}") from error
    return shapes


def n_parameters(model: Path) -> int:
    """Return how many numbers its weights are.

    Raises:
        ConfigError: they cannot be read.

    """
    return sum(map(math.prod, tensors_of(model).values()))


def files_beside_weights(model: Path) -> list[Path]:
    """Return the directory's files, all but those that hold weights.

    Raises:
        OSError: it cannot be read.

    """
    return [file for file in model.iterdir() if file.is_file() and not file.name.endswith(_WEIGHTS)]


def copy_without_weights(model: Path, to: Path) -> None:
    """Copy the directory's files into another one, all but those that hold weights.

    Raises:
        OSError: one cannot be read or written.

    """
    for file in files_beside_weights(model):
        shutil.copyfile(file, to / file.name)


def declare_dtype(folder: Path, dtype: str) -> None:
    """Let `config.json` say in which dtype the weights beside it are, so that `from_pretrained` loads them so.

    Raises:
        OSError: it cannot be read or written.

    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
