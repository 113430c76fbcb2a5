"""Images as the model sees them: their bytes in the weight store, their patches, and the positions of their tokens.

The trainer decodes and resizes each image once, so that trainer and workers compute with the same bits. Its bytes are
its height and width, then its pixels, RGB; a prompt has one token id of `image_token_id` for each of its tokens.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlboost.shared.errors import ConfigError

Array = npt.NDArray[Any]


class Family(NamedTuple):
    """What differs between families of models that see images."""

    mean: tuple[float, float, float]
    """Of colors from 0 to 1."""
    std: tuple[float, float, float]
    renamed: tuple[tuple[str, str], ...] = ()
    """Regular expression -> replacement: tensors in files that are older than their names in transformers."""


FAMILIES = {
    "qwen2_5_vl": Family(
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
        ((r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model.")),
    ),
    "qwen3_vl": Family((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""`model_type` in `config.json` -> the family."""
TEXT = "text_config"
"""The key of `config.json` that describes the language model of one that has other parts, too."""
_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "embed_vision", "embed_audio")
)
"""Modules of towers for images and sound, as components of their tensors' names."""
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the chat templates of these families write in place of an image."""
PLACES = (
    "the prompt has {n_images} images and {n_places} places for images: give each image one place, and write no "
    "special token of images in a text"
)
_HEADER = struct.Struct("<II")


class ImageRef(NamedTuple):
    """An image in the weight store."""

    digest: str
    n_bytes: int


class VisionConfig(NamedTuple):
    """What `config.json` says of a model's images."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    """A token is the square of this many patches."""
    image_token_id: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """Return the side of a token in pixels, which divides those of an image."""
        return self.patch_size * self.merge_size

    def n_tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of tokens of an image of so many patches."""
        return grid[0] * grid[1] // self.merge_size**2


def vision_of(config: Mapping[str, Any]) -> VisionConfig | None:
    """Return what a `config.json` says of images; None if the model sees none, or is of another family.

    Raises:
        ConfigError: it does not say what models of its family need.

    """
    if (family := FAMILIES.get(config.get("model_type", ""))) is None:
        return None
    try:
        tower = config["vision_config"]
        sizes = tower["patch_size"], tower["temporal_patch_size"], tower["spatial_merge_size"]
        return VisionConfig(*sizes, config["image_token_id"], family.mean, family.std)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"config.json of {config['model_type']}: image_token_id, or patch_size, temporal_patch_size or "
            f"spatial_merge_size in vision_config, is missing ({error}): add it, as in the family's own file"
        ) from error


def has_towers(config: Mapping[str, Any]) -> bool:
    """Return True if `config.json` describes a language model with other parts, such as towers for images or sound."""
    return isinstance(config.get(TEXT), dict) or config.get("model_type") in FAMILIES  # whose older files have none


def is_in_tower(name: str) -> bool:
    """Return True if a tensor is part of a tower for images or sound, by its name in files or in the model."""
    return not _TOWERS.isdisjoint(name.split("."))


def tensor_name(name: str, model_type: str) -> str:
    """Return the name in transformers' model of a tensor of a file, which may have an older one."""
    for pattern, new in FAMILIES[model_type].renamed if model_type in FAMILIES else ():
        name = re.sub(pattern, new, name)
    return name


# --- The bytes of an image --------------------------------------------------------------------------------------------


def encode(pixels: Array) -> bytes:
    """Return the bytes of an image, uint8 [height, width, 3]."""
    return _HEADER.pack(*pixels.shape[:2]) + pixels.tobytes()


def decode(data: bytes, vision: VisionConfig) -> Array:
    """Return the pixels of an image, uint8 [height, width, 3].

    Raises:
        ValueError: the bytes are no image whose sides are whole tokens.

    """
    height, width = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (0, 0)
    if not height or not width or height % vision.factor or width % vision.factor:
        raise ValueError(f"an image of {height} x {width} pixels has no whole tokens of {vision.factor} pixels")
    return np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(height, width, 3)


def patches(pixels: Array, vision: VisionConfig) -> tuple[Array, tuple[int, int]]:
    """Return the input of the vision tower, float32 [patches, numbers of a patch], and the rows and columns of patches.

    Patches of a token are neighbors. Colors are scaled by the family's mean and deviation; the frames of a patch are
    the same image.
    """
    size, merge = vision.patch_size, vision.merge_size
    rows, columns = (side // size for side in pixels.shape[:2])
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)  # the operations of transformers, for the same bits
    mean, std = (np.array(one, np.float32) for one in (vision.mean, vision.std))
    scaled = (levels[pixels] - mean) / std
    split = scaled.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)  # ..., color, row, column
    frames = np.repeat(ordered[..., None, :, :], vision.temporal_patch_size, axis=-3)
    return frames.reshape(rows * columns, -1), (rows, columns)


# --- Prompts with images ----------------------------------------------------------------------------------------------


def expanded(ids: Sequence[int], grids: Sequence[tuple[int, int]], vision: VisionConfig) -> list[int]:
    """Return a prompt in which each image has as many tokens as the model sees, in place of one.

    Raises:
        ConfigError: there are not as many tokens of images as images.

    """
    if (n_marks := ids.count(vision.image_token_id)) != len(grids):
        raise ConfigError(PLACES.format(n_images=len(grids), n_places=n_marks))
    sizes = iter(vision.n_tokens(grid) for grid in grids)
    return [token for id_ in ids for token in [id_] * (next(sizes) if id_ == vision.image_token_id else 1)]


def image_spans(ids: Array, grids: Sequence[tuple[int, int]], vision: VisionConfig) -> list[tuple[int, int]]:
    """Return (first token, end) of each image in a prompt, int [tokens].

    Raises:
        ValueError: the images of the prompt have other numbers of tokens.

    """
    spans, at = [], np.flatnonzero(ids == vision.image_token_id)
    sizes = [vision.n_tokens(grid) for grid in grids]
    ends = np.cumsum([0, *sizes])
    if ends[-1] != len(at):
        raise ValueError(f"the prompt has {len(at)} tokens of images, and its images have {ends[-1]}")
    for first, end in pairwise(ends.tolist()):
        span = int(at[first]), int(at[end - 1]) + 1
        if span[1] - span[0] != end - first:
            raise ValueError(f"the tokens {span[0]} to {span[1]} of the prompt are not those of one image")
        spans.append(span)
    return spans


def rotary_positions(ids: Array, grids: Sequence[tuple[int, int]], vision: VisionConfig) -> Array:
    """Return the positions of a prompt's tokens in time, height and width, int64 [3, tokens].

    The tokens of an image have those of its rows and columns, from that of the text before; the text after it continues
    from the highest (arXiv 2409.12191, section 2.1). A completion continues with the last plus 1.

    Raises:
        ValueError: see `image_spans`.

    """
    positions = np.empty((3, len(ids)), np.int64)
    n_done = next_position = 0
    for (first, end), (rows, columns) in zip(image_spans(ids, grids, vision), grids, strict=True):
        positions[:, n_done:first] = np.arange(first - n_done) + next_position
        next_position += first - n_done
        height, width = rows // vision.merge_size, columns // vision.merge_size
        positions[0, first:end] = next_position
        positions[1, first:end] = next_position + np.repeat(np.arange(height), width)
        positions[2, first:end] = next_position + np.tile(np.arange(width), height)
        n_done, next_position = end, next_position + max(height, width)
    positions[:, n_done:] = np.arange(len(ids) - n_done) + next_position
    return positions
