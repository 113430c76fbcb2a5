"""Prompts from `.jsonl` files, tokenized as the model's own tokenizer does it; the model's directory found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from services.trainer.ports import Data, Prompt
from shared.columns import I32, pack
from shared.errors import ConfigError
from shared.jobspec import JobSpec

_TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def find_model(model: str) -> Path:
    """Return the local directory of a Hugging Face model, downloading it when `model` is no directory.

    Raises:
        ConfigError: it is neither a directory here nor a model that can be downloaded.

    """
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, allow_patterns=_MODEL_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"model: {model!r} is no directory here, and Hugging Face does not give it ({reason}): name a directory "
            "with config.json and *.safetensors, or an id such as Qwen/Qwen3-0.6B (HF_TOKEN for private ones)"
        ) from error


def load_data(spec: JobSpec, model: Path) -> Data:
    """Read and tokenize all prompts of a job.

    Raises:
        ConfigError: a file, a line or the tokenizer is wrong; the text names it.

    """
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model {model} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): put its files there")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        config: Any = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {model}: tokenizer and config.json cannot be loaded: {error}") from error
    reader = _Reader(spec, tokenizer, config)
    return Data(
        train=reader.read(spec.data.train),
        evaluation=reader.read(spec.data.eval) if spec.eval is not None and spec.data.eval else [],
        stop_token_ids=_stop_token_ids(model, tokenizer, config),
        decode=lambda tokens, skip_special: str(tokenizer.decode(tokens, skip_special_tokens=skip_special)),
    )


class _Reader:
    def __init__(self, spec: JobSpec, tokenizer: Any, config: Any) -> None:
        self._key = spec.data.prompt_key
        self._max_tokens = spec.sampling.max_tokens
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._max_length = getattr(config, "max_position_embeddings", None)

    def read(self, path: str) -> Sequence[Prompt]:
        prompts = [self._prompt(row, f"{path}, line {number}") for number, row in _rows(path)]
        if not prompts:
            raise ConfigError(f"{path} has no prompts: give one JSON object a line")
        return prompts

    def _prompt(self, row: dict[str, Any], place: str) -> Prompt:
        if self._key not in row:
            known = ", ".join(row) or "none"
            raise ConfigError(f"{place}: no key {self._key!r} (keys: {known}): mend the line or set data.prompt_key")
        for name in _TRL_ARGUMENTS:
            if name in row:
                raise ConfigError(f"{place}: a column named {name!r} hides the reward function's argument: rename it")
        given = row[self._key]
        tokens = self._tokens(given, place)
        return Prompt(given, pack(tokens, I32), {name: value for name, value in row.items() if name != self._key})

    def _tokens(self, given: object, place: str) -> list[int]:
        if isinstance(given, str):
            tokens = self._tokenizer(given, add_special_tokens=True)["input_ids"]
        elif isinstance(given, list) and given and all(isinstance(m, dict) and "role" in m for m in given):
            tokens = self._chat_tokens(given, place)
        else:
            raise ConfigError(f"{place}: {self._key!r} is neither text nor a list of chat messages with a role")
        if not tokens:
            raise ConfigError(f"{place}: the prompt has no tokens")
        if max(tokens) >= self._vocab_size:
            raise ConfigError(
                f"{place}: token id {max(tokens)} is outside the model's vocabulary of {self._vocab_size}: the "
                "tokenizer and the model in this directory do not belong together"
            )
        if self._max_length is not None and len(tokens) + self._max_tokens > self._max_length:
            raise ConfigError(
                f"{place}: {len(tokens)} prompt tokens and sampling.max_tokens {self._max_tokens} do not fit the "
                f"model's {self._max_length} positions: shorten the prompt or lower sampling.max_tokens"
            )
        return list(tokens)

    def _chat_tokens(self, messages: list[Any], place: str) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{place}: chat messages need a chat template, and the model's tokenizer has none")
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=True, return_dict=True
                )["input_ids"]
            )
        except Exception as error:  # a template is a program of its own, which raises anything
            raise ConfigError(f"{place}: the chat template refuses the messages: {error}") from error


def _rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if Path(path).suffix != ".jsonl":
        raise ConfigError(f"{path}: only .jsonl files are read, with one JSON object a line")
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}, line {number}: a JSON object is expected")
                yield number, row
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: name a file that the trainer can read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error


def _stop_token_ids(model: Path, tokenizer: Any, config: Any) -> tuple[int, ...]:
    """Return the tokenizer's end token and those that the model's generation settings add."""
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    sources = [config.eos_token_id]
    if (model / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id)
    for ids in sources:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    if not found:
        raise ConfigError(
            f"model {model}: neither tokenizer nor config names an end token (eos): completions never end"
        )
    outside = [token for token in found if token >= config.vocab_size]
    if outside:
        raise ConfigError(
            f"model {model}: the end token {outside[0]} is outside the model's vocabulary of {config.vocab_size}: the "
            "tokenizer and the model in this directory do not belong together"
        )
    return tuple(sorted(found))
