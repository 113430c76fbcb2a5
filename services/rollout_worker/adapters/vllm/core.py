"""Runs vLLM's engine core in this process, synchronously: add, step, load weights, read weights back, sleep.

One thread decides what happens between two steps, so a token's version is the one that was loaded when its step began,
and weights are passed without a copy. With tensor parallelism vLLM starts one process per device, and the core still
steps here.

Requests go directly to vLLM's core. The layer above it, which makes text and alternative tokens, would cost half as
much time as the scheduler, and its output is not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from vllm import SamplingParams, envs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from rlboost.services.rollout_worker.adapters.engine.hf_tensors import HfTensors
from rlboost.services.rollout_worker.adapters.vllm import seeded_sampling
from rlboost.services.rollout_worker.adapters.vllm.arguments import VllmOptions, check_device, engine_args
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.ports import Sequences
from rlboost.shared.atomic_file import replace_file
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import Sampling

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Linux's shared memory


class NewToken(NamedTuple):
    """A token that a step has generated."""

    request_id: str
    token: int
    logprob: float


class VllmCore:
    """One vLLM engine, initially without weights. Call every method on the thread that constructed it.

    Raises:
        ConfigError: vLLM does not support this model or device, or the model's weights could not be read back.

    """

    def __init__(self, config_json: str, options: VllmOptions) -> None:
        check_device(options.device)
        self._options = options
        self._asleep: set[str] = set()
        self._n_loads = 0
        self._n_requests = 0
        with TemporaryDirectory(prefix="rlboost-model-") as directory:
            (Path(directory) / "config.json").write_text(config_json, encoding="utf-8")
            self._tensors = HfTensors(Path(directory), getattr(torch, options.dtype))
        # vLLM selects the model's class by its architecture, which not every configuration names.
        config = {"architectures": [self._tensors.architecture], **_without_nulls(config_json)}
        try:
            self._engine = LLMEngine.from_engine_args(engine_args(model_folder(config), options))
        except (ValueError, OSError, NotImplementedError) as error:
            cleanup_dist_env_and_memory()
            raise ConfigError(f"vllm cannot run this model on this machine: {error}") from error
        self._core = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        self.max_len = int(self._engine.model_config.max_model_len)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())
        cache = self._engine.vllm_config.cache_config
        self.kv_tokens = int(cache.kv_cache_size_tokens or 0)
        self.kv_block_tokens = int(cache.block_size) if cache.enable_prefix_caching else 0
        try:
            self._check_supported()
        except BaseException:
            self.close()
            raise

    def _check_supported(self) -> None:
        """Refuse a model that vLLM builds but cannot run, or whose weights cannot be read back."""
        if reason := next(filter(None, self._engine.collective_rpc("rlboost_unsupported_reason")), ""):
            raise ConfigError(f"the vllm engine cannot verify this model's weights: {reason}; use the torch engine")
        self.add(Request(0, 0, [0], [], Sampling(temperature=1.0, top_p=1.0, max_tokens=1), seed=0), [])
        try:
            list(self.step())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"vllm cannot run this model on this machine: {error}; use the torch engine") from error
        self.clear()

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, tokens: Sequence[int]) -> str:
        """Add a request whose completion so far is `tokens`; return the id that `step` uses."""
        sampling = request.sampling
        stops = [token for token in sampling.stop_token_ids if 0 <= token < self.vocabulary]
        return self._add(
            [*request.prompt, *tokens],
            seeded_sampling.extra_args(request, len(tokens)),
            max_tokens=sampling.max_tokens - len(tokens),
            stop_token_ids=stops,
        )

    def _add(self, tokens: list[int], extra_args: dict[str, Any], **params: Any) -> str:
        self._n_requests += 1
        request_id = str(self._n_requests)
        sampling = SamplingParams(
            temperature=0.0,  # see `seeded_sampling`
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args=extra_args,
            **params,
        )
        # Salted: a new request must not share a prefix whose keys and values were computed with older weights.
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._n_loads)}
        request = self._engine.input_processor.process_inputs(request_id, prompt, sampling, supported_tasks=self._tasks)
        self._core.add_request(request)
        return request_id

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; those that have ended are ignored."""
        self._core.abort_requests(list(request_ids))

    def step(self) -> Iterator[NewToken]:
        """Run the model once; yield the generated tokens, at most one per request."""
        for output in self._core.get_output().outputs:
            if output.finish_reason not in {None, FinishReason.STOP, FinishReason.LENGTH}:
                raise RuntimeError(f"vllm ended a request: {output.finish_reason}")
            if output.new_token_ids:
                # The first column belongs to the sampled token.
                logprobs = output.new_logprobs.logprobs[:, 0].tolist()
                for token, logprob in zip(output.new_token_ids, logprobs, strict=True):
                    yield NewToken(output.request_id, token, logprob)

    def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `ports.Engine.score`; no request may be running.

        Each token is one request with a forced token, so the forward pass, the temperature and the logits processor are
        those of generation; vLLM's `prompt_logprobs` would skip the latter two.
        """
        requests: list[list[str]] = []
        for prompt, completion in sequences:
            tokens, ids = list(prompt), []
            for token in completion:
                ids.append(self._add(list(tokens), seeded_sampling.forced_token_args(token, temperature), max_tokens=1))
                tokens.append(token)
            requests.append(ids)
        logprobs: dict[str, float] = {}
        while len(logprobs) < sum(map(len, requests)):
            logprobs.update((new.request_id, new.logprob) for new in self.step())
        self.clear()
        return [[logprobs[request_id] for request_id in ids] for ids in requests]

    def clear(self) -> None:
        """Drop all keys and values; no request may be running."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache although no request is running")

    # --- weights ------------------------------------------------------------------------------------------------------

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, may_be_partial: bool) -> None:
        """Overwrite weights in place by one collective RPC.

        Raises:
            ConfigError: see `ports.Engine.load_weights`.

        """
        self._n_loads += 1
        self._wake("weights")
        checked = self._tensors.checked(tensors, may_be_partial=may_be_partial)
        if self._options.tensor_parallel == 1:
            self._engine.collective_rpc("rlboost_load_tensors", args=(checked,))
            return
        # The other processes map them from shared memory, without a copy per process.
        with TemporaryDirectory(prefix="rlboost-weights-", dir=_SHARED_MEMORY) as directory:
            files: list[str] = []
            for name, tensor in checked:
                files.append(f"{directory}/{len(files)}")
                save_file({name: tensor.contiguous()}, files[-1])
            self._engine.collective_rpc("rlboost_load_tensor_files", args=(files,))

    def names(self) -> list[str]:
        """Return the names of all tensors; a tied tensor has several."""
        return self._tensors.names()

    def read(self, name: str) -> torch.Tensor:
        """Return a loaded tensor: a view if it is stored in one slice, otherwise a copy assembled from its slices.

        Raises:
            ConfigError: some of its elements cannot be found.

        """
        first, like = self._tensors.first_name(name), self._tensors.like(name)
        ranks = self._engine.collective_rpc("rlboost_read_tensor", args=(first,))
        slices = [loaded_slice for rank in ranks for loaded_slice in rank]
        if len(slices) == 1 and (slices[0].size, slices[0].stride) == (tuple(like.shape), like.stride()):
            view: torch.Tensor = slices[0].loaded
            return view
        whole, found = torch.empty(like.shape, dtype=like.dtype), torch.zeros(like.shape, dtype=torch.bool)
        for one in slices:
            found.as_strided(one.size, one.stride, one.offset).fill_(value=True)
            whole.as_strided(one.size, one.stride, one.offset).copy_(one.loaded)
        if not found.all():
            raise ConfigError(f"weights: {name} cannot be read back from vllm; use the torch engine")
        return whole

    # --- memory -------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free device memory if `enable_sleep`; no request may be running. Weights move to host memory."""
        if self._options.enable_sleep and "weights" not in self._asleep:  # after a load the KV cache may be asleep
            self._engine.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take the device memory back."""
        self._wake("weights", "kv_cache")

    def _wake(self, *tags: str) -> None:
        # Only those asleep: waking the others would map their memory twice.
        if asleep := [tag for tag in tags if tag in self._asleep]:
            self._engine.wake_up(asleep)
            self._asleep.difference_update(asleep)

    def close(self) -> None:
        """Shut down vLLM and its processes."""
        self._core.shutdown()


def model_folder(config: dict[str, Any]) -> Path:
    """Return a folder with this `config.json` in vLLM's cache: equal configs get the same folder.

    vLLM's compilation cache depends on the model's path: with a new path per start, every worker would compile again.

    Args:
        config: the model's `config.json`, including its architecture.

    Raises:
        ConfigError: the cache cannot be written.

    """
    text = json.dumps(config, sort_keys=True)
    folder = Path(envs.VLLM_CACHE_ROOT) / "rlboost_models" / hashlib.sha256(text.encode()).hexdigest()[:16]
    if (folder / "config.json").exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Several workers may start at the same time.
        replace_file(folder / "config.json", text)
    except OSError as error:
        raise ConfigError(f"vllm's cache cannot be written ({error}): set VLLM_CACHE_ROOT to one that can") from error
    return folder


def _without_nulls(config_json: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(config_json).items() if value is not None}
