"""The built-in engine: continuous batching over any full-attention Hugging Face causal LM, on a CPU or a CUDA device.

One thread, `torch-engine`, owns the model, the cache and the slots. It runs in rounds: between two decode steps it runs
the event loop's calls (load, suspend, abort), admits and prefills the requests that fit, then decodes one token per
slot. With a `Drafter`, a decode step may verify a draft of each slot's next tokens, and then decodes several tokens.

A prefix is every token of a request but its last. Prefill only fills the cache with the prefix; the last token goes
through the model in the next decode step, so all tokens are sampled in one place. Keys and values that a prefix has in
common with another slot's are copied from that slot: the prompt of a group is prefilled once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlboost.services.rollout_worker.adapters.engine_thread import EngineThread, ThreadedEngine
from rlboost.services.rollout_worker.adapters.torch import model as torch_model
from rlboost.services.rollout_worker.adapters.torch.lora import Adapters, jobs_of
from rlboost.services.rollout_worker.adapters.torch.slot_cache import SlotCache, default_kv_cache_bytes, tokens_in
from rlboost.services.rollout_worker.adapters.torch.vision import PassInputs, Vision
from rlboost.services.rollout_worker.domain import frames
from rlboost.services.rollout_worker.domain.load import EngineStats, KvCapacity
from rlboost.services.rollout_worker.domain.request_table import NO_TOKEN, Ints, RequestTable
from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey, uniforms
from rlboost.services.rollout_worker.domain.speculation import Drafter, Drafts
from rlboost.services.rollout_worker.ports import Sequences, StagedAdapter
from rlboost.shared.messages import SAMPLING_OPTIONS
from rlboost.shared.model.experts import is_mixture
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.weights.changed_words import ChangedWords
from rlboost.shared.wire import I32, TOP, unpack

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.adapters.torch.grammar import GrammarCompiler, GrammarMatcher

# --- Samples one token per request by inverting the cumulative distribution at a given uniform number -----------------


Floats = npt.NDArray[np.floating]


def sample(
    logits: torch.Tensor,
    temperature: Floats,
    top_p: Floats,
    uniform: Floats,
    *,
    top_k: Ints | None = None,
    min_p: Floats | None = None,
    restricted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each request.

    Args:
        logits: [n, vocabulary], any float dtype.
        temperature: [n]; 0 selects the most likely token.
        top_p: [n], in (0, 1]: sample from the smallest set of most likely tokens whose probabilities add up to at least
            this. Ignored at temperature 0.
        uniform: [n], in [0, 1).
        top_k: [n]; sample from this many of the most likely tokens, before `top_p`; 0: from all.
        min_p: [n]; sample from the tokens that are at least this fraction as likely as the most likely one.
        restricted: [n, vocabulary], the logits to draw from, if they differ from `logits`.

    Returns:
        Tokens [n] (int64), and the log-probability [n] (float32) of each under the whole distribution at its
        temperature, or at 1 if that is 0: a trainer, which knows no nucleus, computes the same. If the logits are not
        numbers, neither is the log-probability.

    """
    greedy = temperature == 0
    logprobs = _log_softmax(logits, temperature)
    drawn = logprobs if restricted is None else _log_softmax(restricted, temperature)
    weights = drawn.exp()
    top_k = np.zeros_like(top_p, np.int64) if top_k is None else top_k
    min_p = np.zeros_like(top_p) if min_p is None else min_p
    narrowed = np.flatnonzero(((top_p < 1) | (top_k > 0) | (min_p > 0)) & ~greedy)
    if narrowed.size:
        indices = torch.from_numpy(narrowed).to(logits.device)
        limits = [_column(limit[narrowed], logits) for limit in (top_p, top_k, min_p)]
        weights[indices] = _narrowed(weights[indices], *limits)
    # float64: over a large vocabulary, the rounding error of a float32 sum would bias the tail.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    # right=True: the first entry strictly above the target, which is never one of probability zero.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(_column(greedy, logits), drawn.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def top_logprobs(logits: torch.Tensor, temperature: Floats, counts: Ints) -> dict[int, bytes]:
    """Return the most likely tokens of each row that asks for some, as entries of `shared.wire.TOP`.

    Args:
        logits: [n, vocabulary], any float dtype.
        temperature: [n]; see `sample`.
        counts: [n], how many tokens to return.

    """
    rows = np.flatnonzero(counts)
    if not rows.size:
        return {}
    own = _log_softmax(logits[torch.from_numpy(rows).to(logits.device)], temperature[rows])
    best = own.topk(int(counts.max()), dim=-1)
    entries = np.empty(best.values.shape, TOP)
    entries["token"], entries["logprob"] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    return {row: entries[i, : counts[row]].tobytes() for i, row in enumerate(rows.tolist())}


def _log_softmax(logits: torch.Tensor, temperature: Floats) -> torch.Tensor:
    logits = logits.float()
    if (temperature != 1).any():
        logits = logits / _column(np.where(temperature == 0, 1, temperature), logits)
    return torch.log_softmax(logits, dim=-1)


def _narrowed(weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the probabilities [n, vocabulary] with 0 for the tokens that the limits exclude, in vLLM's order."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    excluded = (ranked < min_p * ranked[:, :1]) | ((rank >= top_k) & (top_k > 0))
    mass = ranked.double().masked_fill(excluded, 0.0)
    excluded |= mass.cumsum(dim=-1) - mass >= top_p * mass.sum(dim=-1, keepdim=True)
    return weights.scatter(1, order, ranked.masked_fill(excluded, 0.0))


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


# --- The engine -------------------------------------------------------------------------------------------------------


_PREFILL_TOKENS = 4096
"""Maximum tokens of one prefill pass, including padding: bounds the memory of a pass and the delay of running requests.
For a longer prefix a pass takes fewer, so that it has no more pairs of tokens."""
_ADMIT_STEPS = 4
"""Decode steps between two admissions while most slots are busy: prefilling one request costs nearly as much as ten,
and idle slots cost little."""
_SORT_STEPS = 16
"""Decode steps between two checks whether sorting the slots by length pays."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine(ThreadedEngine):
    """`ports.Engine` in this process.

    Args:
        directory: holds the model's `config.json`; weights come through `load_weights`.
        slots: maximum number of running requests.
        device: "cpu" or a CUDA device that `require_device` has checked.
        dtype: dtype of weights, activations and cache; sampling is in float32.
        kv_cache_bytes: maximum size of the KV cache; while it grows, one layer's part is allocated twice. Requests that
            do not fit are queued. 0 = 0.7 of the free memory on a GPU, or 1 GiB on a CPU.
        gpu_memory_utilization: fraction of the GPU's memory for weights, cache and passes, if `kv_cache_bytes` is 0;
            0 = no limit but the free memory.
        tokenizer_json: a `tokenizer_for_grammars`; empty for none.
        drafter: drafts tokens for the engine's decode steps; None = one token per step.
        max_adapters: how many jobs it serves at once with adapters of the same weights; 0 = adapters are merged.
        max_adapter_rank: an adapter of a higher rank is merged.

    Raises:
        UnsuitableWeights: the directory or the model is not supported, or the cache is too small.

    """

    def __init__(  # noqa: PLR0913 - settings of the worker, most with a default
        self,
        directory: Path,
        *,
        slots: int,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        kv_cache_bytes: int = 0,
        gpu_memory_utilization: float = 0.0,
        tokenizer_json: str = "",
        drafter: Drafter | None = None,
        max_adapters: int = 8,
        max_adapter_rank: int = 64,
    ) -> None:
        self._device = torch.device(device)
        self._model = torch_model.build(directory, DTYPES[dtype], self._device)
        self._weights = torch_model.Weights(self._model)
        self._adapters = Adapters(self._model, max_adapter_rank)
        max_len = torch_model.max_length(self._model)
        n_bytes = kv_cache_bytes or default_kv_cache_bytes(self._device, gpu_memory_utilization)
        self._token_bytes = torch_model.kv_token_bytes(self._model)
        capacity = KvCapacity(slots, max_len, tokens_in(n_bytes, self._token_bytes))
        self._cache = SlotCache(capacity, DTYPES[dtype], self._device)
        self._cache_is_stale = False
        self._stale_keys: set[RequestKey] = set()
        """Requests whose cache has keys and values of older weights; other slots must not copy them."""
        self._steps = 0
        self.prefilled_tokens_total = 0
        """Tokens that went through the model to fill the cache, without those copied from other slots."""
        self._routing = torch_model.RoutingRecorder(self._model)
        self._vision = Vision(self._model)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        self._grammars = _grammar_compiler(tokenizer_json, vocabulary)
        options = set(SAMPLING_OPTIONS) - {"stop"} - ({"grammar"} if self._grammars is None else set())
        if self._vision.config is None:
            options.remove("images")
        if device != "cpu" or is_mixture(self._model.config.to_dict()):
            options.remove("batch_invariant")  # untested, and the number of an expert's tokens depends on the others
        self._new_table = partial(RequestTable, slots, max_len, vocabulary, capacity, self._routing.shape, options)
        table = self._new_table()
        self._drafter = drafter
        self._hints: list[tuple[list[int], Sequence[int]]] = []
        """Prompts and completions for the drafter, which belongs to the engine's thread."""
        if drafter is not None:
            table.on_end = drafter.on_end
        # On a CPU, other processes must not make a pass look longer.
        self._clock = time.thread_time if self._device.type == "cpu" else time.perf_counter
        super().__init__(EngineThread("torch-engine"), table, slots=slots)
        self.max_adapters = max_adapters
        self.adapters = self if max_adapters else None

    @property
    def kv_cache_bytes(self) -> int:
        """The current size of the KV cache."""
        return self._cache.tokens * self._token_bytes

    def stats(self) -> EngineStats:
        """See `ports.Engine`."""
        stats, drafter = super().stats(), self._drafter
        if drafter is None:
            return stats
        return replace(
            stats,
            drafted_total=drafter.drafted_total,
            accepted_total=drafter.accepted_total,
            uses_drafts=drafter.looks,
        )

    def hint(self, completions: Iterable[tuple[int, Sequence[int]]]) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            if self._drafter is not None:
                prompts = self._table.prompts()
                self._hints += [(prompts[sample], tokens) for sample, tokens in completions if sample in prompts]

    def submit(self, requests: Sequence[Request]) -> None:
        """See `ports.Engine`. A request with a grammar is queued until the grammar is compiled."""
        super().submit(requests)
        if self._grammars is not None:
            for request in requests:
                if request.sampling.grammar:
                    compiled = self._grammars.compile(request.sampling)
                    compiled.add_done_callback(partial(self._on_compiled, request.key))

    def set_images(self, key: RequestKey, images: Sequence[bytes] | str) -> None:
        """See `ports.Engine`."""
        with self._thread.lock:
            self._thread.check_alive()
            request = next((one for one in self._table.pending if one.key == key), None)
            if request is None:
                return
            try:
                prepared = images if isinstance(images, str) else self._vision.prepare(request, images)
            except ValueError as error:
                prepared = f"its images are not those of its prompt: {error}"
            self._table.set_images(key, prepared)
            self._thread.lock.notify()

    def _on_compiled(self, key: RequestKey, compiled: Future[GrammarMatcher]) -> None:
        error = compiled.exception()
        with self._thread.lock:
            self._table.set_grammar(key, compiled.result() if error is None else str(error))
            self._thread.lock.notify()

    async def close(self) -> None:
        """See `ports.Engine`."""
        await super().close()
        if self._grammars is not None:
            await self._grammars.close()

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ThreadedEngine.loaded_tensors`."""
        return iter(self._weights)

    def adapter_refusal(self, adapter: StagedAdapter) -> str:
        return self._adapters.refusal(adapter)

    async def load_adapter(
        self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool = False
    ) -> list[str]:
        await self._call(lambda: self._load_adapter(job_id, version, adapter, keep_kv=keep_kv))
        if adapter is None:
            return []
        return await run_in_thread("adapter-verify", lambda: adapter.factors_differing(self._adapters.factors(job_id)))

    async def unload_adapter(self, job_id: str) -> None:
        await self._call(lambda: self._adapters.unload(job_id))

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool) -> None:
        with self._replacing(version, keep_kv=keep_kv):
            self._adapters.clear()
            self._weights.load(tensors)

    @torch.inference_mode()
    def _load_adapter(self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool) -> None:
        mine = {request.key for request in self._table.requests if request.job_id == job_id}
        if keep_kv:
            self._stale_keys = mine | (self._stale_keys & {request.key for request in self._table.requests})
        elif mine:
            self._cache_is_stale = True
        self._adapters.load(job_id, adapter)
        with self._thread.lock:
            self._table.begin_version(version, job_id)

    @torch.inference_mode()
    def _load_words(self, version: int, words: ChangedWords, *, keep_kv: bool) -> str:
        with self._replacing(version, keep_kv=keep_kv):
            self._adapters.clear()
            return self._weights.write(words.read())

    @contextmanager
    def _replacing(self, version: int, *, keep_kv: bool) -> Iterator[None]:
        if keep_kv:
            self._stale_keys = {request.key for request in self._table.requests}
        else:
            self._cache_is_stale = True
        try:
            yield
        finally:
            self._vision.forget()
            with self._thread.lock:
                self._table.begin_version(version if self._weights.complete else -1)

    @torch.inference_mode()
    def _score(self, sequences: Sequences, temperature: float, job_id: str) -> list[list[float]]:
        self._adapters.select([job_id])
        return torch_model.score(self._model, sequences, temperature)

    @torch.inference_mode()
    def _sample(self, requests: Sequence[Request]) -> list[Emission]:
        table = self._new_table()
        table.begin_version(self._table.version)
        table.job_versions.update(self._table.job_versions)
        table.submit(requests)
        self._clear_kv()
        while table.n or table.pending:
            self._generate(table)
        self._clear_kv()
        return table.take_emissions()

    def _clear_kv(self) -> None:
        self._cache_is_stale = True
        self._cache.clear()

    def _shut_down(self) -> None:
        self._cache.clear()

    @torch.inference_mode()
    def _round(self) -> None:
        with self._thread.lock:
            moves = self._table.remove_aborted()
            ready = self._can_decode()
            hints, self._hints = self._hints, []
        self._cache.move(moves)
        for prompt, completion in hints:
            if self._drafter is not None:
                self._drafter.hint(prompt, completion)
        if ready:
            self._generate(self._table)

    def _generate(self, table: RequestTable) -> None:
        with self._thread.lock:
            busy = 2 * table.n >= self.slots
            new = table.admit(0 if busy and self._steps % _ADMIT_STEPS else _PREFILL_TOKENS)
            n = table.n
        if self._cache_is_stale:
            self._cache.clear()
            self._stale_keys.clear()
            self._cache_is_stale, new = False, range(n)
        if n > 0:
            self._cache.fit(table.positions, held=new.start)
            if new:
                self._prefill_new(table, new)
            self._sort(table)
            self._decode(table)
        self._steps += 1

    def _prefill_new(self, table: RequestTable, new: range) -> None:
        """Fill the cache with the prefixes of new slots, which come after all others."""
        held = [slot for slot in range(new.start) if table.requests[slot].key not in self._stale_keys]
        if table.is_batch_invariant:  # the others may have been computed in passes of any shape
            held = [slot for slot in held if table.requests[slot].sampling.batch_invariant]
        jobs = table.jobs
        plans = []
        for job_id in dict.fromkeys(jobs[slot] for slot in new):  # with another adapter, keys and values are others
            same = ([slot for slot in slots if jobs[slot] == job_id] for slots in (new, held))
            plans.append(frames.plan(*([(slot, table.prefix(slot)) for slot in slots] for slots in same)))
        for turn in map(list, map(chain.from_iterable, zip_longest(*plans, fillvalue=()))):
            copies = [prefill for prefill in turn if prefill.shared]
            if copies:
                pairs = np.array([(prefill.slot, prefill.donor) for prefill in copies])
                self._cache.share(pairs[:, 0], pairs[:, 1], max(prefill.shared for prefill in copies))
                table.share_routing(pairs[:, 0], pairs[:, 1], np.array([prefill.shared for prefill in copies]))
            todo = np.array([(prefill.slot, prefill.shared, prefill.length) for prefill in turn])
            if table.is_batch_invariant:
                slots = np.repeat(todo[:, 0], todo[:, 2] - todo[:, 1])
                positions = np.concatenate([np.arange(start, end) for _, start, end in todo])
                if len(slots):
                    self._compute_rows(table, slots, positions)
                self.prefilled_tokens_total += len(slots)
            else:
                self._prefill(table, todo)
        self._vision.forget()

    def _prefill(self, table: RequestTable, todo: Ints) -> None:
        """Run the model on the tokens from `todo[:, 1]` to `todo[:, 2]` of the slots `todo[:, 0]`."""
        while (todo := todo[todo[:, 1] < todo[:, 2]]).size:
            most = max(1, min(_PREFILL_TOKENS, _PREFILL_TOKENS**2 // int(todo[:, 2].max())))
            lengths = np.minimum(todo[:, 2] - todo[:, 1], most)
            todo = todo[np.argsort(-lengths, kind="stable")]
            longest = int(lengths.max())
            batch = slice(most // longest)
            slots, starts, ends = todo[batch].T
            lengths = np.minimum(ends - starts, longest)
            tokens = np.zeros((len(slots), longest), np.int64)
            for i, (slot, start, length) in enumerate(zip(slots, starts, lengths, strict=True)):
                tokens[i, :length] = table.tokens(slot)[start : start + length]
            positions = self._cache.begin_prefill(slots, starts, lengths)
            self._adapters.select(jobs_of(slots, table.jobs), longest)
            with self._routing.recording(enabled=table.records_routing) as experts:
                of_tokens = np.repeat(slots[:, None], longest, axis=1)
                inputs = self._vision.inputs(table.requests, of_tokens, tokens, positions)
                torch_model.prefill(self._model, inputs, self._cache)
            if table.records_routing:
                table.record_routing(slots, starts, lengths, experts(len(slots)))
            self.prefilled_tokens_total += int(lengths.sum())
            todo[batch, 1] += lengths

    def _sort(self, table: RequestTable) -> None:
        if self._steps % _SORT_STEPS or table.is_batch_invariant:
            return
        if (order := self._cache.order(table.positions)) is not None:
            with self._thread.lock:
                table.reorder(order)
            self._cache.reorder(order)

    def _decode(self, table: RequestTable) -> None:
        if (forced := table.forced_drafts()) is not None:
            self._verify(table, None, Drafts(forced))
            return
        drafter = self._drafter if table is self._table and not table.is_batch_invariant else None
        if drafter is None:
            self._decode_one(table)
            return
        drafts, n, began = drafter.drafts(table), table.n, self._clock()
        if drafts is None:
            self._decode_one(table)
        else:
            self._verify(table, drafter, drafts)
        drafter.times.observe(self._clock() - began, n, drafts.total if drafts else 0)

    def _decode_one(self, table: RequestTable) -> None:
        """Decode one token per slot."""
        positions, n = table.positions, table.n
        if table.is_batch_invariant:
            logits = self._compute_rows(table, np.arange(n), positions)
            self._commit_one(table, logits)
            return
        self._cache.begin_decode(positions)
        self._adapters.select(table.jobs)
        at = torch.from_numpy(positions[:, None]).to(self._device)
        inputs = self._vision.inputs(table.requests, np.arange(n)[:, None], table.last_tokens[:, None], at)
        with self._routing.recording(enabled=table.records_routing) as experts:
            logits = torch_model.decode(self._model, inputs, self._cache)
        if table.records_routing:
            table.record_routing(np.arange(n), positions, np.ones(n, np.int64), experts(n))
        self._commit_one(table, logits)

    def _commit_one(self, table: RequestTable, logits: Tensor) -> None:
        """Draw and commit the next token of each slot from its logits [n, vocabulary]."""
        tokens, logprobs, most_likely = self._draw(table, logits, np.arange(table.n), table.offsets)
        with self._thread.lock:
            moves = table.commit(tokens, logprobs, most_likely)
        self._cache.move(moves)

    def _compute_rows(self, table: RequestTable, slots: Ints, positions: Ints) -> Tensor:
        """Run the model on the tokens of slots at positions; see `torch_model.compute_rows`."""
        tokens = [table.tokens(slot)[at] for slot, at in zip(slots, positions, strict=True)]

        def inputs_of(of_slots: Ints, given: Ints, at: Tensor) -> PassInputs:
            self._adapters.select(jobs_of(of_slots[0], table.jobs), by_row=True)
            return self._vision.inputs(table.requests, of_slots, given, at)

        return torch_model.compute_rows(
            self._model, np.array(tokens, np.int64), slots, positions, self._cache, inputs_of
        )

    def _verify(self, table: RequestTable, drafter: Drafter | None, drafts: Drafts) -> None:
        """Decode the tokens of each slot up to the first that differs from its draft; `drafter` is what drafted."""
        starts, lengths = table.positions, np.array([1 + len(draft) for draft in drafts.tokens])
        self._cache.fit(starts + lengths - 1, held=table.n)
        at = self._cache.begin_verify(starts, lengths)
        self._adapters.select(table.jobs, lengths)
        pairs = zip(table.last_tokens.tolist(), drafts.tokens, strict=True)
        # No draft has a token of an image: an id below 0 in one is never drawn.
        given = np.array([max(token, 0) for last, draft in pairs for token in (last, *draft)], np.int64)
        slots, firsts = np.repeat(np.arange(table.n), lengths), np.cumsum(lengths) - lengths
        inputs = self._vision.inputs(table.requests, slots[None], given[None], at)
        with self._routing.recording(enabled=table.records_routing) as experts:
            logits = torch_model.verify(self._model, inputs, self._cache)
        if table.records_routing:
            table.record_routing(np.arange(table.n), starts, lengths, np.split(experts(1)[0], firsts[1:]))
        offsets = table.offsets[slots] + np.arange(len(slots)) - firsts[slots]
        tokens, logprobs, most_likely = self._draw(table, logits, slots, offsets)
        if self._cache_is_stale and drafter is not None:
            # A draft may be the cause: the next pass is without.
            drafter.on_failed(drafts)
            return
        accepted = [
            _common_length(draft, tokens[first : first + len(draft)].tolist())
            for draft, first in zip(drafts.tokens, firsts.tolist(), strict=True)
        ]
        if drafter is not None:
            drafter.on_verified(drafts, accepted)
        columns, last = np.arange(1 + max(accepted)), np.array(accepted)[:, None]
        rows = firsts[:, None] + np.minimum(columns, last)
        drawn = np.where(columns <= last, tokens[rows], NO_TOKEN)
        most_likely = {i: most_likely[row] for i, row in enumerate(rows.ravel().tolist()) if row in most_likely}
        with self._thread.lock:
            moves = table.commit(drawn, logprobs[rows], most_likely)
        self._cache.move(moves)

    def _draw(
        self, table: RequestTable, logits: Tensor, slots: Ints, offsets: Ints
    ) -> tuple[Ints, npt.NDArray[np.float32], dict[int, bytes]]:
        """Draw the token at an offset of a slot in each row of the logits [rows, vocabulary]; see `table.commit`."""
        temperature = table.temperature[slots]
        sampled = sample(
            logits,
            temperature,
            table.top_p[slots],
            uniforms(table.seeds[slots], offsets),
            top_k=table.top_k[slots],
            min_p=table.min_p[slots],
            restricted=_restricted(table, logits, slots, offsets),
        )
        tokens, logprobs = (tensor.cpu().numpy() for tensor in sampled)
        if not np.isfinite(logprobs).all():
            # NaN may be in the cache, where even a masked column would affect the slot's next request.
            self._cache_is_stale = True
        return tokens, logprobs, top_logprobs(logits, temperature, table.top_logprobs[slots])


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginnings."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _grammar_compiler(tokenizer_json: str, vocabulary: int) -> GrammarCompiler | None:
    """Return what compiles grammars, None without a tokenizer."""
    if not tokenizer_json:
        return None
    from rlboost.services.rollout_worker.adapters.torch.grammar import GrammarCompiler  # noqa: PLC0415 - optional

    return GrammarCompiler(tokenizer_json, vocabulary)


def _restricted(table: RequestTable, logits: Tensor, slots: Ints, offsets: Ints) -> Tensor | None:
    """Return the logits to draw from, None if no request changes them; see `TorchEngine._draw`."""
    if not (rows := np.flatnonzero(table.restricted[slots])).size:
        return None
    changed = logits.to(torch.float32, copy=True)
    for row_number, slot, offset in zip(rows.tolist(), slots[rows].tolist(), offsets[rows].tolist(), strict=True):
        sampling, row = table.requests[slot].sampling, changed[row_number]
        if sampling.forced:
            row.fill_(-torch.inf)[int(unpack(sampling.forced, I32)[offset])] = 0.0
            continue
        for token, bias in sampling.logit_bias:
            row[token] += bias
        if offset < sampling.min_tokens:
            row[[token for token in sampling.stop_token_ids if token < len(row)]] = -torch.inf
        if (allowed := table.allowed(slot)) is not None:
            row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)
    return changed
