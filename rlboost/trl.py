"""TRL's `GRPOTrainer` on a fleet of spot workers.

    with Fleet("http://manager:8700", token, job="sums", model="Qwen/Qwen3-0.6B") as fleet:
        trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=score, rollout_func=rollout_func(fleet), ...)
        trainer.train()

The trainer publishes its weights before it samples with them, so every completion is of the policy that is trained.
With several processes (`accelerate launch`, torchrun) the main one publishes and samples for all: a group may lie
across processes, and the groups of a step are numbered alike after a restart. Written for TRL 1.16; `rollout_func` is
experimental there.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rlboost.fleet import Fleet, Sample
from rlboost.publishing import WeightFolder, gathered, is_sharded
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.http.clients import http_client
from rlboost.shared.ids import MAX_GROUP_SIZE
from rlboost.shared.proxies import internal
from rlboost.shared.secrets import clean_url

RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]
"""TRL's: from the prompts of this process and the trainer to prompt ids, completion ids and log-probabilities."""

T = TypeVar("T")

_NEWS_S = 20.0
"""How long the processes that wait for the main one hear nothing of it: less than any limit of their collectives."""
_UNSUPPORTED = {"repetition_penalty": (None, 1.0)}
"""Argument of `GRPOConfig` -> the values with which it changes nothing."""
_OF_GENERATION_KWARGS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids"}
)


def rollout_func(fleet: Fleet) -> RolloutFunc:
    """Return the `rollout_func` of a `GRPOTrainer`, which samples on an open fleet.

    Sampling is as `GRPOConfig` says: `temperature`, `top_p`, `top_k`, `min_p`, `max_completion_length`, and of
    `generation_kwargs` what the fleet has, which comes first there, too.
    """
    return _Rollout(fleet)


class _Rollout:
    """What TRL calls in each process; it counts the steps of its trainer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._published_at = -1
        """The trainer's step whose weights are the newest version."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample a completion of each prompt; equal prompts that follow each other in all processes are a group."""
        from accelerate.utils import gather_object  # noqa: PLC0415 - TRL has it

        accelerator = trainer.accelerator
        _check(trainer, self._fleet)
        self._publish(trainer)
        prompt_ids = _tokenized(prompts, trainer)
        # In the order of the ranks, which is that of the data: TRL scores groups in the same one.
        of_rank = [prompt_ids] if accelerator.num_processes == 1 else gather_object([prompt_ids])
        groups = [
            (list(ids), len(list(same))) for ids, same in itertools.groupby(itertools.chain.from_iterable(of_rank))
        ]

        def sampled() -> list[tuple[list[int], list[float]]]:
            made = self._sampled(groups, trainer.args, trainer.eos_token_ids)
            return [(sample.tokens, sample.logprobs) for samples in made for sample in samples]

        first = sum(map(len, of_rank[: accelerator.process_index]))
        own = _by_main(accelerator, sampled)[first : first + len(prompt_ids)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [tokens for tokens, _ in own],
            "logprobs": [logprobs for _, logprobs in own],
        }

    def _publish(self, trainer: Any) -> None:
        """Publish the weights if the trainer has changed them; the step before is complete then."""
        step = int(trainer.state.global_step)
        if step == self._published_at:
            return
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        # All processes gather shards; of an adapter's model only once, as it is frozen.
        weights = gathered(trainer.model, with_model=self._published_at < 0) if is_sharded(trainer.model) else model

        def published() -> None:
            if self._published_at >= 0:
                logged = trainer.state.log_history[-1] if trainer.state.log_history else {}
                self._fleet.checkpointed({name: float(value) for name, value in logged.items() if _is_number(value)})
            self._fleet.publish(weights)

        _by_main(trainer.accelerator, published)
        self._published_at = step

    def _sampled(
        self, groups: Sequence[tuple[list[int], int]], args: Any, eos_token_ids: Sequence[int]
    ) -> list[list[Sample]]:
        """Return the samples of each group; raises `Fatal` if one was dropped."""
        found: list[list[Sample]] = [[] for _ in groups]
        sampling = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": max(0, args.top_k or 0),
            "min_p": args.min_p or 0.0,
            "max_tokens": args.max_completion_length,
            **(args.generation_kwargs or {}),
        }
        sampling["stop_token_ids"] = [*eos_token_ids, *sampling.get("stop_token_ids", ())]
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


def _by_main(accelerator: Any, work: Callable[[], T]) -> T:
    """Return in every process what `work` returns in the main one; if it fails there, all raise.

    The others wait in collectives of `_NEWS_S`, since one that lasts as long as a fleet may need would time out.
    """
    from accelerate.utils import broadcast_object_list  # noqa: PLC0415 - TRL has it

    if accelerator.num_processes == 1:
        return work()
    running = _started(work) if accelerator.is_main_process else None
    while True:
        news: list[Any] = [None]
        if running is not None and wait([running], timeout=_NEWS_S).done:
            error = running.exception()
            news = [(None, f"{type(error).__name__}: {error}") if error else (running.result(), "")]
        broadcast_object_list(news)
        if news[0] is None:
            continue
        if running is not None:
            return running.result()
        made, why = news[0]
        if why:
            raise Fatal(f"the main process: {why}")
        return made  # type: ignore[no-any-return]


def _started(work: Callable[[], T]) -> Future[T]:
    """Run it in a thread, which does not outlive the process."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            future.set_exception(error)

    threading.Thread(target=run, name="main-process-work", daemon=True).start()
    return future


def _check(trainer: Any, fleet: Fleet) -> None:
    """Refuse what would be sampled otherwise than asked for.

    Raises:
        ConfigError: naming it.

    """
    for name, neutral in _UNSUPPORTED.items():
        if (value := getattr(trainer.args, name, None)) not in neutral:
            raise ConfigError(f"{name}: {value} is not supported with rollout_func on a fleet: remove it")
    if others := sorted(set(getattr(trainer.args, "generation_kwargs", None) or {}) - _OF_GENERATION_KWARGS):
        raise ConfigError(
            f"generation_kwargs: {', '.join(others)}: a fleet has only {', '.join(sorted(_OF_GENERATION_KWARGS))}"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise ConfigError(
            "parallelism_config: several processes have the same prompts: use data parallelism (FSDP2) only"
        )
    rank, given = trainer.accelerator.process_index, fleet.rank
    if rank != given and trainer.accelerator.num_processes == 1:
        raise ConfigError(
            f"rank: this process has the rank {given} (RANK), and its trainer is alone: several processes without a "
            "GPU need GRPOConfig(use_cpu=True), and one that trains alone Fleet(..., rank=0)"
        )
    if rank != given:
        raise ConfigError(f"rank: this is process {rank} of the trainer, and its Fleet has {given}: give rank={rank}")


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
        self._folder = WeightFolder(folder)
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
        path = self._folder.write(iterator)
        self._request("POST", "/update_weights", {"update_info": {"path": str(path)}})

    def pause(self) -> None:
        """Hold new requests; samples in flight continue while workers pull the weights."""
        self._request("POST", "/pause")

    def resume(self) -> None:
        """Let requests begin."""
        self._request("POST", "/resume")

    def destroy(self) -> None:
        """Remove the folder, if it is temporary."""
        self._http.close()
        self._folder.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        url = f"{self._url}{path}"
        try:
            answer = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise Fatal(f"{url}: {str(error) or type(error).__name__}") from error
        if not answer.is_success:
            raise Fatal(f"{url}: {answer.status_code}: {answer.text[:500]}")
