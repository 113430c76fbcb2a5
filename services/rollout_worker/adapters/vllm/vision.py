"""Prompts with images in vLLM, which gets their patches and the places of their tokens and prepares nothing itself.

`plugin` registers the classes of models in each of vLLM's processes. They are vLLM's, with a processor that only says
how many tokens an image has: the processors of vLLM need files that are not published with weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from rlboost.services.rollout_worker.adapters.vllm import plugin
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.shared.data.vision import VisionConfig, decode, image_spans, patches
from rlboost.shared.messages.requests import MAX_IMAGE_BYTES

if find_spec("torchvision") is None:
    plugin.replace_torchvision()

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

# --- Requests ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Image:
    digest: str
    patches: torch.Tensor
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """The images of a request."""

    images: Sequence[_Image]
    spans: Sequence[tuple[int, int]]
    """(first token, end) of each image in the prompt; further tokens of images, which the model wrote, show none."""

    def input(self, tokens: list[int], salt: str) -> MultiModalInput:
        """Return vLLM's input of these tokens.

        Args:
            tokens: those of the prompt, and more.
            salt: of the loaded weights; vLLM shares keys, values and the embeddings of images among equal ones.

        """
        return mm_input(
            tokens,
            _items(torch.cat([one.patches for one in self.images]), [one.grid for one in self.images]),
            {"image": [f"{salt} {one.digest}" for one in self.images]},
            {"image": [PlaceholderRange(offset=first, length=end - first) for first, end in self.spans]},
            cache_salt=salt,
        )


class Vision:
    """The images of one model's requests. Not thread-safe."""

    def __init__(self, config: VisionConfig) -> None:
        """Use a model with this configuration."""
        self._config = config
        self._images: WeakValueDictionary[str, _Image] = WeakValueDictionary()

    def prepare(self, request: Request, data: Sequence[bytes]) -> PreparedImages | str:
        """Return the images of a request, given their bytes; a text says why they are not those of its prompt."""
        try:
            return self._prepared(request, data)
        except ValueError as error:
            return f"its images are not those of its prompt: {error}"

    def _prepared(self, request: Request, data: Sequence[bytes]) -> PreparedImages:
        images = []
        for (digest, _), one in zip(request.sampling.images, data, strict=True):
            if (image := self._images.get(digest)) is None:
                values, grid = patches(decode(one, self._config), self._config)
                image = self._images[digest] = _Image(digest, torch.from_numpy(values), grid)
            images.append(image)
        spans = image_spans(np.array(request.prompt, np.int32), [one.grid for one in images], self._config)
        return PreparedImages(images, spans)


def _items(pixels: torch.Tensor, grids: Sequence[tuple[int, int]]) -> MultiModalKwargsItems:
    """Return the images of a prompt: patches, float32 [patches, numbers of a patch], and their rows and columns."""
    grid = torch.tensor([(1, *one) for one in grids])
    return MultiModalKwargsItems.from_hf_inputs(
        BatchFeature({"pixel_values": pixels, "image_grid_thw": grid}),
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )


# --- Models -----------------------------------------------------------------------------------------------------------


class _Info(BaseProcessingInfo):  # type: ignore[misc] # vLLM may not be installed
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        del mm_counts
        tower = self.get_hf_config().vision_config
        return {"image": min(seq_len, MAX_IMAGE_BYTES // 3 // (tower.patch_size * tower.spatial_merge_size) ** 2)}

    def get_data_parser(self) -> MultiModalDataParser:
        return MultiModalDataParser()

    def get_supported_mm_processor_kwargs(self) -> Mapping[str, Any]:
        return {}


class _Dummies(BaseDummyInputsBuilder[_Info]):  # type: ignore[misc] # as above
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        del mm_counts
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        del seq_len, mm_counts, mm_options
        return {}


class _Processor(BaseMultiModalProcessor[_Info]):  # type: ignore[misc] # as above
    requires_tokenizer = False

    def _get_mm_fields_config(self, *args: Any) -> Any:
        raise NotImplementedError("images come as patches")

    def _get_prompt_updates(self, *args: Any) -> Any:
        raise NotImplementedError("prompts have the tokens of their images")

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, cache: Any = None, scheduler_config: Any = None
    ) -> MultiModalInput:
        """Return the largest images, with which vLLM measures its memory."""
        del cache, scheduler_config
        config, n_images = self.info.get_hf_config(), mm_counts.get("image", 0)
        tower, max_len = config.vision_config, self.info.ctx.model_config.max_model_len
        n_tokens, merge = self.info.get_mm_max_tokens_per_item(max_len, mm_counts)["image"], tower.spatial_merge_size
        pixels = torch.zeros(n_images * n_tokens * merge**2, 3 * tower.temporal_patch_size * tower.patch_size**2)
        return mm_input(
            [config.image_token_id] * (n_images * n_tokens),
            _items(pixels, [(merge, merge * n_tokens)] * n_images),
            {"image": [f"largest {i}" for i in range(n_images)]},
            {"image": [PlaceholderRange(offset=i * n_tokens, length=n_tokens) for i in range(n_images)]},
        )


_registered = MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_Dummies)


@_registered
class RLBoostQwen25VL(Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc] # as above
    """vLLM's Qwen2.5-VL."""


@_registered
class RLBoostQwen3VL(Qwen3VLForConditionalGeneration):  # type: ignore[misc] # as above
    """vLLM's Qwen3-VL."""
