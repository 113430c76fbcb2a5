"""Forward passes of models of transformers, from rows to log-probabilities of their trained tokens, or to values.

Rows are packed without padding. The output head runs only on positions that predict a trained token, in chunks: with a
large vocabulary, the logits of a long row would need more memory than everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlboost.services.trainer.adapters.torch.attention import Array, ContextGroup, RowLengths, packs_rows, select_rows
from rlboost.services.trainer.adapters.torch.routing import Balance, Replay, Routers
from rlboost.services.trainer.domain.loss.function import TokenBatch
from rlboost.services.trainer.domain.loss.policy import value_loss
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.data.vision import decode, patches, rotary_positions, vision_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import CHUNK_LOGITS
from rlboost.shared.wire import F32, I32, U8, RoutedShape, length, pack, unpack

# --- Converts rows of a micro-batch to arrays: packed token ids, and columns over all trained tokens, row by row ------


DUMMY_ROWS = [SequenceRow(pack([0], I32), pack([0], I32))]
"""A micro-batch of two tokens, for checks, and for ranks with fewer micro-batches than others."""


class Packed(NamedTuple):
    """Rows concatenated without padding."""

    ids: Array
    """Token ids, int64 [tokens]."""
    boundaries: Array
    """0, then the end of each row, int32 [rows + 1]."""
    predicts: Array
    """Positions before trained tokens, int64 [trained tokens]. Indices rather than a mask: selecting by a mask on a GPU
    makes the host wait."""

    @property
    def positions(self) -> Array:
        """The position of each token in its row, int64 [tokens]."""
        positions: Array = np.arange(len(self.ids)) - np.repeat(self.boundaries[:-1], np.diff(self.boundaries))
        return positions

    def padded(self, divisor: int) -> Packed:
        """Return the rows, with a row of padding if `divisor` does not divide their tokens."""
        if not (n_padding := -len(self.ids) % divisor):
            return self
        end = np.int32(len(self.ids) + n_padding)
        return self._replace(ids=np.pad(self.ids, (0, n_padding)), boundaries=np.append(self.boundaries, end))


def packed(rows: Sequence[SequenceRow]) -> Packed:
    """Return rows as one sequence."""
    ids = np.frombuffer(b"".join(part for row in rows for part in (row.prompt, row.completion)), I32)
    boundaries = np.cumsum([0, *(row.n_tokens for row in rows)])
    predicts = np.zeros(len(ids), np.bool_)
    for row, start, end in zip(rows, boundaries, boundaries[1:], strict=False):
        before = start + length(row.prompt, I32) - 1
        predicts[before : end - 1] = unpack(row.loss_mask, U8) if row.loss_mask else True
    return Packed(ids.astype(np.int64), boundaries.astype(np.int32), np.flatnonzero(predicts))


def replayed(rows: Sequence[SequenceRow], predicts: Array, shape: RoutedShape) -> tuple[Array, Array] | None:
    """Return the positions where recorded experts replace the router's, int64 [n], and the experts.

    The latter are [n, layers, experts per token] in the dtype of `shape`. None if no row has any.

    Args:
        rows: a micro-batch.
        predicts: the positions before trained tokens, see `Packed`.
        shape: shape of the rows' routed experts.

    """
    known = [bool(row.routed_experts) for row in rows]
    if not any(known):
        return None
    experts = shape.unpack(bytearray().join(row.routed_experts for row in rows))  # writable, as torch wants arrays
    return predicts[np.repeat(known, lengths(rows))], experts


def lengths(rows: Sequence[SequenceRow]) -> list[int]:
    """Return the number of trained tokens of each row."""
    return [row.n_loss_tokens for row in rows]


def sampled(rows: Sequence[TrainingRow]) -> Array:
    """Return the log-probability of each completion token when it was sampled, float32 [tokens]."""
    return np.concatenate([unpack(row.sampled, F32) for row in rows])


def proximal(rows: Sequence[TrainingRow]) -> Array | None:
    """Return the same under the weights at the start of the step, None unless all rows have it."""
    return _joined([row.proximal for row in rows])


def reference(rows: Sequence[TrainingRow]) -> Array | None:
    """Return the same under the reference model, None unless all rows have it."""
    return _joined([row.reference for row in rows])


def value_columns(rows: Sequence[TrainingRow]) -> tuple[Array, Array]:
    """Return the critic's value before each completion token, and its target, float32 [tokens] each."""
    before, returns = [row.values for row in rows], [row.returns for row in rows]
    return unpack(b"".join(before), F32), unpack(b"".join(returns), F32)


def advantages(rows: Sequence[TrainingRow]) -> Array:
    """Return each completion token's advantage, float32 [tokens]."""
    return np.concatenate([unpack(row.advantages, F32) for row in rows])


def token_batch(
    rows: Sequence[TrainingRow], logprobs: Tensor, reference_logprobs: Tensor | None, entropies: Tensor | None = None
) -> TokenBatch:
    """Return the argument of the loss, on the device of the log-probabilities.

    Args:
        rows: a micro-batch.
        logprobs: log-probabilities of all trained tokens, row by row, [tokens].
        reference_logprobs: the same under the reference model; None to take the rows' own, if they have them.
        entropies: of the distributions of these tokens, if the loss needs them, [tokens].

    """

    def column(values: Array | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(logprobs.device)

    sampled_logprobs, weights = column(sampled(rows)), column(advantages(rows))
    assert sampled_logprobs is not None
    assert weights is not None
    if reference_logprobs is None:
        reference_logprobs = column(reference(rows))
    n_tokens, old = tuple(lengths(rows)), column(proximal(rows))
    return TokenBatch(logprobs, sampled_logprobs, weights, n_tokens, old, reference_logprobs, entropies)


def _joined(columns: Sequence[bytes]) -> Array | None:
    return np.concatenate([unpack(column, F32) for column in columns]) if all(columns) else None


def model_inputs(packed: Packed, ids: Tensor, *, packs: bool, context: ContextGroup | None = None) -> dict[str, Any]:
    """Return the arguments of a transformers model that computes packed rows.

    Args:
        packed: the rows.
        ids: their token ids on the model's device.
        packs: whether the model's attention is `PACKED`; if False there must be one row.
        context: the group that divides the tokens, if any.

    """
    if not packs:
        assert len(packed.boundaries) == 2, "this model's rows cannot be packed"
        return {"input_ids": ids[None], "use_cache": False}
    lengths = np.diff(packed.boundaries)
    ends = torch.from_numpy(packed.boundaries).to(ids.device)
    shard = context.slice_of(len(ids)) if context is not None else slice(None)
    return {
        "input_ids": ids[None, shard],
        "position_ids": torch.from_numpy(packed.positions[shard]).to(ids.device)[None],
        "context": context,
        "cu_seq_lens_q": ends,
        "row_lengths": RowLengths(lengths.tolist()),
        "use_cache": False,
    }


# --- Log-probabilities of selected tokens and their gradient, without a second copy of the logits ---------------------
# With a large vocabulary the logits dominate an update's memory: 151,936 per token, against a hidden state of a few
# thousand numbers. Autograd would save three more such tensors in float32 for the division, the conversion and the
# log-softmax. So this module computes the gradient from the logits themselves, a few rows at a time.


def selected_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, chunk_logits: int = CHUNK_LOGITS, *, entropies: bool = False
) -> Tensor:
    """Return the log-probability of each row's token, float32 [rows]; with entropies [2, rows].

    Args:
        logits: [rows, vocabulary], of any float dtype, which is also their gradient's; sums are in float32.
        tokens: int64 [rows].
        temperature: divides the logits.
        chunk_logits: logits that are converted to float32 at a time; at least one row is.
        entropies: also return the entropy of each row's whole distribution, in nats.

    """
    result: Tensor = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's
        logits, tokens, temperature, chunk_logits, entropies
    )
    return result


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, chunk_logits: int, entropies: bool
    ) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        columns = []
        for rows, targets in _row_chunks(chunk_logits, logits, tokens):
            scaled = _scaled(rows, temperature)
            logprobs = -functional.cross_entropy(scaled, targets, reduction="none")
            of_rows = torch.special.entr(torch.softmax(scaled, -1)).sum(-1) if entropies else None
            columns.append(logprobs if of_rows is None else torch.stack([logprobs, of_rows]))
        return torch.cat(columns, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, tokens = ctx.saved_tensors
        result = torch.empty_like(logits)
        weights = torch.atleast_2d(gradients[0] / ctx.temperature)
        for rows, targets, out, weight, *of_entropy in _row_chunks(ctx.chunk_logits, logits, tokens, result, *weights):
            # d log p(token) / d logits = (1 at the token, else 0) - p; d H / d logits = -p (log p + H)
            p = torch.softmax(_scaled(rows, ctx.temperature), -1)
            if of_entropy:
                terms, (by,) = torch.special.entr(p), of_entropy
                p.mul_(-(weight + by * terms.sum(-1))[:, None]).add_(terms.mul_(by[:, None]))
            else:
                p.mul_(-weight[:, None])
            out.copy_(p.scatter_add_(1, targets[:, None], weight[:, None]))
        return result, None, None, None, None


def _row_chunks(chunk_logits: int, logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of all tensors, in chunks of at most `chunk_logits` logits."""
    n = max(1, chunk_logits // logits.shape[-1])
    return zip(*(torch.split(tensor, n) for tensor in (logits, *others)), strict=True)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature


# --- Forward pass of a language model ---------------------------------------------------------------------------------


def in_dtype(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return a context in which matrices are multiplied in `dtype`: float32 or bfloat16."""
    # Its cache would hold a rounded copy of every weight until the pass ends, and each copy is used once.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False)


class LogprobPass:
    """Forward passes of one model."""

    def __init__(
        self,
        model: Any,
        settings: PolicySettings,
        *,
        device: torch.device,
        context: ContextGroup | None = None,
        balances: bool = False,
    ) -> None:
        """Replace the model's `forward`, which FSDP2 surrounds with hooks, and register hooks on routers of experts.

        Args:
            model: a transformers model, in evaluation mode.
            settings: with entropies, only passes with gradients return them.
            device: the model's device.
            context: the ranks that divide the tokens of each micro-batch, if any.
            balances: whether `balance` gets gradients.

        Raises:
            ConfigError: experts are replayed or balanced, and the model has no known routers; or its output head is not
                a layer of its own.

        """
        if model.base_model is model:
            raise ConfigError(
                f"{type(model).__name__} has no body apart from its output head, and cannot be trained: use a model of "
                "another family"
            )
        self._model = model
        self._forward = model.forward
        self._packs = packs_rows(model)
        self._temperature = settings.temperature
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._device = device
        self._chunk = max(1, settings.max_logits // model.config.get_text_config().vocab_size)
        self._context = context
        self._balances = balances
        self._entropies = settings.entropies
        self._replayed = settings.replayed
        self._vision = vision_of(model.config.to_dict())
        self._images = Path(settings.images) if settings.images else None
        self._routers = Routers(model, required=balances or self._replayed is not None)
        self.balance: Balance | None = None
        """Balance of experts over this rank's tokens in the last pass; None if the model is dense, or gradients were
        disabled."""
        model.forward = self._model_forward

    def __call__(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return the log-probabilities of all trained tokens, row by row, [tokens]; with entropies [2, tokens]."""
        batch, context = packed(rows), self._context
        shard = slice(0, len(batch.ids))
        if context is not None:
            batch = batch.padded(context.size)
            shard = context.slice_of(len(batch.ids))
        ids, positions = (torch.from_numpy(array).to(self._device) for array in (batch.ids, batch.predicts))
        targets, inputs = ids[positions + 1], model_inputs(batch, ids, packs=self._packs, context=context)
        if self._images is not None or any(row.images for row in rows):
            inputs |= self._visual(rows, batch)
        n_real = min(shard.stop, sum(row.n_tokens for row in rows)) - shard.start
        self._routers.begin(n_real if torch.is_grad_enabled() else None, self._replay(rows, batch, shard))
        with in_dtype(self._dtype, self._device):
            if context is None:
                logprobs: Tensor = self._model(**inputs, positions=positions, targets=targets)
            else:
                own = context.positions(batch.predicts, len(ids))
                found = self._model(**inputs, positions=positions[own] - shard.start, targets=targets[own])
                logprobs = context.joined(found, own, len(positions))
        with torch.set_grad_enabled(self._balances and torch.is_grad_enabled()):
            self.balance = self._routers.end()
        return logprobs

    def _replay(self, rows: Sequence[SequenceRow], batch: Packed, shard: slice) -> Replay | None:
        """Return the recorded experts of this rank's slice of the tokens."""
        if self._replayed is None or (found := replayed(rows, batch.predicts, self._replayed)) is None:
            return None
        at, experts = found
        own = slice(*np.searchsorted(at, [shard.start, shard.stop]))
        positions, recorded = (torch.from_numpy(a).to(self._device) for a in (at[own] - shard.start, experts[own]))
        return Replay(positions, recorded.long())

    def _visual(self, rows: Sequence[SequenceRow], batch: Packed) -> dict[str, Any]:
        """Return what a pass over rows with images needs in place of their positions.

        An image is computed once. Without any, it is a black one of a token that is not shown: all ranks that share
        layers compute each in each pass, and each update of the tower counts, as checkpoints assume.
        """
        vision = self._vision
        assert vision is not None
        assert self._images is not None
        digests = list(dict.fromkeys(digest for row in rows for digest in row.images))
        pixels = [decode((self._images / digest).read_bytes(), vision) for digest in digests]
        found = [patches(one, vision) for one in pixels or [np.zeros((vision.factor, vision.factor, 3), np.uint8)]]
        grids = {digest: grid for digest, (_, grid) in zip(digests or [""], found, strict=True)}
        positions, is_visual = [], np.zeros(len(batch.ids), np.bool_)
        for row, first, end in zip(rows, batch.boundaries.tolist(), batch.boundaries[1:].tolist(), strict=False):
            after = first + (length(row.prompt, I32) if row.images else 0)
            prompt = rotary_positions(batch.ids[first:after], [grids[digest] for digest in row.images], vision)
            # A token of an image in a completion, or in a prompt without images, is one as any other.
            n_text = end - after
            positions += [prompt, prompt.max(initial=-1) + 1 + np.broadcast_to(np.arange(n_text), (3, n_text))]
            is_visual[first:after] = batch.ids[first:after] == vision.image_token_id
        return {
            "position_ids": torch.from_numpy(np.concatenate(positions, 1)).to(self._device)[:, None],
            "visual_pos_masks": torch.from_numpy(is_visual).to(self._device)[None],
            "pixels": torch.from_numpy(np.concatenate([values for values, _ in found])).to(self._device),
            "grids": torch.tensor([(1, *grid) for grid in grids.values()], device=self._device),
            "shown": [digests.index(digest) for row in rows for digest in row.images],
        }

    def _model_forward(self, *, positions: Tensor, targets: Tensor, **given: Any) -> Tensor:
        """Return the log-probabilities of `targets`, which the tokens at `positions` predict."""
        body = self._with_images if "pixels" in given else self._model.base_model
        hidden = select_rows(body(**given).last_hidden_state[0], positions)
        return in_chunks(self._of_hidden, hidden, targets, self._chunk)

    def _with_images(
        self,
        *,
        input_ids: Tensor,
        visual_pos_masks: Tensor,
        pixels: Tensor,
        grids: Tensor,
        shown: Sequence[int],
        **given: Any,
    ) -> Any:
        """Return the output of the model's body for rows with images; see `_visual`."""
        body = self._model.base_model
        images = body.get_image_features(pixels, grids, return_dict=True)
        seen, *deepstack = (
            # With none, of the first, so that the backward pass reaches the tower.
            torch.cat([of_images[n] for n in shown] or [of_images[0][:0]])
            for of_images in (images.pooler_output, *getattr(images, "deepstack_features", ()))
        )
        embeddings = body.get_input_embeddings()(input_ids)
        if deepstack:
            given |= {"visual_pos_masks": visual_pos_masks, "deepstack_visual_embeds": deepstack}
        return body.language_model(
            inputs_embeds=embeddings.masked_scatter(visual_pos_masks[..., None], seen.to(embeddings.dtype)), **given
        )

    def _of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities of targets from the last layer's outputs, [tokens]; with entropies [2, tokens].

        The model's own `forward` gets them from its body. So whatever a family does to its logits after the output head
        still happens.
        """
        with _returning(self._model.base_model, hidden[None]):
            logits: Tensor = self._forward(use_cache=False).logits[0]
        entropies = self._entropies and torch.is_grad_enabled()
        return selected_logprobs(logits, targets, self._temperature, entropies=entropies)


def in_chunks(of_hidden: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, targets: Tensor, n: int) -> Tensor:
    """Return `of_hidden(hidden, targets)`, [..., tokens], computed for at most `n` tokens at a time."""
    *earlier, last = zip(*(torch.split(part, n) for part in (hidden, targets)), strict=True)
    # The backward pass begins with the last chunk, so its logits may wait for it; those of others are recomputed.
    chunks = (checkpoint(of_hidden, *chunk, use_reentrant=False) for chunk in earlier)
    return torch.cat([*chunks, of_hidden(*last)], -1)


class _BodyOutput:
    """The output of a model's body with nothing but the last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


@contextmanager
def _returning(body: Any, hidden: Tensor) -> Iterator[None]:
    """Let a module return these hidden states, whatever its arguments."""
    body.forward = lambda *_, **__: _BodyOutput(hidden)
    try:
        yield
    finally:
        del body.forward


# --- The network of a critic: the body of a language model, and a head of one value per token -------------------------
# It is a network of its own, so that updates of the policy do not change the critic's features.


class ValueModel(torch.nn.Module):
    """A body of transformers with a linear head, whose zeros make every value 0. The head computes in float32."""

    def __init__(self, body: Any, name: str) -> None:
        """Take a body, which is in evaluation mode; `name` is the prefix of its parameters' names."""
        super().__init__()
        self.add_module(name, body)
        self._name = name
        self.head = torch.nn.Linear(int(body.config.get_text_config().hidden_size), 1)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()

    @property
    def base_model(self) -> Any:
        """The model of transformers."""
        return self.get_submodule(self._name)

    def forward(self, *, positions: Tensor, **given: Any) -> Tensor:
        """Return the values at positions of the tokens that `given` describes, [positions]."""
        hidden = select_rows(self.base_model(**given).last_hidden_state[0], positions)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.float())[:, 0]
        return values


class ValuePass:
    """Forward passes of a `ValueModel`."""

    balance = None
    """The load of a critic's experts is not balanced; see `LogprobPass.balance`."""

    def __init__(
        self, model: Any, *, dtype: torch.dtype, device: torch.device, context: ContextGroup | None = None
    ) -> None:
        """Use a model.

        Args:
            model: a `ValueModel`, or a reward model whose `forward` is that of `with_scores`.
            dtype: dtype of matrix multiplications.
            device: the model's device.
            context: the ranks that divide the tokens of each micro-batch, if any.

        """
        self._model = model
        self._packs = packs_rows(model.base_model)
        self._dtype = dtype
        self._device = device
        self._context = context

    def __call__(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return the values before all trained tokens, row by row, [tokens]."""
        batch, context = self._packed(rows), self._context
        if context is not None:
            batch = batch.padded(context.size)
        ids, positions = (torch.from_numpy(part).to(self._device) for part in (batch.ids, batch.predicts))
        inputs = model_inputs(batch, ids, packs=self._packs, context=context)
        with in_dtype(self._dtype, self._device):
            if context is None:
                values: Tensor = self._model(**inputs, positions=positions)
                return values
            own = context.positions(batch.predicts, len(ids))
            found = self._model(**inputs, positions=positions[own] - context.slice_of(len(ids)).start)
        return context.joined(found, own, len(positions))

    def _packed(self, rows: Sequence[SequenceRow]) -> Packed:
        return packed(rows)


class ScorePass(ValuePass):
    """Forward passes of a reward model: the score at the last token of each row, [rows]."""

    def _packed(self, rows: Sequence[SequenceRow]) -> Packed:
        found = packed(rows)
        return found._replace(predicts=found.boundaries[1:].astype(np.int64) - 1)


def with_scores(model: Any) -> None:
    """Replace the `forward` of a reward model, which FSDP2 surrounds with hooks, by one over packed rows.

    The head computes in float32.
    """

    def forward(*, positions: Tensor, **given: Any) -> Tensor:
        hidden = select_rows(model.base_model(**given).last_hidden_state[0], positions)
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = model.score(hidden.float())[:, 0]
        return scores

    model.forward = forward


def summed_value_loss(rows: Sequence[TrainingRow], values: Tensor, spec: CriticSpec) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of the losses of a micro-batch's values, and its metrics, for `add_sums`.

    The metrics are `value_loss` and `value_clipped`, the number of clipped tokens.

    Args:
        rows: with `values` and `returns`.
        values: the critic's, with a gradient, [tokens].
        spec: says by how much a value may change.

    """
    before, returns = (torch.tensor(column, device=values.device) for column in value_columns(rows))
    losses, clipped = value_loss(values, before, returns, None if spec.value_clip == "off" else spec.value_clip)
    total = losses.sum()
    return total, {"value_loss": total.item(), "value_clipped": float(clipped.sum())}
