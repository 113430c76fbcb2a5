"""The section of a job file about its rows: each kind of job reads others."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from pydantic import Field

from shared.curriculum import CurriculumSpec
from shared.ids import MAX_GROUPS_PER_STEP
from shared.shards import Source
from shared.validation import Section


class Rows(NamedTuple):
    """Rows that a job file names."""

    field: str
    source: Source
    split: str


class DataSpec(Section):
    """Where rows come from, as jobs of every kind say it; extra columns reach the reward.

    `.jsonl` files with one problem a line, `.jsonl.gz` and `.parquet` files, patterns and folders of such files,
    folders or ids of Hugging Face datasets; or a list of these.
    """

    subset: str | None = None
    """Of a Hugging Face dataset with several (its configuration)."""
    prompt_key: str = "prompt"
    """Where a row holds its prompt: text, or chat messages, which go through the model's chat template."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Rows with longer prompts are left out, and counted."""

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Return all rows that are named."""
        named = {name: getattr(self, name, None) for name in ("train", "eval")}
        return tuple(
            Rows(f"data.{name}", source, getattr(self, f"{name}_split")) for name, source in named.items() if source
        )

    @property
    def limits(self) -> str:
        """Return what rows are left out for, in words."""
        most = {name: getattr(self, name, None) for name in ("max_prompt_tokens", "max_completion_tokens")}
        return " or ".join(f"more than {n} tokens (data.{name})" for name, n in most.items() if n is not None)


class TrainDataSpec(DataSpec):
    """What is trained on."""

    train: Source
    eval: Source | None = None
    """Held-out rows: for the job's own evaluations, or for `rlboost eval` of its job file."""
    train_split: str = "train"
    """Of a Hugging Face dataset with several."""
    eval_split: str = "test"
    prompts_per_step: int = Field(32, ge=1, lt=MAX_GROUPS_PER_STEP)


class RlDataSpec(TrainDataSpec):
    """Prompts to learn from."""

    curriculum: CurriculumSpec | None = None
    """Which prompts are skipped for what became of them before."""


class SftDataSpec(TrainDataSpec):
    """Prompts with completions to imitate."""

    curriculum: ClassVar[None] = None
    completion_key: str = "completion"
    """Where a row holds what is to be imitated: text, or chat messages of the assistant."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Rows with longer completions are left out, and counted."""


class EvalDataSpec(DataSpec):
    """Held-out prompts alone."""

    train: ClassVar[None] = None
    prompts_per_step: ClassVar[int] = 0
    curriculum: ClassVar[None] = None
    eval: Source
    eval_split: str = "test"
