"""Loads a job's prompts, SFT examples or pairs as token ids, and finds the model's directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from rlboost.services.trainer.adapters.agent_rows import rows_of
from rlboost.services.trainer.adapters.environment_pool import TokenizerChatFormatter
from rlboost.services.trainer.adapters.images import NO_IMAGES, PromptImages, TakenImages
from rlboost.services.trainer.adapters.tokens import UNLOADABLE, PromptTokenizer
from rlboost.services.trainer.domain.conversations import Decode
from rlboost.services.trainer.ports.samples import Data, Prompt
from rlboost.shared.data.examples import (
    LABEL,
    MARGIN,
    Example,
    TextExample,
    examples_of,
    labelled_of,
    margin_of,
    pair_of,
    prompt_of,
)
from rlboost.shared.data.images import conversation_key, n_before_answer
from rlboost.shared.data.messages import ASSISTANT, TEMPLATE_KWARGS, TOOLS, template_kwargs_of, tools_of
from rlboost.shared.data.rows import Row, format_source, is_messages, read_rows
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import TEACHER
from rlboost.shared.job.data import DpoDataSpec, OfflineDataSpec, RewardDataSpec, Rows, SftDataSpec, require_splits
from rlboost.shared.job.fleet import HeldOutSet
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.model.folder import merge_eos_ids, require_tokenizer
from rlboost.shared.user_code import RAW_ARGUMENTS, TRL_ARGUMENTS
from rlboost.shared.wire import I32, length, pack

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def find_model(model: str, field: str = "model") -> Path:
    """Return the local directory of a Hugging Face model, downloaded if `model` is not a directory.

    Args:
        model: a directory or id.
        field: the key of the job file that names it, for errors.

    Raises:
        ConfigError: it is neither a directory nor a model that can be downloaded.

    """
    if Path(model).is_dir():
        return Path(model)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"{field}: {model!r} is not a directory on the trainer's machine: correct the path")
    try:
        return Path(snapshot_download(model, allow_patterns=_MODEL_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{field}: {model!r} is not a directory and cannot be downloaded ({reason}): name a directory "
            "with config.json and *.safetensors, or an id such as Qwen/Qwen3-0.6B (HF_TOKEN for private ones)"
        ) from error


class LoadedTokenizer(NamedTuple):
    """What the files of a model say about tokens."""

    tokenizer: Any
    """Of transformers."""
    config: Any
    """The model's configuration, of transformers."""
    end_ids: tuple[int, ...]
    """The tokens that end a completion."""
    prompts: PromptTokenizer


def load_tokenizer(model: Path, created: datetime | None, template_kwargs: Mapping[str, Any]) -> LoadedTokenizer:
    """Load a model's tokenizer; see `PromptTokenizer` for the arguments.

    Raises:
        ConfigError: the directory has none, or it does not match the model.

    """
    require_tokenizer(model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        config: Any = AutoConfig.from_pretrained(model, local_files_only=True)
    except UNLOADABLE as error:
        raise ConfigError(f"model {model}: tokenizer and config.json cannot be loaded: {error}") from error
    text = config.get_text_config()
    end_ids = _stop_token_ids(model, tokenizer, text)
    return LoadedTokenizer(
        tokenizer, config, end_ids, PromptTokenizer(tokenizer, text, end_ids, created, template_kwargs)
    )


class RewardTokenizer:
    """The tokenizer and chat template of a reward model, which may be other than the policy's."""

    def __init__(self, folder: Path, created: datetime, template_kwargs: Mapping[str, Any], *, has_chats: bool) -> None:
        """Load it from a directory; see `PromptTokenizer` for the arguments.

        Raises:
            ConfigError: prompts are chat messages (`has_chats`), and it has no chat template.

        """
        self.loaded = load_tokenizer(folder, created, template_kwargs)
        if has_chats and self.loaded.tokenizer.chat_template is None:
            raise ConfigError(
                "prompts are chat messages, and its tokenizer has no chat template: add chat_template.jinja"
            )

    def tokens(self, prompt: Any, completion: Any, columns: Mapping[str, Any], *, n_more: int = 0) -> list[int]:
        """Return the token ids of a prompt with its completion, both in the form of `RewardBatch`.

        Args:
            prompt: text or messages.
            completion: likewise.
            columns: of the row.
            n_more: how many tokens follow.

        Raises:
            ConfigError: the tokenizer or the chat template refuses them, or the model has too few positions.

        """
        prompts = self.loaded.prompts
        if isinstance(prompt, str):
            ids = prompts.scored(prompt, completion)
        else:
            if prompt[-1]["role"] == ASSISTANT:  # which the completion continues
                start, (answer,) = prompt[-1], completion
                prompt, completion = prompt[:-1], [{**answer, "content": start["content"] + answer["content"]}]
            tools, kwargs = tools_of(columns.get(TOOLS)), template_kwargs_of(columns.get(TEMPLATE_KWARGS))
            ids = prompts.scored(prompt, completion, tools, kwargs)
        if not prompts.fit(len(ids) + n_more):
            raise ConfigError(
                f"a conversation has {len(ids)} tokens of the reward model, which has {prompts.max_length} "
                "positions: lower sampling.max_tokens or data.max_prompt_tokens"
            )
        return ids


def load_data(spec: JobSpec, model: Path, created: datetime | None = None, image_folder: Path | None = None) -> Data:
    """Read and tokenize all prompts of a job.

    Many chat templates print the date. A job has the one of its creation in all of its prompts, however long it runs:
    prompts are tokenized again when a trainer resumes it, and must be those of its samples, its checkpoint's digest of
    the data and its earlier evaluations. A digest of the rows as given would hide such a change, not prevent it.

    Args:
        spec: the job file.
        model: the model's directory.
        created: when the job was created; None: now.
        image_folder: where to write the images of prompts; None: nowhere.

    Raises:
        ConfigError: a file, a line or the tokenizer is invalid; the text names it.

    """
    tokenizer, config, end_ids, tokens = load_tokenizer(model, created, spec.data.chat_template_kwargs)
    if spec.agent is not None and tokenizer.chat_template is None:
        raise ConfigError(
            f"agent: model {model} has no chat template, which an agent's calls need: use a model that has one, or add "
            "its chat_template.jinja"
        )
    require_splits(spec.rows)
    images = PromptImages(spec, model, config.to_dict(), image_folder)
    training = (_Reader(spec, tokens, images, rows).read() for rows in spec.data.rows if rows.field == "data.train")
    train, n_long = next(training, ([], 0))
    read = [_Reader(spec, tokens, images, one.rows, one).read() for one in spec.held_out]
    held_out = [prompts for prompts, _ in read]
    return Data(
        train=train,
        evaluation=list(chain.from_iterable(held_out)),
        n_evaluation=list(map(len, held_out)),
        n_too_long=n_long,
        n_too_long_eval=sum(n for _, n in read),
        stop_token_ids=end_ids,
        pad_id=tokens.pad_id,
        call_style=tokens.call_style,
        ignored_keys=tokens.ignored_keys,
        split_tokens=tokens.split_tokens,
        advice=[*_turn_advice(spec, tokens), *_prefill_advice(spec, [train, *held_out])],
        vocab_size=int(config.get_text_config().vocab_size),
        decode=_decoder(tokenizer),
        chat_formatter=TokenizerChatFormatter(tokens) if spec.environment is not None else None,
    )


def _turn_advice(spec: JobSpec, tokens: PromptTokenizer) -> Iterator[str]:
    """Yield a warning if the chat template ends turns with a token at which no completion ends."""
    if spec.kind != "reward" and (tokens.has_rendered or spec.agent is not None) and (end := tokens.unended_turn):
        yield (
            f"model: its chat template ends a turn with {end!r}, at which completions do not end, so they run on: add "
            "its id to eos_token_id in the model's generation_config.json"
        )


def _prefill_advice(spec: JobSpec, read: Sequence[Sequence[Prompt]]) -> Iterator[str]:
    """Yield a warning for each source whose prompts all end with an answer, as rows for fine-tuning do.

    Args:
        spec: the job file.
        read: prompts of the training rows, then of each held-out set.

    """
    if isinstance(spec, OfflineJob):
        return
    fields = ["data.train", *(one.rows.field for one in spec.held_out)]
    for field, prompts in zip(fields, read, strict=True):
        given = [prompt.given for prompt in prompts]
        if given and all(is_messages(one) and one[-1]["role"] == ASSISTANT for one in given):
            yield (
                f"{field}: every prompt ends with an assistant message, which the model continues: if these are "
                "reference answers, remove them from the messages, or train on them with kind: sft"
            )


def check_teacher(spec: JobSpec, data: Data, teacher: Path) -> None:
    """Check that a teacher has as many positions as the job's samples may have tokens, but for sessions of agents.

    Raises:
        ConfigError: it has fewer.

    """
    try:
        config = AutoConfig.from_pretrained(teacher, local_files_only=True).get_text_config()
    except UNLOADABLE as error:
        raise ConfigError(f"{TEACHER}: config.json of {teacher} cannot be loaded: {error}") from error
    positions: int | None = getattr(config, "max_position_embeddings", None)
    longest = max((length(prompt.tokens) for prompt in data.train), default=0)
    if spec.agent is None and positions and longest + spec.sampling.max_tokens > positions:
        raise ConfigError(
            f"{TEACHER}: {teacher} has {positions} positions, fewer than the {longest} tokens of the longest prompt "
            f"and sampling.max_tokens {spec.sampling.max_tokens}: lower these, set data.max_prompt_tokens, or use a "
            "teacher with more"
        )


def _decoder(tokenizer: Any) -> Decode:
    def decode(tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    return decode


class _Reader:
    """Reads one source of rows."""

    def __init__(
        self,
        spec: JobSpec,
        tokens: PromptTokenizer,
        images: PromptImages,
        rows: Rows,
        held_out: HeldOutSet | None = None,
    ) -> None:
        self._spec = spec.data
        self._images = images
        self._rows = rows
        self._agent_rows = rows_of(spec.agent)
        self._needs_messages = bool(spec.data.chat_template_kwargs) and spec.conversation is None
        self._max_tokens = (spec if held_out is None else held_out).sampling.max_tokens
        self._limit = f"{held_out.section}.sampling.max_tokens" if held_out and held_out.name else "sampling.max_tokens"
        self._tokens = tokens
        self._is_centered = spec.kind == "reward" and spec.algorithm.center_rewards_coefficient > 0

    def read(self) -> tuple[list[Prompt], int]:
        """Return the prompts, and the number of rows left out for their length."""
        found, n_long, source = [], 0, self._rows.source
        for row in read_rows(source, self._rows.split, self._rows.subset, self._agent_rows):
            prompts = self._prompts(row, f"{row.source}, {row.place}")
            n_long += prompts.count(None)
            found += [prompt for prompt in prompts if prompt is not None]
        if isinstance(self._spec, RewardDataSpec) and len({bool(prompt.rejected) for prompt in found}) > 1:
            raise ConfigError(f"{format_source(source)}: some rows have a pair, others a label: give rows of one form")
        if self._is_centered and any(LABEL in prompt.columns for prompt in found):
            raise ConfigError("algorithm.center_rewards_coefficient is for pairs, and rows have labels: remove it")
        if found:
            return found, n_long
        if n_long:
            raise ConfigError(f"{format_source(source)}: all {n_long} prompts have {self._spec.limits}: raise it")
        raise ConfigError(
            f"{format_source(source)} has no prompts: give one JSON object per line, or one row per prompt"
        )

    def _prompts(self, row: Row, location: str) -> list[Prompt | None]:
        """Return the prompts of a row, None for each that is too long."""
        match self._spec:
            case SftDataSpec() as spec:
                return self._examples(spec, row, location)
            case RewardDataSpec() as spec:
                return [self._scored(spec, row, location)]
            case DpoDataSpec() as spec:
                return [self._pair(spec, row, location)]
        return [self._prompt(row, location)]

    def _prompt(self, row: Row, location: str) -> Prompt | None:
        """Return the row as a prompt, None if it is too long."""
        key = self._rows.prompt_key
        for name in (*TRL_ARGUMENTS, *RAW_ARGUMENTS):
            if name in row.values and name != key:
                raise ConfigError(f"{location}: a column named {name!r} hides a reward function argument: rename it")
        with _naming(location):
            shown = self._images.take(row.values, key, row.source)
            prompt = prompt_of(shown.values, key, self._spec.system_prompt)
            self._check_is_rendered(is_text=isinstance(prompt.given, str))
            ids = self._images.expanded(self._tokens.prompt(*prompt), shown.grids)
        if _is_longer(ids, self._spec.max_prompt_tokens):
            return None
        if not self._tokens.fit(len(ids) + self._max_tokens):
            raise ConfigError(
                f"{location}: {len(ids)} prompt tokens and {self._limit} {self._max_tokens} do not fit the "
                f"model's {self._tokens.max_length} positions: shorten the prompt, lower {self._limit}, or set "
                "data.max_prompt_tokens to leave such prompts out"
            )
        columns = {name: value for name, value in shown.values.items() if name != key} | shown.columns
        _check_columns(columns, location)
        return Prompt(prompt.given, pack(ids, I32), columns, images=shown.refs)

    def _check_is_rendered(self, *, is_text: bool) -> None:
        if is_text and self._needs_messages:
            system = "" if isinstance(self._spec, OfflineDataSpec) else "set data.system_prompt, "
            raise ConfigError(
                f"the prompt is text, which no chat template renders: give chat messages, {system}or remove "
                "data.chat_template_kwargs"
            )

    def _examples(self, spec: SftDataSpec, row: Row, location: str) -> list[Prompt | None]:
        """Return the prompts of a row with their completions, None for each that is too long."""
        with _naming(location):
            shown = self._images.take(row.values, conversation_key(row.values, self._rows.prompt_key), row.source)
            keys = self._rows.prompt_key, spec.completion_key
            examples = examples_of(shown.values, *keys, every_turn=spec.assistant_only_loss)
        return [self._example(spec, example, location, shown) for example in examples]

    def _pair(self, spec: DpoDataSpec, row: Row, location: str) -> Prompt | None:
        """Return the prompt of a row with both completions, None if one is too long."""
        with _naming(location):
            pair = pair_of(row.values, self._rows.prompt_key, spec.chosen_key, spec.rejected_key)
        chosen, rejected = (self._example(spec, example, location) for example in pair)
        if chosen is None or rejected is None:
            return None
        if chosen.completion == rejected.completion:
            raise ConfigError(f"{location}: both completions have the same tokens, so neither is better: leave it out")
        return replace(chosen, rejected=rejected.completion)

    def _example(
        self, spec: OfflineDataSpec, example: Example, location: str, shown: TakenImages = NO_IMAGES
    ) -> Prompt | None:
        """Return a row's example, which has the images before its completion; None if it is too long."""
        with _naming(location):
            self._check_is_rendered(is_text=isinstance(example, TextExample))
            if isinstance(example, TextExample):
                ids = self._tokens.prompt(example.prompt)
                target = self._tokens.completion(example.prompt, example.completion)
            else:
                ids = self._tokens.prompt(example.prompt, example.tools, example.kwargs, is_open=False)
                target = self._tokens.answer(*example)
            n_images = n_before_answer(example) if shown.refs else 0
            ids = self._images.expanded(ids, shown.grids[:n_images])
        found = self._fitting(spec, example, ids, target, location)
        if found is None or not (images := shown.refs[:n_images]):
            return found
        # A resumed job compares the columns.
        return replace(found, images=images, columns={"images": [ref.digest for ref in images]})

    def _scored(self, spec: RewardDataSpec, row: Row, location: str) -> Prompt | None:
        """Return a pair of conversations, parted where their tokens differ, or a labelled one; None: it is too long."""
        with _naming(location):
            if (labelled := labelled_of(row.values, self._rows.prompt_key, spec.chosen_key)) is not None:
                example, label = labelled
                self._check_is_rendered(is_text=isinstance(example, TextExample))
                ids = self._tokens.scored(*example)
                found = self._fitting(spec, example, ids[:1], ids[1:], location)
                return found and replace(found, columns={LABEL: label})
            pair = pair_of(row.values, self._rows.prompt_key, spec.chosen_key, spec.rejected_key)
            margin = margin_of(row.values)
            self._check_is_rendered(is_text=isinstance(pair[0], TextExample))
            chosen, rejected = (self._tokens.scored(*example) for example in pair)
        if chosen == rejected:
            raise ConfigError(f"{location}: both completions have the same tokens, so neither is better: leave it out")
        # One may be the beginning of the other; each keeps its last token, which has the score.
        n_shared = min(len(chosen), len(rejected)) - 1
        n = next((i for i in range(n_shared) if chosen[i] != rejected[i]), n_shared)
        better, worse = (self._fitting(spec, pair[0], ids[:n], ids[n:], location) for ids in (chosen, rejected))
        if better is None or worse is None:
            return None
        return replace(better, rejected=worse.completion, columns={} if margin is None else {MARGIN: margin})

    def _fitting(
        self, spec: OfflineDataSpec, example: Example, ids: list[int], target: list[int], location: str
    ) -> Prompt | None:
        """Return a prompt and what follows it, None if one of them is too long."""
        if _is_longer(ids, spec.max_prompt_tokens) or _is_longer(target, spec.max_completion_tokens):
            return None
        if not self._tokens.fit(len(ids) + len(target)):
            raise ConfigError(
                f"{location}: {len(ids)} prompt and {len(target)} completion tokens do not fit the model's "
                f"{self._tokens.max_length} positions: shorten them, or set data.max_prompt_tokens and "
                "data.max_completion_tokens to leave such rows out"
            )
        return Prompt(example.prompt, pack(ids, I32), {}, pack(target, I32))


@contextmanager
def _naming(location: str) -> Iterator[None]:
    """Name the row in the errors of its content."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from error


def _is_longer(ids: list[int], most: int | None) -> bool:
    return most is not None and len(ids) > most


def _check_columns(columns: dict[str, Any], location: str) -> None:
    """Reject values that cannot be sent to a reward function, such as dates."""
    for name, value in columns.items():
        try:
            msgpack.packb(value)
        except (OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{location}: column {name!r} cannot be sent to the reward function ({error}): make it text, a number "
                "of at most 64 bits, or lists and structs of these, or leave it out"
            ) from error


def _stop_token_ids(model: Path, tokenizer: Any, config: Any) -> tuple[int, ...]:
    """Return the end tokens of the tokenizer, the model's config and its generation config."""
    generation_ids = None
    if (model / "generation_config.json").is_file():
        generation_ids = GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id
    found = merge_eos_ids(tokenizer.eos_token_id, config.eos_token_id, generation_ids)
    if not found:
        raise ConfigError(
            f"model {model}: neither tokenizer nor config names an end token (eos): completions never end"
        )
    outside = [token for token in found if token >= config.vocab_size]
    if outside:
        raise ConfigError(
            f"model {model}: the end token {outside[0]} is outside the model's vocabulary of {config.vocab_size}: the "
            "tokenizer and the model in this directory do not match"
        )
    return found
