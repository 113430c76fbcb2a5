"""vLLM itself, in this process: what the engine does with it, and nothing about requests' lives.

In this process and synchronously, because then one thread decides what happens between two steps: a token's version is
the one that was loaded when its step began, without any bookkeeping, and weights are handed over without a copy. With
tensor parallelism vLLM starts a process for each device, and the core still steps here.

Requests go to vLLM's core and its tokens are taken from there. The layer above it, which makes texts and lists of
alternatives of them, would take half as long again as the scheduler for what nobody here reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from vllm import EngineArgs, SamplingParams, envs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from services.rollout_worker.adapters import vllm_draw, vllm_worker
from services.rollout_worker.adapters.hf_tensors import HfTensors
from services.rollout_worker.ports import Request, Sequences
from shared.errors import ConfigError
from shared.messages import Sampling

_CPU_KV_CACHE_BYTES = 256 << 20
"""Where `VllmOptions.kv_cache_bytes` says nothing: vLLM itself would take a large part of the machine's memory."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where processes on Linux share memory


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is started."""

    slots: int
    """How many requests run at once."""
    device: str = "cpu"
    """What the installed vLLM was built for: "cpu" or "cuda"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and cache; sampling is in float32."""
    kv_cache_bytes: int = 0
    """0 leaves it to vLLM: on a GPU what is free, here on a CPU 256 MiB."""
    tensor_parallel: int = 1
    """Over how many devices the model is split."""
    sleeps: bool = False
    """Whether a suspended engine gives back the device's memory, weights included, where vLLM can do that."""


class Made(NamedTuple):
    """A token that a step has made."""

    request_id: str
    token: int
    logprob: float


class Core:
    """One vLLM engine, without weights. Every method is called on the thread that constructed it.

    Raises:
        ConfigError: it cannot run such a model, or not on this device, or its weights could not be verified.

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
        # vLLM chooses the model's class by its name, which not every configuration gives.
        config = {"architectures": [self._tensors.architecture], **_given(config_json)}
        try:
            self._engine = LLMEngine.from_engine_args(_arguments(model_folder(config), options))
        except (ValueError, OSError, NotImplementedError) as error:
            cleanup_dist_env_and_memory()
            raise ConfigError(f"vllm cannot run this model here: {error}") from error
        self._core = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        self.max_len = int(self._engine.model_config.max_model_len)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())
        cache = self._engine.vllm_config.cache_config
        self.kv_tokens = int(cache.kv_cache_size_tokens or 0)
        self.kv_page_tokens = int(cache.block_size) if cache.enable_prefix_caching else 0
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        """Refuse a model that vLLM builds and then cannot run, or whose weights it keeps to itself."""
        if why := next(filter(None, self._engine.collective_rpc("rlboost_why_not")), ""):
            raise ConfigError(f"the vllm engine cannot verify the weights of this model: {why}; use the torch engine")
        self.add(Request(0, 0, [0], [], Sampling(temperature=1.0, top_p=1.0, max_tokens=1), seed=0), [])
        try:
            list(self.step())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"vllm cannot run this model here: {error}; use the torch engine") from error
        self.clear()

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, tokens: Sequence[int]) -> str:
        """Begin a request that has made `tokens` of its completion so far; return the id that `step` uses."""
        sampling = request.sampling
        stops = [token for token in sampling.stop_token_ids if 0 <= token < self.vocabulary]
        return self._add(
            [*request.prompt, *tokens],
            vllm_draw.extra_args(request, len(tokens)),
            max_tokens=sampling.max_tokens - len(tokens),
            stop_token_ids=stops,
        )

    def _add(self, tokens: list[int], extra_args: dict[str, Any], **params: Any) -> str:
        self._n_requests += 1
        request_id = str(self._n_requests)
        sampling = SamplingParams(
            temperature=0.0,  # see `vllm_draw`
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args=extra_args,
            **params,
        )
        # Salted: a new request must not find the prefix of one that goes on with keys and values of older weights.
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._n_loads)}
        request = self._engine.input_processor.process_inputs(request_id, prompt, sampling, supported_tasks=self._tasks)
        self._core.add_request(request)
        return request_id

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; those that have ended are ignored."""
        self._core.abort_requests(list(request_ids))

    def step(self) -> Iterator[Made]:
        """Run the model once; yield what it made, which is at most one token for each request."""
        for output in self._core.get_output().outputs:
            if output.finish_reason not in {None, FinishReason.STOP, FinishReason.LENGTH}:
                raise RuntimeError(f"vllm gave a request up: {output.finish_reason}")
            if output.new_token_ids:
                # The first column is what was taken.
                logprobs = output.new_logprobs.logprobs[:, 0].tolist()
                for token, logprob in zip(output.new_token_ids, logprobs, strict=True):
                    yield Made(output.request_id, token, logprob)

    def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `ports.Engine.score`; no request may be there.

        A request for each token, which is given: so the pass, the temperature and the logits processor are those of
        generating, where vLLM's own `prompt_logprobs` would leave out the latter two.
        """
        asked: list[list[str]] = []
        for prompt, completion in sequences:
            tokens, ids = list(prompt), []
            for token in completion:
                ids.append(self._add(list(tokens), vllm_draw.given_args(token, temperature), max_tokens=1))
                tokens.append(token)
            asked.append(ids)
        found: dict[str, float] = {}
        while len(found) < sum(map(len, asked)):
            found.update((made.request_id, made.logprob) for made in self.step())
        self.clear()
        return [[found[request_id] for request_id in row] for row in asked]

    def clear(self) -> None:
        """Forget every key and value; no request may be there."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache though no request was there")

    # --- weights ------------------------------------------------------------------------------------------------------

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, may_be_partial: bool) -> None:
        """Replace weights in place by one collective RPC.

        Raises:
            ConfigError: see `ports.Engine.load_weights`.

        """
        self._n_loads += 1
        self._wake("weights")
        checked = self._tensors.checked(tensors, may_be_partial=may_be_partial)
        if self._options.tensor_parallel == 1:
            self._engine.collective_rpc("rlboost_load", args=(checked,))
            return
        # The other processes read them from memory that is shared, without a copy for each.
        with TemporaryDirectory(prefix="rlboost-weights-", dir=_SHARED_MEMORY) as directory:
            files: list[str] = []
            for name, tensor in checked:
                files.append(f"{directory}/{len(files)}")
                save_file({name: tensor.contiguous()}, files[-1])
            self._engine.collective_rpc("rlboost_load_files", args=(files,))

    def names(self) -> list[str]:
        """Return the names of all tensors; tied ones have several."""
        return self._tensors.names()

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is loaded: a view where it lies in one piece, else its pieces put together.

        Raises:
            ConfigError: not every element of it can be found.

        """
        first, like = self._tensors.first_name(name), self._tensors.like(name)
        pieces = [piece for rank in self._engine.collective_rpc("rlboost_read", args=(first,)) for piece in rank]
        if len(pieces) == 1 and (pieces[0].size, pieces[0].stride) == (tuple(like.shape), like.stride()):
            view: torch.Tensor = pieces[0].loaded
            return view
        whole, found = torch.empty(like.shape, dtype=like.dtype), torch.zeros(like.shape, dtype=torch.bool)
        for piece in pieces:
            found.as_strided(piece.size, piece.stride, piece.offset).fill_(value=True)
            whole.as_strided(piece.size, piece.stride, piece.offset).copy_(piece.loaded)
        if not found.all():
            raise ConfigError(f"weights: what vllm has loaded of {name} cannot be read back; use the torch engine")
        return whole

    # --- memory -------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give back the device's memory, if it is told to; no request may be there. Weights wait in the host's."""
        if self._options.sleeps and "weights" not in self._asleep:  # after a load its cache may be asleep still
            self._engine.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take back what `sleep` gave."""
        self._wake("weights", "kv_cache")

    def _wake(self, *tags: str) -> None:
        # exactly those: waking what is awake would map its memory twice
        if asleep := [tag for tag in tags if tag in self._asleep]:
            self._engine.wake_up(asleep)
            self._asleep.difference_update(asleep)

    def close(self) -> None:
        """End vLLM and the processes that it has started."""
        self._core.shutdown()


def model_folder(config: dict[str, Any]) -> Path:
    """Return a folder with this `config.json`, in vLLM's own cache: always the same for the same one.

    What vLLM has compiled it finds again by the model's path, among other things: under a new name each time, every
    worker that starts on a machine would compile anew.

    Args:
        config: of the model, with its architecture.

    Raises:
        ConfigError: the cache cannot be written.

    """
    text = json.dumps(config, sort_keys=True)
    folder = Path(envs.VLLM_CACHE_ROOT) / "rlboost_models" / hashlib.sha256(text.encode()).hexdigest()[:16]
    if (folder / "config.json").exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Several workers may begin at once.
        with NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).chmod(0o644)  # the next worker may be another user's
        Path(file.name).replace(folder / "config.json")
    except OSError as error:
        raise ConfigError(f"vllm's cache cannot be written ({error}): set VLLM_CACHE_ROOT to one that can") from error
    return folder


def _given(config_json: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(config_json).items() if value is not None}


def check_device(device: str) -> None:
    """Refuse a device that the installed vLLM does not run on.

    Raises:
        ConfigError: with the one that it does.

    """
    kind, _, index = device.partition(":")
    if index:
        raise ConfigError(f"device {device!r}: vllm takes the first; choose by CUDA_VISIBLE_DEVICES={index}")
    if kind != current_platform.device_type:
        raise ConfigError(
            f"device {device!r}: the vllm that is installed runs on {current_platform.device_type or 'nothing'}"
        )


def _arguments(directory: Path, options: VllmOptions) -> EngineArgs:
    on_cpu = options.device == "cpu"
    return EngineArgs(
        model=str(directory),
        load_format="dummy",  # weights come through `load`
        dtype=options.dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_num_seqs=options.slots,
        kv_cache_memory_bytes=options.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None),
        enforce_eager=on_cpu,  # compiling takes longer than it saves
        async_scheduling=False,  # a step that has begun before a load would end after it
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend="uni" if options.tensor_parallel == 1 else "mp",
        enable_sleep_mode=options.sleeps and not on_cpu,
        logits_processors=[vllm_draw.CLASS],
        logprobs_mode="processed_logits",  # see `vllm_draw`
        worker_extension_cls=vllm_worker.CLASS,
        disable_log_stats=True,
    )
