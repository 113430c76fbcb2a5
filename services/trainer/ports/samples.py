"""Where training data come from: prompts, the user's environments, and the user's reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlboost.services.trainer.domain.conversations import Decode
from rlboost.shared.data.vision import ImageRef
from rlboost.shared.job.environment import Message
from rlboost.shared.job.priced_model import Paid, PaidCall
from rlboost.shared.messages.codec import Span
from rlboost.shared.model.tool_calls import HERMES, CallStyle

# --- The user's environments, and the chat formatting of their messages -----------------------------------------------


class EnvironmentFault(Exception):
    """An environment failed, so its conversation cannot continue; its group and the job do."""

    def __init__(self, reason: str, detail: str) -> None:
        """Describe the fault.

        Args:
            reason: `raised`, `timeout`, `crashed`, `unserializable`, `unformattable`, `too_long` or `nondeterministic`;
                `infrastructure`, of a remote agent; `budget`: that of a priced model is spent;
                or `released`: the conversation was released before the call started.
            detail: for people.

        """
        super().__init__(detail)
        self.reason = f"environment_{reason}"
        self.detail = detail
        self.may_pass = reason in {"raised", "timeout", "crashed", "nondeterministic", "infrastructure"}
        """True if the same row may do better in another conversation."""


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What an environment's `reset` returned: the start of a conversation."""

    prompt: Message | None
    """None: use the prompt of the data row."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools, for the chat template."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment's `step` returned for one turn."""

    observation: Message
    reward: float
    done: bool
    warning: str = ""
    """Shown to the user; empty if there is none."""
    cost: float = 0.0


class CallRecord(Protocol):
    """The job's record of paid calls, by conversation."""

    async def open(self, conversation: int, call: PaidCall) -> Paid | None:
        """See `PaidCalls.open`; raises `RLBoostError`, too, if nothing can be recorded."""

    async def close(self, conversation: int, call: PaidCall, paid: Paid | None) -> None:
        """See `PaidCalls.close`."""

    def lose(self, conversation: int, call: PaidCall) -> None:
        """See `PaidCalls.lose`."""


class Environments(Protocol):
    """The user's environments, one per conversation. Calls return or raise `EnvironmentFault`, and always end."""

    def record_calls(self, record: CallRecord) -> None:
        """Record the paid calls of all conversations from now on. Call it before the first `step`."""

    async def start(self) -> None:
        """Import the environment function.

        Raises:
            ConfigError: it cannot be imported, or creates no environment.

        """

    async def reset(self, row: dict[str, Any], seed: int) -> ResetResult:
        """Return the start of a group's conversations.

        Raises:
            EnvironmentFault: the environment failed.

        """

    async def step(
        self,
        conversation: int,
        row: dict[str, Any],
        seed: int,
        texts: Sequence[str],
        texts_raw: Sequence[str] | None = None,
        in_thought: Sequence[bool] | None = None,
    ) -> list[StepResult]:
        """Pass to a conversation's environment the turns that it has not processed yet, at least the last one.

        An environment that is gone, because its process died or the trainer restarted, is created again and replays all
        turns. Make one call per conversation at a time.

        Args:
            conversation: id of the conversation.
            row: columns of the data row.
            seed: seed of the conversation's group.
            texts: all turns of the model, decoded without special tokens.
            texts_raw: the same with special tokens; None if they have none.
            in_thought: whether each turn begins inside of a thought; None if none does.

        Returns:
            The results of the last turns, one for each that the environment processed in this call.

        Raises:
            EnvironmentFault: the environment failed, or the conversation was released.

        """

    def release(self, conversation: int) -> None:
        """Discard a conversation's environment, if there is one. A queued `step` raises `EnvironmentFault`."""

    def stop(self, conversation: int) -> None:
        """Discard a conversation's environment, and stop the call that runs: it raises `EnvironmentFault`."""

    async def close(self) -> None:
        """Stop the processes that run environments."""


class ChatFormatter(Protocol):
    """Tokenizes prompts and observations. The model's own turns are never tokenized again."""

    max_length: int | None
    """Number of positions of the model, None if its config does not name it."""

    def format_prompt(
        self, prompt: Message, tools: Sequence[dict[str, Any]], columns: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a prompt; chat messages and tools go through the chat template.

        Args:
            prompt: text or chat messages.
            tools: those of the environment.
            columns: those of the data row, which may have `tools` and `chat_template_kwargs`.

        Raises:
            EnvironmentFault: it cannot be formatted.

        """

    def format_observation(
        self,
        prompt: Message,
        last: int,
        observation: Message,
        tools: Sequence[dict[str, Any]],
        columns: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids between one turn of the model and its next.

        Args:
            prompt: what the conversation started with: text or chat messages.
            last: last token id of the turn, which the chat template may write, too.
            observation: what the environment answered.
            tools: as in `format_prompt`.
            columns: as in `format_prompt`.

        Raises:
            EnvironmentFault: it cannot be formatted.

        """


# --- The job's prompts, tokenized -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the data."""

    given: str | list[dict[str, Any]]
    """As given in the file: text or chat messages."""
    tokens: bytes
    """int32 column of token ids: the model's input."""
    columns: dict[str, Any]
    """The line's other keys; of a row for a reward model only its margin, if it has one, or its label."""
    completion: bytes = b""
    """int32 column of token ids including the end token: the target of supervised fine-tuning, or the better completion
    of a pair; empty otherwise."""
    rejected: bytes = b""
    """The same of the worse completion of a pair."""
    images: tuple[ImageRef, ...] = ()
    """Those that `tokens` have places for."""

    @property
    def completions(self) -> tuple[bytes, ...]:
        """Return the completion, of a pair both."""
        return (self.completion, self.rejected) if self.rejected else (self.completion,)


@dataclass(frozen=True, slots=True)
class Data:
    """The job's prompts, and the tokenizer's decoder."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    """The prompts of all held-out sets, in the order of `JobSpec.held_out`."""
    stop_token_ids: tuple[int, ...]
    decode: Decode
    n_evaluation: Sequence[int] = ()
    """Number of prompts of each held-out set."""
    n_too_long: int = 0
    """Training prompts left out because of their length."""
    n_too_long_eval: int = 0
    """Evaluation prompts left out because of their length."""
    chat_formatter: ChatFormatter | None = None
    """Set if the job has an environment."""
    call_style: CallStyle = HERMES
    """How the model writes tool calls."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of chat messages that the chat template does not show, such as an id."""
    split_tokens: Sequence[str] = ()
    """What the chat template writes like a special token, and the tokenizer splits into several tokens."""
    advice: Sequence[str] = ()
    """Warnings about the rows and the chat template."""
    vocab_size: int = 0
    """Number of token ids of the model; 0 if unknown."""
    pad_id: int | None = None
    """The token that pads batches of a reward model."""


# --- The user's reward functions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge or a reward model on workers says of one completion."""

    job_id: str
    """Of the job that serves the model."""
    reward: float | None
    """None if there is none."""
    answer: str
    """A judge's last answer; empty if there is none."""
    spans: Sequence[Span]
    """Which worker generated how many tokens of it with which version."""
    tries: int
    problem: str = ""
    """Why there is no reward."""


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """The arguments of a reward function for one group, in TRL's form: one entry per completion.

    As in TRL, completions are without special tokens.
    """

    prompts: list[str | list[dict[str, Any]]]
    completions: list[str | list[dict[str, Any]]]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    solutions: list[str] = field(default_factory=list)
    """The texts of what the model generated, as in verl: without special tokens and without observations."""
    completions_raw: list[str] = field(default_factory=list)
    """The texts of the completions with special tokens: one that ended by itself has its end token."""
    verdicts: Mapping[str, Sequence[Verdict]] = field(default_factory=dict)
    """Part of the reward -> what its judge wrote about each completion."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of one call of the reward function."""

    rewards: tuple[float, ...] | None
    """One finite number per completion; None if the group could not be scored."""
    reason: str = ""
    """Why not: `timeout`, `raised`, `crashed`, `wrong_length`, `not_a_number`, `too_large`, `missing`,
    `unserializable`."""
    detail: str = ""
    parts: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Function name -> its unweighted reward per completion, if there are several; None where it does not apply."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Reward model, as the job file names it -> digest of its weights."""
    costs: tuple[float, ...] = ()
    """The cost of each completion, of all functions and of its conversation; empty if there are no rewards, or none has
    a cost."""


class RewardFunction(Protocol):
    """The user's reward functions. `score` always returns, whatever the user's code does."""

    async def start(self) -> None:
        """Import the functions.

        Raises:
            ConfigError: a function cannot be imported.

        """

    async def score(self, batch: RewardBatch) -> Scores:
        """Score the completions of one group."""

    async def close(self) -> None:
        """Stop the processes that run them."""
