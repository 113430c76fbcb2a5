"""verl's trainers on a fleet of spot workers.

    VERL_USE_EXTERNAL_MODULES=rlboost.verl python -m verl.trainer.main_ppo \
        actor_rollout_ref.rollout.name=rlboost \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        +actor_rollout_ref.rollout.engine_kwargs.rlboost.job=math ...

verl imports this module in each of its processes, and finds a rollout here: one Ray actor without a GPU, which is the
trainer of an external job. Rank 0 of the actor workers hands it the weights, and verl's agent loops their requests.
Written for verl 0.9.
"""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from rlboost.fleet import AsyncFleet
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.secrets import clean_secret, clean_url

NAME = "rlboost"
_ACTOR = "rlboost-fleet"
"""Of the Ray actor; a run of verl has one, in its own namespace."""
_CONCURRENT = 1 << 16
"""Requests that the actor has in flight at most; more of them wait in Ray."""
_SAMPLING = frozenset({"temperature", "top_p", "min_p", "min_tokens", "stop", "stop_token_ids"})
"""Parameters of verl's requests that a fleet has by the same name."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "n": (1,),
}
"""Parameter that a fleet does not have -> the values with which it changes nothing."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the actor knows of verl's configuration."""

    options: Mapping[str, Any]
    """`engine_kwargs.rlboost`: `job`, and further arguments of `AsyncFleet`."""
    model: str
    """Folder or Hugging Face id."""
    config: Mapping[str, Any]
    """The model's configuration."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """In which weights are published."""
    prompt_length: int
    response_length: int
    max_model_len: int
    ignore_eos: bool = False
    """Whether completions do not end at these, unless a request says so itself."""
    max_staleness: int = 0
    """How many versions older than the newest a token's may be."""


class FleetActor:
    """The trainer of the external job, and what verl takes for a rollout server and its worker."""

    def __init__(self, rollout: Rollout) -> None:
        """Connect with `attach`."""
        self._rollout = rollout
        self._fleet: AsyncFleet | None = None
        self._attaching = asyncio.Lock()
        self._steps: dict[int, int] = {}
        """Version -> verl's step of its weights."""
        self._running = Counter[int]()
        """Version -> requests in flight that began with it."""
        self._released = -1

    async def attach(self) -> str:
        """Attach to the job once; return the manager's address."""
        url, token = (os.environ.get(name, "") for name in ("RLBOOST_URL", "RLBOOST_TOKEN"))
        if not (url and token):
            raise ConfigError("set RLBOOST_URL and RLBOOST_TOKEN for Ray's processes: export them before 'ray start'")
        url, token = clean_url("RLBOOST_URL", url), clean_secret("RLBOOST_TOKEN", token)
        async with self._attaching:
            if self._fleet is None:
                # Agent loops send their requests in another order each time: a run that is started again repeats none.
                fleet = AsyncFleet(url, token, model=self._rollout.model, resume=False, **self._rollout.options)
                self._fleet = await fleet.__aenter__()
        return httpx.URL(url).netloc.decode()

    @property
    def _open(self) -> AsyncFleet:
        if self._fleet is None:
            raise ConfigError("the fleet is not attached to a job")
        return self._fleet

    # --- weights ---

    def published_as(self) -> tuple[str, bool]:
        """Return the dtype of published weights, and whether the output layer is the embedding."""
        return self._rollout.dtype, bool(self._rollout.config.get("tie_word_embeddings"))

    async def publish(self, parts: Sequence[tuple[str, str, Sequence[int], Any]], step: int | None) -> None:
        """Publish weights as the next version, unless they are those of the newest.

        Args:
            parts: name, dtype, shape and bytes of each tensor; the bytes are in Ray's object store.
            step: verl's, which the version's samples are labeled with. verl gives none when it sends the same weights
                again, as for replicas that have slept.

        """
        found = await asyncio.gather(*(data for *_, data in parts))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # memory of the object store cannot be written to
            tensors = {
                name: torch.from_numpy(data).view(getattr(torch, dtype)).view(tuple(shape))
                for (name, dtype, shape, _), data in zip(parts, found, strict=True)
            }
        version = await self._open.publish(tensors, config=self._rollout.config, if_changed=bool(self._steps))
        if step is not None or version not in self._steps:
            self._steps[version] = step or 0
        # What has been read is verl's: the job keeps samples only of requests in flight.
        done = min([*self._running, version]) - 1
        if done > self._released:
            await self._open.checkpointed(step=done)
            self._released = done

    def execute_checkpoint_engine(self, method: str) -> dict[str, Any]:
        """Do nothing: workers pull weights from the store."""
        del method
        return {}

    def update_weights(self, global_steps: int | None = None) -> None:
        """Do nothing, as above."""

    # --- samples ---

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> TokenOutput:
        """Sample a completion of a prompt with the newest version.

        Raises:
            ConfigError: a parameter is not supported, or the prompt leaves no room.
            Fatal: the fleet has dropped the sample.

        """
        del request_id, mm_processor_kwargs
        if image_data or video_data or audio_data:
            raise ConfigError("a fleet takes prompts of token ids only: remove images, videos and audio from the data")
        given = sampling_of(sampling_params, len(prompt_ids), self._rollout)
        fleet, version = self._open, self._open.version
        if version not in self._steps:
            raise ConfigError("verl has published no weights yet")
        # Older versions are of an earlier run, whose steps are not known.
        staleness = min(self._rollout.max_staleness, version - min(self._steps))
        self._running[version] += 1
        try:
            (group,) = [
                group
                async for group in fleet.generate([list(prompt_ids)], step=version, max_staleness=staleness, **given)
            ]
        finally:
            self._running[version] -= 1
            self._running += Counter()  # without those that are 0
        if group.dropped:
            raise Fatal(f"the fleet has dropped a sample: {group.dropped[0]}")
        (sample,) = group.samples
        steps = [self._steps[of] for _, of, _ in sample.spans] or [self._steps[version]]
        return TokenOutput(
            token_ids=sample.tokens,
            log_probs=sample.logprobs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=sample.attempts - 1,
            # verl's asynchronous client takes `global_steps` for both others: the oldest hides no staleness.
            extra_fields={
                "global_steps": min(steps),
                "min_global_steps": min(steps),
                "max_global_steps": max(steps),
            },
        )


def sampling_of(params: Mapping[str, Any], n_prompt: int, rollout: Rollout) -> dict[str, Any]:
    """Return the arguments of `AsyncFleet.generate` for the parameters of one request.

    Args:
        params: verl's.
        n_prompt: number of its prompt's tokens.
        rollout: with the limits of lengths.

    Raises:
        ConfigError: naming what is not supported.

    """
    given = {name: value for name, value in params.items() if value is not None}
    own = {name: value for name, value in given.items() if name in _SAMPLING}
    limits = [given.pop(name) for name in ("max_tokens", "max_new_tokens") if name in given]
    ignore_eos, top_k = given.pop("ignore_eos", rollout.ignore_eos), given.pop("top_k", 0)
    given.pop("logprobs", None)
    for name, value in given.items():
        if name not in _SAMPLING and value not in _NEUTRAL.get(name, ()):
            raise ConfigError(f"{name}: {value} is not supported by a fleet: remove it from the rollout's parameters")
    room = rollout.max_model_len - n_prompt
    if room < 1:
        raise ConfigError(
            f"a prompt of {n_prompt} tokens leaves no room in {rollout.max_model_len} (rollout.max_model_len): "
            "filter long prompts (data.filter_overlong_prompts), or give fewer turns"
        )
    # As verl's own servers do.
    limit = (limits or [min(rollout.response_length, rollout.prompt_length + rollout.response_length - n_prompt)])[0]
    ends = [*(() if ignore_eos else rollout.eos_token_ids), *own.pop("stop_token_ids", ())]
    return {"max_tokens": max(1, min(limit, room)), "top_k": max(0, top_k), "stop_token_ids": ends, **own}


class FleetReplica(RolloutReplica):  # type: ignore[misc] # verl may not be installed
    """A replica without processes and GPUs of its own: all of a run share one actor."""

    async def init_standalone(self) -> None:
        """Reserve no GPUs."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Attach to the job.

        `servers` stays empty, so that what verl asks of them, such as to sleep or to abort, does nothing: there is no
        memory to free, and samples in flight end with the versions that they may have.
        """
        rollout = rollout_of(self.config, self.model_config, serves_policy=self._serves_policy)
        actor = ray.remote(FleetActor).options(name=_ACTOR, get_if_exists=True, num_cpus=0, max_concurrency=_CONCURRENT)
        self._server_handle = actor.remote(rollout)
        self._server_address = await self._server_handle.attach.remote()
        self.workers = [self._server_handle]

    @property
    def _serves_policy(self) -> bool:
        return not (self.is_reward_model or self.is_teacher_model)


def rollout_of(config: Any, model: Any, *, serves_policy: bool = True) -> Rollout:
    """Return what the actor needs of verl's configuration of rollout and model.

    Raises:
        ConfigError: naming what is not supported.

    """
    options = dict(config.engine_kwargs.get(NAME) or {})
    if not options.get("job"):
        raise ConfigError(f"engine_kwargs.{NAME}.job: give the name of the external job")
    unsupported = {
        "reward_model.rollout.name": not serves_policy and "give reward and teacher models another rollout",
        "tensor_model_parallel_size": config.tensor_model_parallel_size > 1
        and "give 1: workers say how their engines shard the model",
        "checkpoint_engine.backend": config.checkpoint_engine.backend not in {"naive", NAME}
        and f"give {NAME} with separate_async, and naive with other trainers",
        "quantization": config.quantization and "workers have the dtype that is published",
        "qat": (config.qat or {}).get("enable") and "workers have the weights that are published",
        "enable_rollout_routing_replay": config.enable_rollout_routing_replay and "turn it off",
        "full_determinism": config.full_determinism and "turn it off",
        "prometheus.enable": config.prometheus.enable and "turn it off: scrape the fleet's manager",
        "disaggregation.enabled": config.disaggregation.enabled and "turn it off",
    }
    if found := [f"{name}: {what}" for name, what in unsupported.items() if what]:
        raise ConfigError(f"rollout.name={NAME} does not support {'; '.join(found)}")
    hf: HFModelConfig = omega_conf_to_dataclass(model, dataclass_type=HFModelConfig)
    config_json = json.loads(hf.hf_config.to_json_string(use_diff=False))
    config_json.pop("attn_implementation", None)  # of the trainer, which workers may not have
    ids = [getattr(source, "eos_token_id", None) for source in (hf.tokenizer, hf.generation_config)]
    eos = {one for found in ids if found is not None for one in ([found] if isinstance(found, int) else found)}
    max_staleness = options.pop("max_staleness", 0)
    if not isinstance(max_staleness, int) or max_staleness < 0:
        raise ConfigError(f"engine_kwargs.{NAME}.max_staleness: give a number of versions, not {max_staleness!r}")
    return Rollout(
        max_staleness=max_staleness,
        options=options,
        model=hf.path,
        config=config_json | {"dtype": config.dtype},
        eos_token_ids=tuple(sorted(eos)),
        dtype=config.dtype,
        ignore_eos=config.ignore_eos,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        max_model_len=config.max_model_len or get_max_position_embeddings(hf.hf_config),
    )


# --- in the actor workers, which have the weights ---


async def send(weights: Iterable[tuple[str, torch.Tensor]], step: int | None, *, is_sender: bool) -> None:
    """Publish weights.

    Args:
        weights: whole tensors, which all ranks gather.
        step: verl's.
        is_sender: whether this process is of rank 0.

    Raises:
        ConfigError: they are those of an adapter, or below one.

    """
    actor = ray.get_actor(_ACTOR) if is_sender else None
    dtype, is_tied = await actor.published_as.remote() if actor is not None else ("float32", False)
    parts: list[tuple[str, str, Sequence[int], Any]] = []
    for name, tensor in weights:
        if "lora_" in name or ".base_layer." in name:
            raise ConfigError(
                f"{name}: a fleet takes whole models of verl: set actor_rollout_ref.model.lora.merge=true"
            )
        if actor is None or (is_tied and name == "lm_head.weight"):
            continue
        data = tensor.detach().to(getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype).cpu()
        raw: np.ndarray[Any, Any] = data.contiguous().view(-1).view(torch.uint8).numpy()
        parts.append((name, str(data.dtype).removeprefix("torch."), tuple(data.shape), ray.put(raw)))
    if actor is not None:
        await actor.publish.remote(parts, step)


class FleetRollout(BaseRollout):  # type: ignore[misc] # as above
    """What trainers whose rollout shares their GPUs call in each actor worker (`trainer_mode` sync, colocate_async)."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: no memory was released."""

    async def release(self) -> None:
        """Do nothing, as above."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, global_steps: int | None = None, **given: Any
    ) -> None:
        """Publish the weights of one step."""
        del given
        await send(weights, global_steps, is_sender=torch.distributed.get_rank() == 0)


@CheckpointEngineRegistry.register(NAME)
class FleetCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # as above
    """What the trainer whose rollout is elsewhere calls (`trainer_mode` separate_async)."""

    def __init__(self, bucket_size: int = 0, *, is_master: bool = False) -> None:
        """Reserve nothing; `bucket_size` is of no use."""
        del bucket_size
        self._is_sender = is_master

    def prepare(self) -> dict[str, Any]:
        """Do nothing: there is no group of processes, since workers come and go."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return nothing, as above."""
        del actor_wg_world_size, rollout_world_size, metadata
        return {}, {}

    def init_process_group(self) -> None:
        """Do nothing, as above."""

    def finalize(self) -> None:
        """Do nothing, as above."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Publish the weights of one step; all ranks call it."""
        await send(weights, global_steps, is_sender=self._is_sender)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return nothing: workers pull weights from the store."""
        del global_steps
        return iter(())


RolloutReplicaRegistry.register(NAME, lambda: FleetReplica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.FleetRollout"
