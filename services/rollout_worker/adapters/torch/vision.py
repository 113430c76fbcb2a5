"""Prompts with images in the torch engine: their tokens have ids, embeddings and positions of their own.

Each token of an image has a negative id that no other image has, so prompts share keys and values only where they show
the same images. An image's embeddings are computed alone, so that they do not depend on what else a pass computes: a
sample that resumes elsewhere is prefilled with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.shared.data.vision import decode, image_spans, patches, rotary_positions, vision_of

Ints = npt.NDArray[np.int64]

_FIRST_ID = -2
"""The highest id of a token of an image; -1 is `NO_TOKEN`."""
_MOST_IDS = 1 << 31


class Visual(NamedTuple):
    """The embeddings of a pass with tokens of images."""

    embeddings: torch.Tensor
    """[batch, tokens, hidden]."""
    is_visual: torch.Tensor
    """bool [batch, tokens]: the tokens of images."""
    deepstack: list[torch.Tensor]
    """What is added to these tokens after each of the first layers, [tokens of images, hidden] each; empty in families
    whose towers have none."""


class PassInputs(NamedTuple):
    """The arguments of a forward pass."""

    tokens: torch.Tensor
    """Token ids [batch, tokens]; meaningless for tokens of images."""
    positions: torch.Tensor
    """[batch, tokens], or [3, batch, tokens] if a prompt has images."""
    visual: Visual | None = None
    """None without tokens of images."""


@dataclass(eq=False)
class _Image:
    first: int
    """Token i has the id `_FIRST_ID - (first + i)`."""
    n_tokens: int
    pixels: npt.NDArray[np.uint8]
    features: list[torch.Tensor] | None = None
    """Embeddings, then what is added after each of the first layers, [tokens, hidden] each; dropped after a prefill."""


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """`PromptImages` of the torch engine."""

    ids: npt.NDArray[np.int32]
    rotary: Ints
    """[3, tokens of the prompt]."""
    images: Sequence[_Image]


class Vision:
    """The images of one model's requests. `prepare` is called under the engine's lock, the rest in its thread."""

    def __init__(self, model: Any) -> None:
        """Use a model whose weights may change; requests cannot have images if it sees none."""
        self._model = model
        self.config = vision_of(model.config.to_dict())
        self._images: WeakValueDictionary[str, _Image] = WeakValueDictionary()
        self._n_ids = 0

    def prepare(self, request: Request, data: Sequence[bytes]) -> PreparedImages:
        """Return the images of a request, given their bytes.

        Raises:
            ValueError: they are not those of its prompt.

        """
        vision = self.config
        assert vision is not None
        ids = np.array(request.prompt, np.int32)
        pixels = [decode(one, vision) for one in data]
        grids = [(one.shape[0] // vision.patch_size, one.shape[1] // vision.patch_size) for one in pixels]
        rotary = rotary_positions(ids, grids, vision)
        images = []
        for (first, end), (digest, _), one in zip(
            image_spans(ids, grids, vision), request.sampling.images, pixels, strict=True
        ):
            if (image := self._images.get(digest)) is None:
                if self._n_ids + end - first > _MOST_IDS + _FIRST_ID:
                    self._n_ids = 0  # after some two billion tokens of images
                image = self._images[digest] = _Image(self._n_ids, end - first, one)
                self._n_ids += end - first
            ids[first:end] = _FIRST_ID - image.first - np.arange(end - first)
            images.append(image)
        return PreparedImages(ids, rotary, images)

    def forget(self) -> None:
        """Drop all computed embeddings: their prefill has ended, or the weights are others."""
        for reference in self._images.valuerefs():  # a copy made in one step, as `prepare` may add some meanwhile
            if (image := reference()) is not None:
                image.features = None

    def inputs(self, requests: Sequence[Request], slots: Ints, tokens: Ints, positions: torch.Tensor) -> PassInputs:
        """Return the arguments of a forward pass.

        Args:
            requests: the request of each slot.
            slots: the slot of each token, [batch, tokens]; -1 for padding.
            tokens: [batch, tokens]; those of images have the ids of `PreparedImages`.
            positions: [batch, tokens].

        """
        device = positions.device
        if self.config is None:
            return PassInputs(torch.from_numpy(tokens).to(device), positions)
        ids = torch.from_numpy(np.maximum(tokens, 0)).to(device)
        shown = {
            slot: prepared for slot, one in enumerate(requests) if isinstance(prepared := one.images, PreparedImages)
        }
        if not shown:
            return PassInputs(ids, positions)
        at = positions.cpu().numpy()
        rotary = np.broadcast_to(at, (3, *at.shape)).copy()
        for slot, prepared in shown.items():
            of_slot = slots == slot
            rotary[:, of_slot] = _rotary(prepared, at[of_slot])
        turned = torch.from_numpy(rotary).to(device)
        is_visual = tokens <= _FIRST_ID
        if not is_visual.any():
            return PassInputs(ids, turned)
        images = {id(image): image for prepared in shown.values() for image in prepared.images}
        embeddings, *deepstack = self._gathered(_FIRST_ID - tokens[is_visual], [*images.values()])
        where = torch.from_numpy(is_visual).to(device)
        whole = self._model.get_input_embeddings()(ids)
        whole[where] = embeddings.to(whole.dtype)
        return PassInputs(ids, turned, Visual(whole, where, deepstack))

    def _gathered(self, numbers: Ints, images: Sequence[_Image]) -> list[torch.Tensor]:
        """Return the features of tokens of images [n], [n, hidden] each."""
        parts: list[torch.Tensor] = []
        for image in images:
            places = np.flatnonzero((numbers >= image.first) & (numbers < image.first + image.n_tokens))
            if not places.size:
                continue
            if image.features is None:
                image.features = self._features(image)
            parts = parts or [one.new_empty(len(numbers), one.shape[1]) for one in image.features]
            own = torch.from_numpy(numbers[places] - image.first).to(parts[0].device)
            for part, one in zip(parts, image.features, strict=True):
                part[torch.from_numpy(places).to(part.device)] = one[own]
        return parts

    def _features(self, image: _Image) -> list[torch.Tensor]:
        assert self.config is not None
        values, grid = patches(image.pixels, self.config)
        device = self._model.device
        found = self._model.base_model.get_image_features(
            torch.from_numpy(values).to(device), torch.tensor([[1, *grid]], device=device), return_dict=True
        )
        return [found.pooler_output[0], *(one[0] for one in getattr(found, "deepstack_features", ()))]


def _rotary(prepared: PreparedImages, at: Ints) -> Ints:
    """Return the positions [3, n] of tokens at places [n] of a prompt and its completion."""
    n_prompt = prepared.rotary.shape[1]
    after = prepared.rotary.max() + 1 - n_prompt
    inside = prepared.rotary[:, np.minimum(at, n_prompt - 1)]
    return np.where(at < n_prompt, inside, at + after)
