"""Passes over packed micro-batches, run by megatron-core's schedules. Import after `hook.install()`.

Rows lie end to end without padding, each a sequence of its own. The loss is not computed here: of it only its gradient
with respect to the log-probabilities is needed, and a caller knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor, distributed

from services.trainer.adapters.megatron.model import Network
from services.trainer.adapters.ranks.packed import GradientOf, Packed
from shared.columns import I32, U8, ints, unpack


class SchedulePasses:
    """Runs micro-batches through one rank's part of the model; all ranks of a model do so at once."""

    def __init__(self, model: Network, temperature: float) -> None:
        """Use `model`; log-probabilities are of the distribution at `temperature`."""
        self._model = model
        self._temperature = temperature
        self._is_last = parallel_state.is_pipeline_last_stage()
        self._is_first_of_tensor = parallel_state.get_tensor_model_parallel_rank() == 0

    def logprobs(self, batches: Sequence[Packed]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities on the last stage, [trained tokens], nothing elsewhere."""
        found: list[Tensor] = []

        def keep(_number: int, logprobs: Tensor) -> Tensor:
            found.append(logprobs.detach().cpu())
            return logprobs.sum()

        with torch.no_grad():
            self._run(batches, keep, forward_only=True)
        return found

    def accumulate(self, batches: Sequence[Packed], gradient_of: GradientOf) -> None:
        """Run forward and backward, adding to the gradients."""

        def loss(number: int, logprobs: Tensor) -> Tensor:
            gradient = torch.empty_like(logprobs)
            if self._is_first_of_tensor:
                gradient.copy_(gradient_of(number, logprobs.detach()))
            source = parallel_state.get_tensor_model_parallel_src_rank()
            distributed.broadcast(gradient, source, group=parallel_state.get_tensor_model_parallel_group())
            # Its gradient is the real loss's, and that is all that backward is for.
            return (logprobs * gradient).sum()

        self._run(batches, loss, forward_only=False)

    def _run(self, batches: Sequence[Packed], loss: Callable[[int, Tensor], Tensor], *, forward_only: bool) -> None:
        if not batches:
            return
        step = partial(self._forward, loss=loss)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(enumerate(batches)),
            model=[self._model.chunk],
            num_microbatches=len(batches),
            seq_length=1,  # each micro-batch has its own: the stages tell each other
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(
        self, batches: Iterator[tuple[int, Packed]], chunk: Any, *, loss: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, float]]]]:
        number, batch = next(batches)
        tokens, ends, predicts = _laid_out(batch, self._model.config)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        ids, at = torch.from_numpy(tokens).to(device), torch.from_numpy(predicts).to(device)
        cuts = torch.from_numpy(ends).to(device)
        longest = int(np.diff(ends).max())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cuts, cu_seqlens_kv=cuts, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        output = chunk(ids[None], torch.zeros_like(ids)[None], None, packed_seq_params=packed)

        def lost(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            logprobs = self._logprobs_of(logits[0], ids, at)
            return loss(number, logprobs), torch.tensor(len(at), dtype=torch.int, device=device), {}

        return output, lost

    def _logprobs_of(self, logits: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens behind the positions `at`; `logits` [tokens, own vocabulary]."""
        chosen = logits[at].float() / self._temperature
        rows, real = self._model.map.vocabulary_rows
        if real < rows:
            chosen = chosen.masked_fill(torch.arange(rows, device=chosen.device) >= real, float("-inf"))
        # It overwrites what it is given.
        entropy: Tensor = vocab_parallel_cross_entropy(chosen[:, None].clone(), ids[at + 1][:, None])
        return -entropy[:, 0]


def _laid_out(batch: Packed, config: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return token ids, the sequences' ends from 0 on, and the positions whose next token is trained on."""
    tokens = unpack(batch.tokens, I32).astype(np.int64)
    prompts, completions = np.asarray(ints(batch.prompts)), np.asarray(ints(batch.completions))
    ends = np.concatenate([[0], np.cumsum(prompts + completions)]).astype(np.int32)
    predicts = np.concatenate(
        [
            np.arange(end + prompt - 1, end + prompt + completion - 1)
            for end, prompt, completion in zip(ends, prompts, completions, strict=False)
        ]
    ).astype(np.int64)[unpack(batch.trained, U8).astype(bool)]
    if config.sequence_parallel and (short := -len(tokens) % config.tensor_model_parallel_size):
        # The ranks share the tokens out evenly: what is missing is a sequence of its own that nobody looks at.
        tokens = np.concatenate([tokens, np.zeros(short, np.int64)])
        ends = np.append(ends, ends[-1] + short).astype(np.int32)
    return tokens, ends, predicts
