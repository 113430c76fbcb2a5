"""A small random model that sees images, with its processor's files, and pictures of squares to name the color of."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.ports import Engine
from rlboost.shared.data.images import ImageReader
from rlboost.shared.data.vision import FAMILIES, VisionConfig, decode, expanded, patches
from rlboost.shared.weights.manifest import digest_of
from tests.support.engines import Collected, Collector, request

SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "white": (235, 235, 235)}
WORDS = (*SPECIAL, "user", "assistant", "which", "color", "and", *COLORS)
IMAGE = WORDS.index("<|image_pad|>")
SHORT = [2, 6, 3, IMAGE, 4, 8, 9, 1, 2, 7]
"""A prompt with one image."""
NO_IMAGE: dict[str, Any] = {"logit_bias": ((IMAGE, -1e4),)}
"""The completion has no `IMAGE`."""
SIDE = 16
"""Pixels of a picture, which has four tokens."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def config(family: str = "qwen3_vl", head_dim: int = 0) -> Any:
    """Return the configuration of a model whose tower adds features of two layers, or attends in windows.

    On a CPU vLLM needs a `head_dim` of 32.
    """
    older = family == "qwen2_5_vl"
    head_dim = head_dim or (8 if older else 16)
    hidden = 4 * head_dim if older else 32
    text: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    sections = [head_dim // 4, head_dim // 8, head_dim // 8]
    text["rope_parameters"] = {"rope_theta": 5e6, "rope_type": "default", "mrope_section": sections}
    if not older:
        text["rope_parameters"]["mrope_interleaved"] = True
        text["head_dim"] = head_dim
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
    }
    if older:
        tower |= {"window_size": 2 * 8, "fullatt_block_indexes": [1]}
    else:
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    ids = {"image_token_id": IMAGE, "video_token_id": 0, "vision_start_token_id": 3, "vision_end_token_id": 4}
    kind: Any = Qwen2_5_VLConfig if older else Qwen3VLConfig
    return kind(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


def make(seed: int = 0, steepness: float = 1.5, family: str = "qwen3_vl", head_dim: int = 0) -> Any:
    """Return a float32 model whose distributions are neither flat nor peaked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(
            config(family, head_dim), attn_implementation="sdpa"
        ).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=steepness * parameter[0].numel() ** -0.5)
    return model.requires_grad_(requires_grad=False)


def write(directory: Path, seed: int = 0, steepness: float = 1.5, family: str = "qwen3_vl", head_dim: int = 0) -> Path:
    """Write a model with its processor's files, as those of its family are published, and return the directory."""
    make(seed, steepness, family, head_dim).save_pretrained(directory)
    processor: dict[str, Any] = {**PROCESSOR, "image_mean": FAMILIES[family].mean, "image_std": FAMILIES[family].std}
    if family == "qwen2_5_vl":
        described = json.loads((directory / "config.json").read_text())
        flat = {name: value for name, value in described.pop("text_config").items() if name != "model_type"}
        rope = flat.pop("rope_parameters")
        flat |= {"rope_theta": rope["rope_theta"], "sliding_window": 32768, "max_window_layers": 2}
        flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        (directory / "config.json").write_text(json.dumps({**flat, **described}))
        size = processor.pop("size")
        processor |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[2:]),
    )
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def picture(color: str, seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Return a noisy picture of one color, (width, height)."""
    noise = np.random.default_rng(seed).integers(-15, 16, (size[1], size[0], 3))
    return Image.fromarray((np.array(COLORS[color]) + noise).clip(0, 255).astype(np.uint8))


def square(color: str, seed: int) -> Image.Image:
    """Return a picture of a square of one color, at any place before a gray background."""
    random = np.random.default_rng(seed)
    pixels = random.integers(90, 130, (24, 24, 3))
    row, column = random.integers(0, 12, 2)
    pixels[row : row + 12, column : column + 12] = np.array(COLORS[color]) + random.integers(-15, 16, (12, 12, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Shown:
    """A prompt with images, as a trainer requests it."""

    def __init__(self, folder: Path, vision: VisionConfig, ids: Sequence[int], *given: Any) -> None:
        reader = ImageReader.of(folder, vision)
        self.vision = vision
        self.data = [reader.read({"bytes": png(one)}, None) for one in given]
        self.images = tuple((digest_of(one), len(one)) for one in self.data)
        self.ids = expanded(ids, [reader.grid(one) for one in self.data], vision)

    def request(self, sample: int, **options: Any) -> Request:
        return request(sample, prompt=self.ids, images=self.images, **options)

    def batch(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the input of transformers' model for a completion, in which `IMAGE` is no image's."""
        pictures = [patches(decode(one, self.vision), self.vision) for one in self.data]
        ids = torch.tensor([[*self.ids, *tokens]])
        kinds = (ids == IMAGE).int()
        kinds[:, len(self.ids) :] = 0
        return {
            "input_ids": ids,
            "pixel_values": torch.from_numpy(np.concatenate([values for values, _ in pictures])),
            "image_grid_thw": torch.tensor([(1, *grid) for _, grid in pictures]),
            "mm_token_type_ids": kinds,
        }

    def loss(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        """Return transformers' own loss of a completion: the mean over its tokens."""
        given = self.batch(tokens)
        labels = given["input_ids"].clone()
        labels[:, : len(self.ids)] = -100
        found: torch.Tensor = model(**given, labels=labels, use_cache=False).loss
        return found

    def logprobs(self, model: Any, tokens: Sequence[int], *, among_others: bool = False) -> list[float]:
        """Return what transformers' own forward pass says of a completion, which it takes without `IMAGE` only.

        With `among_others` as if that could not be drawn.
        """
        logits = model(**self.batch(tokens), use_cache=False).logits[0, len(self.ids) - 1 : -1]
        if among_others:
            logits[:, IMAGE] = -torch.inf
        scores = torch.log_softmax(logits.float(), -1)
        found: list[float] = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return found


async def run(engine: Engine, asked: Sequence[tuple[Shown, Request]]) -> list[Collected]:
    """Return what an engine generates for requests, given their images."""
    collector = Collector(engine)
    engine.submit([one for _, one in asked])
    for shown, one in asked:
        engine.set_images(one.key, shown.data)
    return await collector.all_ended([one for _, one in asked])


async def check_reasons_without_images(engine: Engine, folder: Path, vision: VisionConfig) -> None:
    """Check that a request without the images of its prompt ends with the reason, and no other."""
    shown = Shown(folder, vision, SHORT, picture("red"))
    larger = Shown(folder, vision, SHORT, picture("red", size=(24, 24)))
    collector = Collector(engine)
    asked = [shown.request(i) for i in range(4)]
    engine.submit(asked)
    engine.set_images(asked[0].key, "no such chunk")
    engine.set_images(asked[1].key, larger.data)
    engine.set_images(asked[2].key, [b"x"])
    engine.set_images(asked[3].key, shown.data)
    made = await collector.all_ended(asked)
    assert [one.error.partition(":")[0] for one in made] == [
        "no such chunk",
        "its images are not those of its prompt",
        "its images are not those of its prompt",
        "",
    ]
