"""The data section of a job file, for each kind of job."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, Field

from rlboost.shared.data.messages import TEMPLATE_KWARGS, template_kwargs_of
from rlboost.shared.data.rows import Source
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import MAX_GROUPS_PER_STEP
from rlboost.shared.job.training import CurriculumSpec
from rlboost.shared.validation import Section


class Rows(NamedTuple):
    """One source of rows in a job file."""

    field: str
    source: Source
    split: str
    subset: str | None
    prompt_key: str


def _template_kwargs(value: object) -> dict[str, Any]:
    try:
        found = template_kwargs_of(value)
        if json.loads(json.dumps(found, allow_nan=False)) == found:
            return found
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(f"{TEMPLATE_KWARGS!r} ")) from error
    except (TypeError, ValueError):
        pass
    raise ValueError("should have names and values of JSON only: text, numbers, true, false, lists and mappings")


class DataSpec(Section):
    """The source of rows, for all kinds of jobs; additional columns are passed to the reward.

    `.jsonl` files with one problem a line, `.jsonl.gz`, `.jsonl.zst`, `.parquet`, `.json` and `.csv` files, patterns
    of such files and folders of shards, folders or ids of Hugging Face datasets; or a list of these.
    """

    subset: str | None = None
    """The configuration of a Hugging Face dataset that has several."""
    prompt_key: str = "prompt"
    """The column of the prompt: text, or chat messages, which the model's chat template renders."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_kwargs)] = Field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`, wherever it renders messages for the job: rows,
    environments, calls of agents and chats with its model. Those of a row or a call come first."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Rows with longer prompts are left out and counted."""
    max_image_pixels: int | None = Field(None, ge=1)
    """Larger images are made smaller, to at most this many pixels; by default those of the model's image processor. An
    image has at most 1.39 million."""

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Return all sources of rows."""
        named = {name: getattr(self, name, None) for name in ("train", "eval")}
        return tuple(
            Rows(f"data.{name}", source, getattr(self, f"{name}_split"), self.subset, self.prompt_key)
            for name, source in named.items()
            if source
        )

    @property
    def limits(self) -> str:
        """Describe the limits beyond which rows are skipped."""
        most = {name: getattr(self, name, None) for name in ("max_prompt_tokens", "max_completion_tokens")}
        return " or ".join(f"more than {n} tokens (data.{name})" for name, n in most.items() if n is not None)


class TrainDataSpec(DataSpec):
    """Training data."""

    train: Source
    """Training rows: a file, a pattern, a folder, the id of a Hugging Face dataset, `agent:rows` for those that the
    job's agent has, or a list of these."""
    eval: Source | None = None
    """Held-out rows, for the job's evaluations and for `rlboost eval` with its job file."""
    train_split: str = "train"
    """Split of a Hugging Face dataset for training."""
    eval_split: str = "test"
    """Split of a Hugging Face dataset for evaluation."""
    prompts_per_step: int = Field(32, ge=1, lt=MAX_GROUPS_PER_STEP)
    """Prompts per step; with kind `sft`, rows per step; with kinds `dpo` and `reward`, pairs per step."""


class PromptDataSpec(DataSpec):
    """Prompts whose completions the model generates."""

    system_prompt: str | None = None
    """Makes each prompt that is text a message of the user, which the chat template renders after a system message with
    this text, or alone if it is empty (`""`). Prompts of chat messages get the system message, too; those that have one
    are an error."""


class RlDataSpec(PromptDataSpec, TrainDataSpec):
    """Prompts for reinforcement learning."""

    curriculum: CurriculumSpec | None = None
    """Skips prompts because of the rewards of their earlier groups."""


class OfflineDataSpec(TrainDataSpec):
    """Prompts with completions."""

    system_prompt: ClassVar[None] = None
    curriculum: ClassVar[None] = None
    max_completion_tokens: int | None = Field(None, ge=1)
    """Rows with longer completions are left out and counted."""


class SftDataSpec(OfflineDataSpec):
    """Prompts with completions for supervised fine-tuning."""

    completion_key: str = "completion"
    """The column of the completion: text, or chat messages of the assistant."""
    assistant_only_loss: bool = False
    """Train every turn of the assistant in chat messages, tool calls included, each as an example of its own."""


class DpoDataSpec(OfflineDataSpec):
    """Prompts with a better and a worse completion, in the formats of TRL's `DPOTrainer`."""

    chosen_key: str = "chosen"
    """The column of the better completion: text, chat messages of the assistant, or a conversation that both
    completions begin with, and that is the prompt."""
    rejected_key: str = "rejected"
    """The column of the worse completion, of the same form."""


class RewardDataSpec(DpoDataSpec):
    """Pairs of whole conversations, in the formats of TRL's `RewardTrainer`, whose column `margin` they may have.

    Or conversations with a `completion` and a `label`.
    """


class EvalDataSpec(PromptDataSpec):
    """Held-out prompts only."""

    train: ClassVar[None] = None
    prompts_per_step: ClassVar[int] = 0
    curriculum: ClassVar[None] = None
    eval: Source | None = None
    """Held-out rows, for the job's evaluations and for `rlboost eval` with its job file."""
    eval_split: str = "test"
    """Split of a Hugging Face dataset for evaluation."""
