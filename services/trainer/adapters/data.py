"""Prompts from rows of data, tokenized as the model's own tokenizer does it; the model's directory found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from services.trainer.ports import Data, Prompt
from shared.columns import I32, pack
from shared.errors import ConfigError
from shared.jobspec import JobSpec
from shared.reward_call import TRL_ARGUMENTS
from shared.rows import Row, is_messages, read_rows

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
    train, n_long = reader.read(spec.data.train, spec.data.train_split)
    evaluation: list[Prompt] = []
    n_long_eval = 0
    if spec.eval is not None and spec.data.eval:
        evaluation, n_long_eval = reader.read(spec.data.eval, spec.data.eval_split)
    return Data(
        train=train,
        evaluation=evaluation,
        n_too_long=n_long,
        n_too_long_eval=n_long_eval,
        stop_token_ids=_stop_token_ids(model, tokenizer, config),
        decode=lambda tokens, skip_special: str(tokenizer.decode(tokens, skip_special_tokens=skip_special)),
    )


class _Reader:
    def __init__(self, spec: JobSpec, tokenizer: Any, config: Any) -> None:
        self._spec = spec.data
        self._key = spec.data.prompt_key
        self._max_tokens = spec.sampling.max_tokens
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._max_length = getattr(config, "max_position_embeddings", None)

    def read(self, source: str, split: str) -> tuple[list[Prompt], int]:
        """Return the prompts of a source, and how many were left out for their length."""
        prompts, n_long = [], 0
        for row in read_rows(source, split, self._spec.subset):
            prompt = self._prompt(row, f"{source}, {row.place}")
            if prompt is None:
                n_long += 1
            else:
                prompts.append(prompt)
        if prompts:
            return prompts, n_long
        if n_long:
            raise ConfigError(
                f"{source}: all {n_long} prompts have more than {self._spec.max_prompt_tokens} tokens: raise "
                "data.max_prompt_tokens"
            )
        raise ConfigError(f"{source} has no prompts: give one JSON object a line, or one row a problem")

    def _prompt(self, row: Row, place: str) -> Prompt | None:
        """Return the row as a prompt, None where it is to be left out."""
        if self._key not in row.values:
            known = ", ".join(row.values) or "none"
            raise ConfigError(f"{place}: no key {self._key!r} (keys: {known}): mend the line or set data.prompt_key")
        for name in TRL_ARGUMENTS:
            if name in row.values and name != self._key:
                raise ConfigError(f"{place}: a column named {name!r} hides the reward function's argument: rename it")
        given = row.values[self._key]
        if is_messages(given):
            # A table has every key in every message; those that were not given are null.
            given = [{name: value for name, value in message.items() if value is not None} for message in given]
        tokens = self._tokens(given, place)
        if self._spec.max_prompt_tokens is not None and len(tokens) > self._spec.max_prompt_tokens:
            return None
        self._check_length(tokens, place)
        columns = {name: value for name, value in row.values.items() if name != self._key}
        _check_columns(columns, place)
        return Prompt(given, pack(tokens, I32), columns)

    def _tokens(self, given: object, place: str) -> list[int]:
        if isinstance(given, str):
            tokens = self._tokenizer(given, add_special_tokens=True)["input_ids"]
        elif is_messages(given):
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
        return list(tokens)

    def _check_length(self, tokens: list[int], place: str) -> None:
        if self._max_length is not None and len(tokens) + self._max_tokens > self._max_length:
            raise ConfigError(
                f"{place}: {len(tokens)} prompt tokens and sampling.max_tokens {self._max_tokens} do not fit the "
                f"model's {self._max_length} positions: shorten the prompt, lower sampling.max_tokens, or set "
                "data.max_prompt_tokens to leave such prompts out"
            )

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


def _check_columns(columns: dict[str, Any], place: str) -> None:
    """Refuse what a row may hold and a reward function cannot be sent, such as a date."""
    for name, value in columns.items():
        try:
            msgpack.packb(value)
        except (OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{place}: column {name!r} cannot be given to the reward function ({error}): make it text, a number, "
                "or lists and structs of these, or leave it out"
            ) from error


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
