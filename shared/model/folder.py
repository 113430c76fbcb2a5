"""Reads Hugging Face model directories without torch or transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlboost.shared.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LONGEST_HEADER_BYTES = 100_000_000
"""The limit of the .safetensors format."""

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of weight files."""

Shape = tuple[int, ...]


def require_tokenizer(model: Path) -> None:
    """Check that the directory has a tokenizer.

    Raises:
        ConfigError: it has none.

    """
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model {model} has no tokenizer ({', '.join(TOKENIZER_FILES)}): put its files there")


def read_config(model: Path) -> dict[str, Any]:
    """Return `config.json`.

    Raises:
        ConfigError: the file is missing, or is not a JSON object.

    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model}: config.json cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {model}: config.json is not a JSON object")
    return config


def require_unquantized(config: Mapping[str, Any]) -> None:
    """Check that a model's files hold its weights in full, since training needs them.

    Args:
        config: the model's `config.json`.

    Raises:
        ConfigError: they are quantized.

    """
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "of an unnamed method")
        raise ConfigError(
            f"config.json: the model's weights are quantized ({method}): use the model in bfloat16 or float32. vLLM "
            'workers quantize it as they load it with RLBOOST_WORKER_VLLM_ARGS, such as {"quantization": '
            '"fp8_per_channel"}'
        )


def read_tensor_shapes(model: Path) -> dict[str, Shape]:
    """Return the shape of every tensor in the directory's .safetensors files, by name.

    Raises:
        ConfigError: one of the files is invalid.

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
            raise ConfigError(f"model {model}: {path.name} is not a valid .safetensors file: {error}") from error
    return shapes


def count_parameters(model: Path) -> int:
    """Return the number of parameters.

    Raises:
        ConfigError: the weights cannot be read.

    """
    return sum(map(math.prod, read_tensor_shapes(model).values()))


def non_weight_files(model: Path) -> list[Path]:
    """Return the directory's files without the weight files.

    Raises:
        OSError: the directory cannot be read.

    """
    return [file for file in model.iterdir() if file.is_file() and not file.name.endswith(_WEIGHTS)]


def copy_without_weights(model: Path, to: Path) -> None:
    """Copy the directory's files, except the weight files, to another directory.

    Raises:
        OSError: one cannot be read or written.

    """
    for file in non_weight_files(model):
        shutil.copyfile(file, to / file.name)


def declare_dtype(folder: Path, dtype: str) -> None:
    """Set the dtype of the weights in `config.json`, so that `from_pretrained` loads them in it.

    Raises:
        OSError: it cannot be read or written.

    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
