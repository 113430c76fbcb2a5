"""The other models of a job: their folders, weights and tokenizers. Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.data import find_model, load_tokenizer
from rlboost.services.trainer.adapters.served_scores import ServedScores
from rlboost.services.trainer.adapters.weights import StorePublisher
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.services.trainer.ports.storage import OtherModel
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.base import served_id
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.reward import column_problem
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.model.folder import require_served_model
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.torch_tensors import named_shards
from rlboost.shared.wire import I32, ints, pack


def other_models(
    spec: JobSpec,
    job_id: str,
    created: datetime,
    prompts: Sequence[Prompt],
    *,
    connect: Callable[[], StoreClient],
    folder: Path,
    waits: Waits,
    limit_s: float,
) -> dict[str, OtherModel]:
    """Return the other models of a job by name.

    Args:
        spec: the job file.
        job_id: the job's id.
        created: when the job was created, which chat templates may print.
        prompts: all of the data.
        connect: returns a client of the weight store.
        folder: of the job.
        waits: registry of waits.
        limit_s: how long the weight store may be unavailable.

    Raises:
        ConfigError: a folder, or the prompt of a judge, is invalid.

    """
    if isinstance(spec, OfflineJob):
        return {}
    columns = {name for prompt in prompts for name in prompt.columns}
    judges = [part.judge for part in spec.served_parts if part.judge is not None]
    for judge in judges:
        if problem := column_problem(judge.prompt, columns, "the data"):
            raise ConfigError(problem)
    has_chats = any(not isinstance(prompt.given, str) for prompt in prompts)
    judging = {judge.model for judge in judges}
    found = {}
    for name, model in spec.models.items():
        field = f"models.{name}.model"
        place, scores = find_model(model.model, field), None
        require_served_model(place, field, scores=name in spec.served_reward_models)
        if name in spec.served_reward_models:
            try:
                scores = ServedScores(place, created, spec.data.chat_template_kwargs, has_chats=has_chats)
            except ConfigError as error:
                raise ConfigError(f"{field}: {place}: {error}") from error
        serving = served_id(job_id, name)
        config_json = scores.config_json if scores else (place / "config.json").read_text(encoding="utf-8")
        found[name] = OtherModel(
            serving,
            StorePublisher(connect(), serving, config_json, folder / f"pulled-{name}", waits, limit_s),
            scores.shards if scores else partial(named_shards, place),
            JudgeTokenizer(name, place, created) if name in judging else None,
            scores,
        )
    return found


class JudgeTokenizer:
    """`ChatTokenizer` of a model's folder."""

    def __init__(self, name: str, folder: Path, created: datetime) -> None:
        """Load it; see `other_models`."""
        loaded = load_tokenizer(folder, created, {})
        if loaded.tokenizer.chat_template is None:
            raise ConfigError(
                f"models.{name}.model: {folder} has no chat template, with which a judge is asked: use a model that "
                "has one, or add its chat_template.jinja"
            )
        self.stop_token_ids = loaded.end_ids
        self.vocab_size = int(loaded.config.get_text_config().vocab_size)
        self._tokenizer: Any = loaded.tokenizer
        self._tokens = loaded.prompts

    def question(self, text: str, max_tokens: int) -> bytes:
        """See `ChatTokenizer.question`."""
        ids = self._tokens.prompt([{"role": "user", "content": text}])
        if not self._tokens.fit(len(ids) + max_tokens):
            raise ConfigError(
                f"its question has {len(ids)} tokens, and with judge.max_tokens ({max_tokens}) more than the judge's "
                f"{self._tokens.max_length} positions"
            )
        return pack(ids, I32)

    def decode(self, tokens: bytes) -> str:
        """See `ChatTokenizer.decode`."""
        return str(self._tokenizer.decode(ints(tokens), skip_special_tokens=True))
