"""Images in rows of data: where a prompt shows them, and their pixels as the model sees them."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlboost.shared.data.examples import MESSAGES, Example
from rlboost.shared.data.messages import parsed_messages
from rlboost.shared.data.rows import is_messages
from rlboost.shared.data.vision import FAMILIES, MARK, PLACES, VisionConfig, encode
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages.requests import MAX_IMAGE_BYTES
from rlboost.shared.process.modules import pip_install

COLUMNS = ("images", "image")
"""Columns of images, as in TRL and verl: a list, or one."""
_TEXT_MARK = "<image>"
"""The place of an image in the text of a message, as in verl."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What Pillow decodes itself: for others, such as EPS, it starts programs of the machine."""
_PROCESSOR = {
    "do_resize": True,
    "resample": 3,  # bicubic
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [*FAMILIES["qwen2_5_vl"].mean],
    "image_std": [*FAMILIES["qwen2_5_vl"].std],
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}
"""Key of the image processor -> what transformers takes without it; `size` is the least and most pixels."""
_SAME = ("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize")
"""Of these, those with one value in all families."""
_MOST_STRETCHED = 200
"""Ratio of an image's sides that the families allow."""


class RowImages(NamedTuple):
    """A row whose images are separate from its prompt."""

    values: dict[str, Any]
    """The row without its images; its messages have `MARK` in their place."""
    images: list[Any]
    """As given, in the order of the prompt."""
    column: str = ""
    """The column that they are in; empty if the messages have them."""


def split_images(values: Mapping[str, Any], prompt_key: str) -> RowImages:
    """Return a row's images, and the row without them.

    They are in the column `images` or `image`, or in the parts of messages. A message shows them where it has parts of
    type `image`, or `<image>` in its text; if no message does, before the text of the first message of the user.

    Raises:
        ConfigError: the prompt has other places than images, or is text.

    """
    columns = [name for name in COLUMNS if name != prompt_key and values.get(name) not in (None, [], "")]
    if len(columns) > 1:
        raise ConfigError("the row has the columns 'image' and 'images': give its images in one of them")
    of_column = [image for name in columns for image in _as_list(values[name])]
    prompt = parsed_messages(values.get(prompt_key))
    if not is_messages(prompt):
        if columns:
            raise ConfigError("a prompt with images must be chat messages, and it is text: give messages")
        return RowImages({**values}, [])
    messages, in_parts = _marked(prompt, has_column=bool(of_column))
    if not of_column and not in_parts:
        return RowImages({**values}, [])
    if of_column and not in_parts:
        first = next((one for one in messages if one["role"] == "user"), messages[0])
        text = {"type": "text", "text": MARK * len(of_column)}
        content = first.get("content") or ""
        first["content"] = [text, *(content if isinstance(content, list) else [{"type": "text", "text": content}])]
        in_parts = [None] * len(of_column)
    own = [image for image in in_parts if image is not None]
    if of_column and own:
        raise ConfigError("the row has images in its messages and in a column: give them in one of the two")
    if (n_marks := len(in_parts)) != (n_images := len(of_column or own)):
        raise ConfigError(f"the row has {n_images} images, and its messages show {n_marks}: give as many as they show")
    if (n_places := str(messages).count(MARK)) != n_images:  # in texts, too
        raise ConfigError(PLACES.format(n_images=n_images, n_places=n_places))
    rest = {name: value for name, value in values.items() if name not in COLUMNS or name == prompt_key}
    return RowImages({**rest, prompt_key: messages}, of_column or own, columns[0] if columns else "")


def conversation_key(values: Mapping[str, Any], prompt_key: str) -> str:
    """Return the column of the messages that show the images of a row for fine-tuning; see `examples_of`."""
    return prompt_key if prompt_key in values else MESSAGES


def n_before_answer(example: Example) -> int:
    """Return how many images of its row an example shows, which are all before its completion.

    Raises:
        ConfigError: its completion shows one.

    """
    if MARK in str(example.completion):
        raise ConfigError(
            "a message of the assistant that is trained shows an image, and models write text only: move the image to "
            "a message before it, or leave out the row"
        )
    return str(example.prompt).count(MARK)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _marked(messages: list[dict[str, Any]], *, has_column: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages with `MARK` in place of images, and these; None for one that is in a column."""
    found: list[Any] = []
    marked = []
    for given in messages:
        message, content = dict(given), given.get("content")
        if isinstance(content, list):
            message["content"] = [_marked_part(part, found, has_column=has_column) for part in content]
        elif isinstance(content, str) and has_column and _TEXT_MARK in content:
            found += [None] * content.count(_TEXT_MARK)
            message["content"] = content.replace(_TEXT_MARK, MARK)
        marked.append(message)
    return marked, found


def _marked_part(part: Any, found: list[Any], *, has_column: bool) -> Any:
    """Return a part, one of text in place of an image, which is added to those found."""
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if has_column and isinstance(text := given.get("text"), str) and _TEXT_MARK in text:
        found += [None] * text.count(_TEXT_MARK)
        return {**given, "text": text.replace(_TEXT_MARK, MARK)}
    if given.get("type") not in ("image", "image_url"):
        return part
    url = given.get("image_url")
    found.append(given.get("image", given.get("url", url.get("url") if isinstance(url, dict) else url)))
    return {"type": "text", "text": MARK}


# --- Pixels -----------------------------------------------------------------------------------------------------------


class ImageReader:
    """Decodes images as a model sees them."""

    def __init__(self, vision: VisionConfig, least: int, most: int) -> None:
        """Use a model's patches, and the least and the most pixels of an image; see `of`."""
        self.vision = vision
        self._least = least
        self._most = most

    @classmethod
    def of(cls, model: Path, vision: VisionConfig, max_pixels: int | None = None) -> ImageReader:
        """Return the reader of the model in a directory.

        Args:
            model: the directory.
            vision: what its `config.json` says.
            max_pixels: a lower limit than the model's.

        Raises:
            ConfigError: its images are prepared in another way than those of its family.

        """
        file, own = _processor_of(model)
        processor: dict[str, Any] = {**_PROCESSOR, **{name: one for name, one in own.items() if one is not None}}
        expected = {name: _PROCESSOR[name] for name in _SAME} | {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.merge_size,
            "image_mean": [*vision.mean],
            "image_std": [*vision.std],
        }
        for name, value in expected.items():
            if processor[name] != value:
                raise ConfigError(
                    f"model {model}: {file.name} has {name} {processor[name]}, and images are prepared with {value}, "
                    "as those of its family: use the family's own file"
                )
        size: Any = processor["size"]
        try:
            least = max(vision.factor**2, int(processor.get("min_pixels") or size["shortest_edge"]))
            most = int(processor.get("max_pixels") or size["longest_edge"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model {model}: {file.name} has size {size!r:.60}, and images need shortest_edge and longest_edge, in "
                "pixels: use the family's own file"
            ) from error
        if max_pixels is not None and max_pixels < least:
            raise ConfigError(f"data.max_image_pixels: the model's images have {least} pixels or more: raise it")
        return cls(vision, least, min(most, max_pixels or most))

    def read(self, given: Any, folder: Path | None) -> bytes:
        """Return an image's bytes as `shared.data.vision` describes them.

        Args:
            given: a path, a `data:` URL, or a mapping with `bytes` or `path`, as Hugging Face datasets have it.
            folder: where the paths of the row are; None: it has none.

        Raises:
            ConfigError: it cannot be read, or is too large.

        """
        try:
            from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 - only rows with images need it
        except ImportError as error:
            raise ConfigError(f"images need Pillow: {pip_install('trainer')}") from error
        try:
            whole = _in_rgb(ImageOps.exif_transpose(Image.open(_source(given, folder), formats=_FORMATS)))
        except ConfigError:
            raise
        except UnidentifiedImageError as error:
            raise ConfigError(
                f"it cannot be read as an image, one of {', '.join(_FORMATS)}: convert it, or leave out the row"
            ) from error
        except Exception as error:  # Pillow's decoders raise anything for damaged files
            raise ConfigError(f"it cannot be read as an image ({error}): correct it, or leave out the row") from error
        height, width = self._size(whole.height, whole.width)
        if 3 * height * width + 8 > MAX_IMAGE_BYTES:
            raise ConfigError(
                f"it has {width} x {height} pixels as the model sees it, more than the {MAX_IMAGE_BYTES // 3:,} "
                f"that can be sent to workers: set data.max_image_pixels, such as {1 << 20}"
            )
        if (width, height) != whole.size:
            whole = whole.resize((width, height), Image.Resampling.BICUBIC)
        return encode(np.asarray(whole, np.uint8))

    def grid(self, data: bytes) -> tuple[int, int]:
        """Return the rows and columns of patches of an image's bytes."""
        height, width = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4))
        return height // self.vision.patch_size, width // self.vision.patch_size

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image as the model sees it: whole tokens, within the limits of pixels."""
        if max(height, width) > _MOST_STRETCHED * min(height, width):
            raise ConfigError(
                f"it has {width} x {height} pixels, a longer side than {_MOST_STRETCHED} times the shorter one: crop it"
            )
        factor, rounded = (
            self.vision.factor,
            [self.vision.factor * round(n / self.vision.factor) for n in (height, width)],
        )
        if rounded[0] * rounded[1] > self._most:
            scale = math.sqrt(height * width / self._most)
            rounded = [max(factor, factor * math.floor(n / scale / factor)) for n in (height, width)]
        elif rounded[0] * rounded[1] < self._least:
            scale = math.sqrt(self._least / (height * width))
            rounded = [factor * math.ceil(n * scale / factor) for n in (height, width)]
        return max(factor, rounded[0]), max(factor, rounded[1])


def _processor_of(model: Path) -> tuple[Path, dict[str, Any]]:
    """Return what a directory says of the preparation of images, and the file: of several the one transformers takes.

    Transformers 5 writes it into `processor_config.json`, earlier releases wrote a file of its own.
    """
    file = model / "processor_config.json"
    try:
        whole = dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
        if "image_processor" in whole:
            return file, dict(whole["image_processor"])
        file = model / "preprocessor_config.json"
        return file, dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model {model}: {file.name} cannot be read, which images need ({error}): copy the file of the model "
            "that this one was trained from"
        ) from error


def _in_rgb(image: Any) -> Any:
    """Return an image of Pillow with three bytes a pixel, a transparent one on white."""
    from PIL import Image  # noqa: PLC0415 - only rows with images need it

    if image.mode.startswith(("I", "F")):
        raise ConfigError(f"its pixels have more than 8 bits (mode {image.mode}): scale them to 8")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _source(given: Any, folder: Path | None) -> io.BytesIO:
    """Return what Pillow opens."""
    if isinstance(given, dict):
        data = given.get("bytes")
        given = data if data is not None else given.get("path")
    if isinstance(given, bytes):
        return io.BytesIO(given)
    if not isinstance(given, str) or not given:
        raise ConfigError(f"it is {given!r:.60}: give a path, a data: URL, or a mapping with bytes or path")
    if given.startswith("data:"):
        try:
            return io.BytesIO(base64.b64decode(given.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise ConfigError(f"its data: URL is not base64 ({error}): correct it") from error
    if "://" in given:
        raise ConfigError(f"{given:.60} is a URL, and nothing is downloaded: save the image, and give its path")
    if folder is None:
        raise ConfigError(f"{given:.60} is a path, and the dataset is not a folder of the trainer: give bytes")
    path, root = (folder / given).resolve(), folder.resolve()
    if not path.is_relative_to(root):
        raise ConfigError(f"{given:.60} is not in {folder}, the folder of the data: put it there")
    if not path.is_file():
        raise ConfigError(f"there is no file {given:.60} in {folder}, the folder of the data: correct the path")
    return io.BytesIO(path.read_bytes())
