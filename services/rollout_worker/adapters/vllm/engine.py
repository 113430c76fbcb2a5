"""`ports.Engine` over vLLM's `AsyncLLM`, whose engine core runs in a process of its own.

`StreamedRequests` keeps the requests and their tokens. While the engine decodes, each live request has a task that
reads its stream. Without `keep_kv`, a pause aborts them in vLLM, and `resume` submits each one again with its tokens so
far: this is how KV caches are recomputed. With `keep_kv` vLLM keeps them, and the streams continue.

A token's version is the one that was loaded when it arrived: vLLM pauses before a load, and the tokens of a paused
engine arrive before the answers to the calls that load.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import structlog
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rlboost.services.rollout_worker.adapters.vllm import plugin
from rlboost.services.rollout_worker.adapters.vllm.arguments import (
    adapter_refusal,
    check_device,
    engine_args,
    model_folder,
    write_adapter,
    written_wrongly,
)
from rlboost.services.rollout_worker.adapters.vllm.load_errors import decode_load_error
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions, logprobs_error, supported_options
from rlboost.services.rollout_worker.domain.frames import LiveRequest, StreamedRequests
from rlboost.services.rollout_worker.domain.load import EngineStats
from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey, stream_seed
from rlboost.services.rollout_worker.ports import (
    AdapterEngine,
    Changes,
    EngineClosed,
    EngineFailed,
    Sequences,
    StagedAdapter,
    StagedWeights,
)
from rlboost.shared.data.vision import vision_of
from rlboost.shared.errors import ConfigError, Fatal, RLBoostError, UnsuitableWeights, leaves
from rlboost.shared.messages import FINISH_LENGTH, FINISH_STOP
from rlboost.shared.model.folder import require_unquantized
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.weights.changed_words import ChangedWords
from rlboost.shared.wire import TOP, RoutedShape, ints

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.adapters.vllm.vision import Vision

log = structlog.get_logger(__name__)

T = TypeVar("T")

_GRAMMAR_MODULES = ("xgrammar", "lmformatenforcer")
"""What vLLM imports to validate a grammar; those of `deploy/vllm-cpu.txt` before this release lacked the second."""
_LIVENESS_S = 0.2
"""How often it is checked that vLLM lives while it is waited for."""
_FINISH = {"stop": FINISH_STOP, "length": FINISH_LENGTH}


def start(config_json: str, options: VllmOptions, tokenizer_json: str = "") -> AsyncLLM:
    """Start vLLM with dummy weights; blocks for seconds.

    Raises:
        UnsuitableWeights: it cannot run this model here, or the model is quantized already.
        ConfigError: it does not support this device, or its cache cannot be written.

    """
    check_device(options.device)
    try:
        config = json.loads(config_json)
        require_unquantized(config)
    except (ValueError, AttributeError, ConfigError) as error:
        raise UnsuitableWeights(str(error)) from error
    try:
        return AsyncLLM.from_engine_args(engine_args(model_folder(config, tokenizer_json), options))
    except RLBoostError:
        raise
    except Exception as error:  # vLLM and transformers raise any for a model that they cannot run
        why = ". ".join(filter(None, (f"vllm cannot run this model on this machine: {error}", options.suspects)))
        raise UnsuitableWeights(why) from error


def _routed_shape(model: Any) -> RoutedShape:
    return RoutedShape(model.get_total_num_hidden_layers(), model.get_num_experts_per_tok(), model.get_num_experts())


def _logprobs(found: FlatLogprobs, n_top: int) -> tuple[list[float], bytes]:
    """Return the log-probabilities of sampled tokens, and the most likely ones as entries of `shared.wire.TOP`."""
    if not n_top:
        return found.logprobs, b""
    top = []
    for start, end in zip(found.start_indices, found.end_indices, strict=True):
        # Of each position first the sampled token, then the most likely ones, where vLLM may leave it out.
        places = range(start + 1, end) if end - start > n_top else sorted(range(start, end), key=_rank_in(found))
        top += [(found.token_ids[place], found.logprobs[place]) for place in places]
    return [found.logprobs[start] for start in found.start_indices], np.array(top, TOP).tobytes()


def _rank_in(found: FlatLogprobs) -> Callable[[int], int]:
    return lambda place: found.ranks[place] or 0


class VllmEngine:
    """`ports.Engine` over vLLM.

    Args:
        llm: with dummy weights; closed with the engine.
        options: what it was started with.

    """

    def __init__(self, llm: AsyncLLM, options: VllmOptions) -> None:
        cache = llm.vllm_config.cache_config
        self.slots = options.slots
        self.max_adapters = options.max_adapters
        self.adapters: AdapterEngine | None = self if llm.vllm_config.lora_config is not None else None
        self.kv_tokens = int(cache.kv_cache_size_tokens or 0)
        self.kv_block_tokens = int(cache.block_size) if cache.enable_prefix_caching else 0
        self.max_request_tokens = 0
        self.returns_routed_experts = bool(options.vllm_args.get("enable_return_routed_experts"))
        reads_text = not llm.model_config.skip_tokenizer_init and not options.served_model
        has_grammars = reads_text and all(map(find_spec, _GRAMMAR_MODULES))
        vision = vision_of(llm.model_config.hf_config.to_dict())
        self.sampling_options = supported_options(
            options.vllm_args, has_grammars=has_grammars, sees_images=vision is not None
        )
        self._vision: Vision | None = None
        if vision is not None:
            from rlboost.services.rollout_worker.adapters.vllm.vision import Vision  # noqa: PLC0415 - it imports models

            self._vision = Vision(vision)
        self.llm = llm
        """Used by benchmarks."""
        self._can_sleep = options.enable_sleep
        self._max_adapter_rank = options.max_adapter_rank
        self._adapters: dict[str, LoRARequest] = {}
        """Job -> its adapter, as its new requests name it."""
        self._adapter_ids = count(1)
        self._new_requests = partial(
            StreamedRequests,
            options.slots,
            int(llm.model_config.max_model_len),
            int(llm.model_config.get_vocab_size()),
            _routed_shape(llm.model_config) if self.returns_routed_experts else None,
            partial(logprobs_error, options.logprobs_mode),
            self.sampling_options,
        )
        self._requests = self._new_requests()
        self._streams: dict[LiveRequest, asyncio.Task[None]] = {}
        self._ids = count()
        self._n_loads = 0
        self._n_ranks = options.tensor_parallel
        self._excuses: set[str] = set()
        self._is_suspended = False
        self._is_decoding = False
        """False while vLLM is paused, by a suspension or for a load."""
        self._asleep: set[str] = set()
        """Tags of the device memory that vLLM has given back."""
        self._turn = asyncio.Lock()
        """Held while the engine loads, scores, suspends or resumes."""
        self._end: EngineFailed | Literal["closed"] | None = None
        """Why the engine ended."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        self._requests.submit(requests)
        self._start_streams()

    def abort(self, keys: Iterable[RequestKey]) -> None:
        self._check_alive()
        self._end_streams(self._requests.abort(keys))

    def release(self, keys: Iterable[RequestKey]) -> None:
        self._check_alive()
        self._end_streams(self._requests.release(keys))

    def hint(self, _: Iterable[tuple[int, Sequence[int]]]) -> None:
        """See `ports.Engine`; ignored."""
        self._check_alive()

    def set_images(self, key: RequestKey, images: Sequence[bytes] | str) -> None:
        """See `ports.Engine`."""
        self._check_alive()
        if self._vision is None or (live := self._requests.awaiting_images(key)) is None:
            return
        live.images = images if isinstance(images, str) else self._vision.prepare(live.request, images)
        self._start_streams()

    def take_emissions(self) -> list[Emission]:
        self._check_alive(allow_closed=True)
        return self._requests.take_emissions()

    def stats(self) -> EngineStats:
        """See `ports.Engine`. vLLM admits requests in order; those that it preempts count as running."""
        self._check_alive(allow_closed=True)
        requests = self._requests
        load = requests.n_running, requests.n_pending, requests.generated_total, requests.version
        return EngineStats(*load, can_generate=requests.can_generate)

    def running(self) -> set[RequestKey]:
        return self._requests.running

    def _start_streams(self) -> None:
        if not self._is_decoding:
            return
        for live in self._requests.start():
            if live not in self._streams:
                task = asyncio.create_task(self._stream(live, self._requests), name=f"stream-{live.request.sample}")
                self._streams[live] = task
                task.add_done_callback(partial(self._on_stream_end, live))

    def _end_streams(self, ended: Iterable[LiveRequest]) -> None:
        for live in ended:
            if (task := self._streams.get(live)) is not None:
                task.cancel()  # which aborts it in vLLM

    def _on_stream_end(self, live: LiveRequest, task: asyncio.Task[None]) -> None:
        if self._streams.get(live) is task:
            del self._streams[live]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _stream(self, live: LiveRequest, requests: StreamedRequests) -> None:
        """Generate the tokens of a request into `requests`."""
        try:
            await (self._force(live, requests) if live.request.sampling.forced else self._follow(live, requests))
        except VLLMValidationError as error:
            requests.end(live, error=f"vllm rejects the request: {error.__cause__ or error}")

    async def _follow(self, live: LiveRequest, requests: StreamedRequests) -> None:
        request, sampling = live.request, live.request.sampling
        vocabulary = requests.vocabulary
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature else 1.0,
            top_k=min(sampling.top_k, vocabulary),
            min_p=sampling.min_p,
            min_tokens=max(0, min(sampling.min_tokens, sampling.max_tokens) - len(live.tokens)),
            logit_bias=dict(sampling.logit_bias) or None,
            structured_outputs=(StructuredOutputsParams(structural_tag=sampling.grammar) if sampling.grammar else None),
            extra_args={plugin.N_GENERATED: len(live.tokens)} if sampling.grammar else None,
            max_tokens=sampling.max_tokens - len(live.tokens),
            stop_token_ids=[token for token in sampling.stop_token_ids if 0 <= token < vocabulary],
            ignore_eos=True,
            seed=stream_seed(request.seed, len(live.tokens)),
            logprobs=sampling.top_logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            # With those of earlier tokens, which vLLM computes again: it returns none of a request that it aborts.
            routed_experts_prompt_start=len(request.prompt) - 1 if sampling.routed_experts else 0,
        )
        async for output in self._generate([*request.prompt, *live.tokens], params, request.job_id, live.images):
            (completion,) = output.outputs
            requests.extend(live, completion.token_ids, *_logprobs(completion.logprobs, sampling.top_logprobs))
            if completion.finish_reason in _FINISH:
                routed = completion.routed_experts if sampling.routed_experts else None
                requests.end(
                    live,
                    finish=_FINISH[completion.finish_reason],
                    routed_experts=b"" if routed is None else routed.tobytes(),
                )
            elif completion.finish_reason == "error" and sampling.grammar:
                requests.end(live, error="vllm cannot follow the structured output: see its messages in the log")
            elif completion.finish_reason is not None and self._is_decoding:
                raise RuntimeError(f"vllm ended a request: {completion.finish_reason}")
            elif not requests.is_live(live):
                raise asyncio.CancelledError  # its output is not a number: abort it in vLLM

    async def _force(self, live: LiveRequest, requests: StreamedRequests) -> None:
        """Score the completion that a request gives, in one prefill."""
        prompt, given = live.request.prompt, ints(live.request.sampling.forced)
        n_top, tokens = live.request.sampling.top_logprobs, [*prompt, *given]
        # At the model's maximum length, the last token is scored as one that would be drawn. Nowhere else: in that step
        # vLLM returns no other request the most likely tokens.
        drawn = given[-1:] if len(tokens) >= self.llm.model_config.max_model_len else []
        if drawn and n_top:
            requests.end(live, error=f"no most likely tokens of {len(tokens)} tokens, the maximum length: shorten them")
            return
        params = SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=n_top,
            logprob_token_ids=drawn or None,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = tokens[: len(tokens) - len(drawn)]
        async for output in self._generate(tokens, params, live.request.job_id, live.images):
            (completion,) = output.outputs
            if completion.finish_reason == "length":
                logprobs, top = _logprobs(output.prompt_logprobs[len(prompt) + len(live.tokens) :], n_top)
                logprobs = [*logprobs, *(completion.logprobs[0][token].logprob for token in drawn)]
                requests.extend(live, given[len(live.tokens) :], logprobs, top)
                requests.end(live, finish=FINISH_LENGTH)
            elif completion.finish_reason is not None and self._is_decoding:
                raise RuntimeError(f"vllm ended a request: {completion.finish_reason}")

    async def _generate(self, tokens: list[int], params: SamplingParams, job_id: str, images: Any = None) -> Any:
        # Salted: a new request must not share a prefix whose keys and values were computed with older weights. Neither
        # does it share one of another adapter, or of an older version, which have other names.
        salt, request_id = str(self._n_loads), str(next(self._ids))
        prompt = {"prompt_token_ids": tokens, "cache_salt": salt} if images is None else images.input(tokens, salt)
        adapter = self._adapters.get(job_id)
        async for output in self.llm.generate(prompt, params, request_id=request_id, lora_request=adapter):
            yield output

    # --- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        """See `ports.Engine`. Loads changed words or every tensor; vLLM's processes verify what they read."""
        words = None if changes is None else changes.words
        update = {**weights.location, "words": None if words is None else words.location}
        await self._in_turn(lambda: self._load(version, update, keep_kv=keep_kv))
        if words is not None:
            self._report_excuses(version, words)
        return []

    def _report_excuses(self, version: int, words: ChangedWords) -> None:
        """Log, once, why ranks loaded all tensors instead of the changed words."""
        for rank in range(self._n_ranks):
            with suppress(FileNotFoundError):
                file = words.excuse(rank)
                reason = file.read_text()
                file.unlink()
                if reason not in self._excuses:
                    log.warning("weights_loaded_whole", version=version, rank=rank, reason=reason)
                    self._excuses.add(reason)

    async def differing(self, weights: StagedWeights) -> list[str]:
        """See `ports.Engine`; vLLM's memory cannot be compared."""
        del weights
        self._check_alive()
        return []

    async def _load(self, version: int, update: Mapping[str, Any], *, keep_kv: bool) -> None:
        await self._wake("weights")
        await self._pause(keep_kv=keep_kv)
        await self._abort_streams(self._adapters)  # vLLM drops all adapters
        self._adapters.clear()
        self._n_loads += 1
        try:
            await self._update(version, update)
        except EngineDeadError:
            raise
        except Exception as error:
            await self._pause(keep_kv=False)
            self._requests.begin_version(-1)
            cause = decode_load_error(error)
            raise type(cause)(f"vllm could not load version {version}: {cause}") from error
        self._requests.begin_version(version)
        if not self._is_suspended:
            await self._decode()

    async def _update(self, version: int, update: Mapping[str, Any]) -> None:
        """Have vLLM's processes load a version; raise what one of them has written, see `weight_transfer.Update`."""
        with TemporaryDirectory(prefix="load-failures-") as failures:
            await self.llm.start_weight_update()
            await self.llm.update_weights(WeightTransferUpdateRequest({**update, "failures": failures}))
            await self.llm.finish_weight_update(str(version))
            failed = _texts_in(Path(failures))
        if failed:
            raise RuntimeError(failed[0])

    def adapter_refusal(self, adapter: StagedAdapter) -> str:
        return adapter_refusal(adapter, self._max_adapter_rank)

    async def load_adapter(
        self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool = False
    ) -> list[str]:
        """See `ports.AdapterEngine`; compares what vLLM's processes have read."""
        return await self._in_turn(lambda: self._load_adapter(job_id, version, adapter, keep_kv=keep_kv))

    async def _load_adapter(
        self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool
    ) -> list[str]:
        if adapter is None:
            await self._use_adapter(job_id, version, None, keep_kv=keep_kv)
            return []
        with TemporaryDirectory(prefix="rlboost-adapter-") as name:
            folder = Path(name)
            await run_in_thread("adapter-write", lambda: write_adapter(adapter, folder))
            await self._use_adapter(job_id, version, folder, keep_kv=keep_kv)
            return await run_in_thread("adapter-verify", lambda: written_wrongly(adapter, folder))

    async def _use_adapter(self, job_id: str, version: int, folder: Path | None, *, keep_kv: bool) -> None:
        if folder is not None and len(self._adapters.keys() - {job_id}) > self.max_adapters:
            raise Fatal(f"more adapters than {self.max_adapters} and the one that a new one replaces are loaded")
        await self._wake("weights")
        await self._pause(keep_kv=keep_kv)
        held = self._adapters.get(job_id)
        if (folder is None) != (held is None):
            await self._abort_streams([job_id])  # a request keeps the adapter that it began with, or none
        if folder is None:
            await self._drop_adapter(job_id)
        else:
            # The id of the old one: requests that keep their KV caches continue with the new one.
            number = next(self._adapter_ids) if held is None else held.lora_int_id
            name = f"{job_id} {version} {next(self._adapter_ids)}"
            try:
                await self.llm.add_lora(LoRARequest(name, number, str(folder), load_inplace=True))
            except EngineDeadError:
                raise
            except Exception as error:
                raise UnsuitableWeights(f"vllm could not load the adapter of version {version}: {error}") from error
            self._adapters[job_id] = LoRARequest(name, number, str(folder))
        self._requests.begin_version(version, job_id)
        if not self._is_suspended:
            await self._decode()

    async def unload_adapter(self, job_id: str) -> None:
        await self._in_turn(lambda: self._drop_adapter(job_id))

    async def _drop_adapter(self, job_id: str) -> None:
        if (held := self._adapters.pop(job_id, None)) is not None:
            await self.llm.remove_lora(held.lora_int_id)

    async def _abort_streams(self, jobs: Collection[str]) -> None:
        """Abort the requests of some jobs in vLLM; they start again when it decodes."""
        streams = [task for live, task in self._streams.items() if live.request.job_id in jobs]
        for task in streams:
            task.cancel()
        if streams:
            await asyncio.wait(streams)

    async def score(self, sequences: Sequences, temperature: float, job_id: str = "") -> list[list[float]]:
        """See `ports.Engine`.

        Each token is one request, so the forward pass and the temperature are those of generation; vLLM's
        `prompt_logprobs` would skip the latter.
        """
        return await self._in_turn(lambda: self._score(sequences, temperature, job_id))

    async def _score(self, sequences: Sequences, temperature: float, job_id: str) -> list[list[float]]:
        await self._wake("weights", "kv_cache")
        await self.llm.resume_generation()
        scores = [
            [
                self._score_token([*prompt, *completion[:at]], token, temperature, job_id)
                for at, token in enumerate(completion)
            ]
            for prompt, completion in sequences
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [[group.create_task(score, name="score") for score in row] for row in scores]
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        return [[task.result() for task in row] for row in tasks]

    async def sample(self, requests: Sequence[Request]) -> list[Emission]:
        return await self._in_turn(lambda: self._sample(requests))

    async def _sample(self, requests: Sequence[Request]) -> list[Emission]:
        own = self._new_requests()
        own.begin_version(self._requests.version)
        own.job_versions.update(self._requests.job_versions)
        own.submit(requests)
        await self._wake("weights", "kv_cache")
        await self.llm.resume_generation()
        async with asyncio.TaskGroup() as group:
            for live in own.start():
                group.create_task(self._stream(live, own), name=f"sample-{live.request.sample}")
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        return own.take_emissions()

    async def _score_token(self, tokens: list[int], token: int, temperature: float, job_id: str) -> float:
        params = SamplingParams(
            temperature=temperature, max_tokens=1, ignore_eos=True, logprob_token_ids=[token], detokenize=False
        )
        async for output in self._generate(tokens, params, job_id):
            (completion,) = output.outputs
            # With speculative decoding vLLM may return none.
            return float(completion.logprobs[0][token].logprob) if completion.logprobs else math.nan
        raise RuntimeError("vllm ended a request without a token")

    # --- pausing ------------------------------------------------------------------------------------------------------

    async def suspend(self, *, keep_kv: bool = False) -> None:
        await self._in_turn(lambda: self._suspend(keep_kv=keep_kv))

    async def _suspend(self, *, keep_kv: bool) -> None:
        self._is_suspended = True
        await self._pause(keep_kv=keep_kv)
        if not keep_kv and self._can_sleep and "weights" not in self._asleep:
            await self.llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    async def resume(self) -> None:
        await self._in_turn(self._resume)

    async def _resume(self) -> None:
        await self._wake("weights", "kv_cache")
        self._is_suspended = False
        await self._decode()

    async def _pause(self, *, keep_kv: bool) -> None:
        self._is_decoding = False
        if keep_kv:
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            return
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        self._end_streams(list(self._streams))  # one that vLLM got only now would wait until it resumes
        if self._streams:
            await asyncio.wait(list(self._streams.values()))

    async def _decode(self) -> None:
        await self.llm.resume_generation()
        self._is_decoding = self._requests.version >= 0
        self._start_streams()

    async def _wake(self, *tags: str) -> None:
        """Take device memory back."""
        # Only those asleep: waking the others would map their memory twice.
        if asleep := [tag for tag in tags if tag in self._asleep]:
            await self.llm.wake_up(asleep)
            self._asleep.difference_update(asleep)

    # --- life and death -----------------------------------------------------------------------------------------------

    async def _in_turn(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` after the work before it; once it has begun, cancelling the caller does not stop it."""
        self._check_alive()
        await self._turn.acquire()

        async def run() -> T:
            try:
                self._check_alive()
                return await self._while_alive(work())
            except (EngineDeadError, ExceptionGroup) as error:
                dead = next((leaf for leaf in leaves(error) if isinstance(leaf, EngineDeadError)), None)
                if dead is None:
                    raise
                raise self._fail(dead) from error
            finally:
                self._turn.release()

        return await asyncio.shield(asyncio.create_task(run(), name="vllm-control"))

    async def _while_alive(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; vLLM 0.32 leaves calls without an answer when its core dies."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=_LIVENESS_S)
            if not task.done() and self.llm.errored:
                task.cancel()
                raise self.llm.dead_error
        return task.result()

    async def close(self) -> None:
        self._end = self._end or "closed"
        streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()
        if streams:
            await asyncio.wait(streams)
        await run_in_thread("vllm-shutdown", self.llm.shutdown)

    def _fail(self, cause: BaseException) -> EngineFailed:
        failure = EngineFailed(f"the inference engine died: {cause!r}; see vllm's messages in the log")
        failure.__cause__ = cause
        self._end = self._end or failure
        return failure

    def _check_alive(self, *, allow_closed: bool = False) -> None:
        """Raise `EngineFailed` if the engine died, `EngineClosed` if it was closed."""
        if self._end is None and self.llm.errored:
            self._fail(self.llm.dead_error)
        if isinstance(self._end, EngineFailed):
            raise EngineFailed(str(self._end)) from self._end.__cause__
        if self._end is not None and not allow_closed:
            raise EngineClosed("the inference engine is closed")


def _texts_in(folder: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())]
