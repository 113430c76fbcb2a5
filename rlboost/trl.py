"""TRL's `GRPOTrainer` on a fleet of spot workers.

    with Fleet("http://manager:8700", token, job="sums", model="Qwen/Qwen3-0.6B") as fleet:
        trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=score, rollout_func=rollout_func(fleet), ...)
        trainer.train()

The trainer publishes its weights before it samples with them, so every completion is of the policy that is trained.
Written for TRL 1.16; `rollout_func` is experimental there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from rlboost.fleet import Fleet, Sample
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.http.clients import http_client
from rlboost.shared.ids import MAX_GROUP_SIZE
from rlboost.shared.proxies import internal
from rlboost.shared.secrets import clean_url

RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]
"""TRL's: from the prompts of this process and the trainer to prompt ids, completion ids and log-probabilities."""

_UNSUPPORTED = {"top_k": (None, 0, -1), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
"""Argument of `GRPOConfig` -> the values with which it changes nothing."""


def rollout_func(fleet: Fleet) -> RolloutFunc:
    """Return the `rollout_func` of a `GRPOTrainer`, which samples on an open fleet.

    Sampling is as `GRPOConfig` says (`temperature`, `top_p`, `max_completion_length`).
    """
    return _Rollout(fleet)


class _Rollout:
    """What TRL calls; it counts the steps of its trainer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._published_at = -1
        """The trainer's step whose weights are the newest version."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample a completion of each prompt; equal prompts that follow each other are a group."""
        _check(trainer)
        self._publish(trainer)
        prompt_ids = _tokenized(prompts, trainer)
        groups = [(list(ids), len(list(same))) for ids, same in itertools.groupby(prompt_ids)]
        samples = [one for made in self._sampled(groups, trainer.args, trainer.eos_token_ids) for one in made]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.tokens for sample in samples],
            "logprobs": [sample.logprobs for sample in samples],
        }

    def _publish(self, trainer: Any) -> None:
        """Publish the weights if the trainer has changed them; the step before is complete then."""
        step = int(trainer.state.global_step)
        if step == self._published_at:
            return
        if self._published_at >= 0:
            logged = trainer.state.log_history[-1] if trainer.state.log_history else {}
            metrics = {name: float(value) for name, value in logged.items() if _is_number(value)}
            self._fleet.checkpointed(metrics)
        self._fleet.publish(trainer.accelerator.unwrap_model(trainer.model))
        self._published_at = step

    def _sampled(
        self, groups: Sequence[tuple[list[int], int]], args: Any, eos_token_ids: Sequence[int]
    ) -> list[list[Sample]]:
        """Return the samples of each group; raises `Fatal` if one was dropped."""
        found: list[list[Sample]] = [[] for _ in groups]
        sampling = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "max_tokens": args.max_completion_length,
            "stop_token_ids": eos_token_ids,
        }
        # A call has one number of samples for all its prompts, and a group at most so many.
        for size in sorted({size for _, size in groups}):
            if size > MAX_GROUP_SIZE:
                raise ConfigError(f"num_generations: a prompt is repeated {size} times: at most {MAX_GROUP_SIZE}")
            of_size = [i for i, (_, n) in enumerate(groups) if n == size]
            for group in self._fleet.generate([groups[i][0] for i in of_size], n=size, **sampling):
                if group.dropped:
                    raise Fatal(f"the fleet has dropped {len(group.dropped)} of {size} samples: {group.dropped[0]}")
                found[of_size[group.index]] = group.samples
        return found


def _check(trainer: Any) -> None:
    """Refuse what would be sampled otherwise than asked for.

    Raises:
        ConfigError: naming it.

    """
    for name, neutral in _UNSUPPORTED.items():
        if (value := getattr(trainer.args, name, None)) not in neutral:
            raise ConfigError(f"{name}: {value} is not supported with rollout_func on a fleet: remove it")
    if getattr(trainer.args, "generation_kwargs", None):
        raise ConfigError("generation_kwargs: not supported with rollout_func on a fleet: remove it")
    if trainer.accelerator.num_processes > 1:
        raise ConfigError("rollout_func on a fleet needs one training process: several are not supported")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise ConfigError("peft_config: not supported with rollout_func on a fleet: train the whole model")


def _tokenized(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return the token ids of prompts, which are texts or conversations, as `GRPOTrainer` tokenizes them."""
    if isinstance(prompts[0], str):
        ids: list[list[int]] = trainer.processing_class(text=prompts)["input_ids"]
        return ids
    rendered = trainer.processing_class.apply_chat_template(
        conversation=prompts,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(trainer.args.chat_template_kwargs or {}),
    )
    return [list(ids) for ids in rendered["input_ids"]]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class WeightTransfer:
    """The `weight_transfer` of TRL's `AsyncGRPOTrainer`, for `rlboost gateway` as its `vllm_server_base_url`.

    It writes the weights to a folder that the gateway reads: both run on one machine, or share the folder.

    Args:
        url: of the gateway, with its key as the password if it has one.
        folder: where the weights are written; by default a temporary folder.
        timeout_s: limit of one update.

    """

    def __init__(self, url: str, folder: str | Path = "", timeout_s: float = 1800.0) -> None:
        """Write nothing yet."""
        self._temporary = None if folder else TemporaryDirectory(prefix="rlboost-weights-")
        self._folder = Path(folder or getattr(self._temporary, "name", ""))
        given = httpx.URL(clean_url("url", url))
        # Not in the URL, which errors and httpx's log lines show.
        auth = (given.username, given.password) if given.userinfo else None
        self._url = str(given.copy_with(userinfo=b"")).rstrip("/")
        self._http = http_client(internal, auth=auth, timeout=timeout_s)

    def init_weight_transfer(self) -> None:
        """Check that the gateway answers, and takes the key in its URL."""
        self._request("GET", "/is_paused")

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publish the tensors as the next version."""
        from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

        self._folder.mkdir(parents=True, exist_ok=True)
        # Of tensors that share memory, save_file takes none.
        found = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in iterator}
        save_file(found, self._folder / "model.safetensors")
        self._request("POST", "/update_weights", {"update_info": {"path": str(self._folder.absolute())}})

    def pause(self) -> None:
        """Hold new requests; samples in flight continue while workers pull the weights."""
        self._request("POST", "/pause")

    def resume(self) -> None:
        """Let requests begin."""
        self._request("POST", "/resume")

    def destroy(self) -> None:
        """Remove the folder, if it is temporary."""
        self._http.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        url = f"{self._url}{path}"
        try:
            answer = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise Fatal(f"{url}: {str(error) or type(error).__name__}") from error
        if not answer.is_success:
            raise Fatal(f"{url}: {answer.status_code}: {answer.text[:500]}")
