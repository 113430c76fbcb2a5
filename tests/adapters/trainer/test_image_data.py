"""Rows with images: the tokens that a prompt gets, the files that are written, and what is refused, by name."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlboost.jobs.check import check_job
from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.ports.samples import Data
from rlboost.shared.data.vision import FAMILIES, MARK, vision_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.images import require_supported
from rlboost.shared.job.spec import parse
from rlboost.shared.messages.requests import MAX_IMAGE_BYTES
from rlboost.shared.weights.manifest import digest_of
from rlboost.shared.wire import ints
from tests.support import tiny_vision
from tests.support.model_folder import with_chat_template, write_model, write_tokenizer
from tests.support.tiny_vision import IMAGE, picture, png

pa = pytest.importorskip("pyarrow")
SHOWN = [2, 6, 3, IMAGE, IMAGE, IMAGE, IMAGE, 4, 8, 1, 2, 7]
"""A prompt with one picture of four tokens."""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(tmp_path: Path, family: str) -> Path:
    (tmp_path / "a.png").write_bytes(png(picture("red")))
    (tmp_path / "b.png").write_bytes(png(picture("blue", size=(24, 16))))
    return tiny_vision.write(tmp_path / "model", family=family)


def asks(*parts: object) -> list[dict[str, Any]]:
    content = [part if isinstance(part, dict) else {"type": "text", "text": f" {part} "} for part in parts]
    return [{"role": "user", "content": content}]


def job(folder: Path, *, kind: str = "rl", model: str = "model", **more: Any) -> dict[str, Any]:
    data = {"train": str(folder / "train.jsonl"), **more.pop("data", {})}
    reward = {"reward": {"function": "tests.support.reward_functions:lengths"}, "sampling": {"max_tokens": 4}}
    given = {"kind": kind, "model": str(folder / model), "data": data, "steps": 1, **more}
    return given | (reward if kind == "rl" else {})


def load(model: Path, *rows: object, folder: Path | None = None, **more: Any) -> Data:
    (model.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(parse(job(model.parent, model=model.name, **more)), model, image_folder=folder)


FORMS: dict[str, dict[str, Any]] = {
    "TRL: parts and a column of several": {"prompt": asks({"type": "image"}, "which"), "images": ["a.png"]},
    "TRL: text and a column of one": {"prompt": [{"role": "user", "content": " which "}], "image": "a.png"},
    "verl: a mark in the text": {"prompt": [{"role": "user", "content": "<image> which "}], "images": ["a.png"]},
    "Qwen: the image in its part": {"prompt": asks({"type": "image", "image": "a.png"}, "which")},
    "datasets: a mapping with a path": {"prompt": asks({"type": "image"}, "which"), "image": {"path": "a.png"}},
    "OpenAI: a data URL in its part": {
        "prompt": asks(
            {
                "type": "image_url",
                "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(picture("red"))).decode()},
            },
            "which",
        )
    },
    "JSON text of messages": {"prompt": json.dumps(asks({"type": "image"}, "which")), "images": ["a.png"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_row_of_each_form_shows_the_same_image(model: Path, form: str, tmp_path: Path) -> None:
    (prompt,) = load(model, FORMS[form], folder=tmp_path / "images").train
    assert ints(prompt.tokens) == SHOWN
    (ref,) = prompt.images
    data = (tmp_path / "images" / ref.digest).read_bytes()
    assert (digest_of(data), len(data)) == ref == (ref.digest, 8 + 3 * 16 * 16)
    column = "image" if "image" in FORMS[form] else "images"
    assert prompt.columns == {column: [ref.digest]}
    assert prompt.given == [{"role": "user", "content": f"{MARK} which "}]


def test_parquet_of_datasets_has_bytes(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": asks({"type": "image"}, "which"), "images": [{"bytes": png(picture("red")), "path": None}]}]
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data = load_data(parse(job(tmp_path, data={"train": str(tmp_path / "train.parquet")})), model)
    assert ints(data.train[0].tokens) == SHOWN


def test_dataset_with_images_opens_no_file_outside_of_its_folder(model: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    picture("red").save(tmp_path / "outside.png")
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    prompt = [{"role": "user", "content": "<image> which "}]

    def load_saved(image: dict[str, Any]) -> Data:
        saved = datasets.Dataset.from_dict({"prompt": [prompt], "images": [[image]]}, features=features)
        (tmp_path / "saved").mkdir(exist_ok=True)
        pytest.importorskip("pyarrow.parquet").write_table(saved.data.table, tmp_path / "saved" / "train.parquet")
        return load_data(parse(job(tmp_path, data={"train": str(tmp_path / "saved")})), model)

    assert ints(load_saved({"bytes": png(picture("red")), "path": "a.png"}).train[0].tokens) == SHOWN
    with pytest.raises(ConfigError, match="the folder of the data: put it there"):
        load_saved({"bytes": None, "path": str(tmp_path / "outside.png")})


ANSWER = [{"role": "assistant", "content": "red"}]
SFT: dict[str, dict[str, Any]] = {
    "a conversation and a column": {"messages": [*asks({"type": "image"}, "which"), *ANSWER], "images": ["a.png"]},
    "parts as tables have them": {
        "messages": [
            *asks({"index": 0, "text": None, "type": "image"}, {"index": None, "text": " which ", "type": "text"}),
            {"role": "assistant", "content": [{"index": None, "text": "red", "type": "text"}]},
        ],
        "images": [{"bytes": None, "path": "a.png"}],
    },
    "the image in its part": {"messages": [*asks({"type": "image", "image": "a.png"}, "which"), *ANSWER]},
    "a prompt and a completion": {"prompt": asks("which"), "completion": ANSWER, "image": "a.png"},
}


@pytest.mark.parametrize("form", SFT)
def test_row_for_fine_tuning_shows_its_image_before_the_answer(model: Path, form: str, tmp_path: Path) -> None:
    (example,) = load(model, SFT[form], folder=tmp_path / "images", kind="sft").train
    assert ints(example.tokens) == SHOWN
    assert ints(example.completion) == [11, 1], "the answer and its end"
    (ref,) = example.images
    assert (tmp_path / "images" / ref.digest).stat().st_size == 8 + 3 * 16 * 16
    assert example.columns == {"images": [ref.digest]}, "so that a resumed job finds other images"


def test_each_answer_of_a_conversation_follows_the_images_before_it(model: Path) -> None:
    first, later = asks({"type": "image"}, "which"), asks("and", {"type": "image"})
    row = {"messages": [*first, *ANSWER, *later, *ANSWER], "images": ["a.png", "b.png"]}
    both = load(model, row, kind="sft", data={"assistant_only_loss": True}).train
    assert [ints(one.tokens).count(IMAGE) for one in both] == [4, 4 + 6]
    assert both[0].images == both[1].images[:1]
    assert len(both[1].images) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [*asks("which"), {"role": "assistant", "content": "<image> red"}]}, "models write text only"),
        ({"messages": [*asks(f"which {MARK}", {"type": "image"}), *ANSWER]}, "has 1 images and 2 places for images"),
        ({"messages": [*asks({"type": "image"}, {"type": "image"}), *ANSWER]}, "has 1 images, and its messages show 2"),
        ({"prompt": "which", "completion": "red"}, "a prompt with images must be chat messages"),
    ],
)
def test_row_for_fine_tuning_is_refused_with_what_to_do(model: Path, row: dict[str, Any], reason: str) -> None:
    given = {**row, "images": ["a.png"]}
    with pytest.raises(ConfigError, match=rf"line 1: .*{reason}"):
        load(model, given, kind="sft")
    assert reason in "".join(problems(model, given, kind="sft"))


def test_images_are_shown_in_the_order_of_the_messages(model: Path) -> None:
    first, second = ({"type": "image"}, {"type": "image"})
    (prompt, other) = load(
        model,
        {"prompt": asks("which", first, "and", second), "images": ["a.png", "b.png"]},
        {"prompt": asks("which", first, "and", second), "images": ["b.png", "a.png"]},
    ).train
    assert ints(prompt.tokens) == [2, 6, 8, 3, *[IMAGE] * 4, 4, 10, 3, *[IMAGE] * 6, 4, 1, 2, 7]
    assert ints(other.tokens) == [2, 6, 8, 3, *[IMAGE] * 6, 4, 10, 3, *[IMAGE] * 4, 4, 1, 2, 7]
    assert prompt.images == other.images[::-1]


def test_marks_in_a_part_of_text_are_places_of_a_column(model: Path) -> None:
    part = {"type": "text", "text": "<image> and <image>"}
    (prompt, other) = load(
        model,
        {"prompt": [{"role": "user", "content": [part]}], "images": ["a.png", "b.png"]},
        {"prompt": [{"role": "user", "content": part["text"]}], "images": ["a.png", "b.png"]},
    ).train
    assert (prompt.tokens, prompt.images) == (other.tokens, other.images)
    assert len(prompt.images) == 2


def test_transparent_image_is_on_white(model: Path, tmp_path: Path) -> None:
    for name, image in (("clear", Image.new("RGBA", (16, 16))), ("white", Image.new("RGB", (16, 16), "white"))):
        image.save(model.parent / f"{name}.png")
    rows = [{"prompt": asks({"type": "image"}, "which"), "images": [f"{name}.png"]} for name in ("clear", "white")]
    clear, white = load(model, *rows, folder=tmp_path / "images").train
    assert clear.images == white.images


def test_large_image_is_made_smaller(model: Path) -> None:
    Image.new("L", (90, 60)).save(model.parent / "large.png")  # gray, as scans are
    row = {"prompt": asks({"type": "image"}, "which"), "images": ["large.png"]}
    limits = [None, {"max_image_pixels": 1024}]
    found = [load(model, row, data=limit or {}).train[0].tokens for limit in limits]
    assert [ints(tokens).count(IMAGE) for tokens in found] == [9 * 6, 4 * 3]
    assert load(model, row, {"prompt": asks("which")}, data={"max_prompt_tokens": 20}).n_too_long == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such file": ({"images": ["c.png"]}, "image 1: there is no file c.png"),
    "elsewhere": ({"images": ["../../etc/passwd"]}, "is not in"),
    "a URL": ({"images": ["https://example.com/a.png"]}, "nothing is downloaded"),
    "no base64": ({"images": ["data:image/png;base64,???"]}, "not base64"),
    "a broken file": ({"images": ["broken.png"]}, "cannot be read as an image"),
    "more than 8 bits": ({"images": ["deep.png"]}, "more than 8 bits"),
    "a format that programs decode": ({"images": ["drawn.eps"]}, "as an image, one of PNG, JPEG, WEBP"),
    "no image": ({"images": ["train.jsonl"]}, "as an image, one of PNG, JPEG, WEBP"),
    "a stretched image": ({"images": ["line.png"]}, "crop it"),
    "a number": ({"images": [7]}, "give a path"),
    "more images than places": ({"images": ["a.png", "b.png"]}, "the row has 2 images, and its messages show 1"),
    "fewer images than places": ({"prompt": asks({"type": "image"}, {"type": "image"})}, "1 images, and its messages"),
    "a place without an image": ({"images": []}, "the row has 0 images, and its messages show 1"),
    "both columns": ({"image": "a.png"}, "in one of them"),
    "messages and column": ({"prompt": asks({"type": "image", "image": "a.png"})}, "in one of the two"),
    "a text": ({"prompt": "which"}, "must be chat messages"),
    "a special token": ({"prompt": asks({"type": "image"}, "<|image_pad|>")}, "1 images and 2 places"),
    "another kind of part": ({"prompt": asks({"type": "image"}, {"type": "video"})}, "of type 'video'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_row_is_refused_with_what_to_do(model: Path, name: str) -> None:
    (model.parent / "broken.png").write_bytes(png(picture("red"))[:60])
    Image.new("RGB", (401, 2)).save(model.parent / "line.png")
    Image.new("I;16", (16, 16)).save(model.parent / "deep.png")
    Image.new("RGB", (16, 16)).save(model.parent / "drawn.eps")
    given, reason = REFUSED[name]
    row = {"prompt": asks({"type": "image"}, "which"), "images": ["a.png"], **given}
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 1: ") as refused:
        load(model, row)
    assert reason in str(refused.value)


def test_image_that_no_chunk_holds_is_refused(model: Path) -> None:
    file = model / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_pixels": 1 << 24}))
    side = int((MAX_IMAGE_BYTES / 3) ** 0.5) + 8
    Image.new("RGB", (side, side)).save(model.parent / "huge.png")
    with pytest.raises(ConfigError, match=r"set data\.max_image_pixels"):
        load(model, {"prompt": asks({"type": "image"}), "images": ["huge.png"]})


OTHER_PREPARATION: dict[str, object] = {
    "image_mean": [0.48, 0.46, 0.41],
    "do_resize": False,
    "resample": 2,
    "do_rescale": False,
    "rescale_factor": 1.0,
    "do_normalize": False,
}


def test_processor_that_prepares_images_otherwise_is_refused(model: Path) -> None:
    row = {"prompt": asks({"type": "image"}), "images": ["a.png"]}
    file = model / "preprocessor_config.json"
    own = json.loads(file.read_text())
    for name, value in OTHER_PREPARATION.items():
        file.write_text(json.dumps({**own, name: value}))
        with pytest.raises(ConfigError, match=rf"preprocessor_config\.json has {name} {re.escape(str(value))}"):
            load(model, row)
    for text in (None, "[1]", "{"):
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(ConfigError, match=r"which images need .*: copy the file of the model"):
            load(model, row)
    own.update(dict.fromkeys(["do_resize", "resample", "rescale_factor"]))  # as transformers' own when null
    file.write_text(json.dumps(own))
    assert len(load(model, row).train) == 1
    with pytest.raises(ConfigError, match=r"data\.max_image_pixels: the model's images have 256 pixels or more"):
        load(model, row, data={"max_image_pixels": 100})


def test_processor_of_transformers_5_is_read(model: Path) -> None:
    """It comes first where there are both files, as in transformers."""
    row = {"prompt": asks({"type": "image"}), "images": ["a.png"]}
    file, newer = model / "preprocessor_config.json", model / "processor_config.json"
    (of_older,) = load(model, row).train
    own = Qwen2VLImageProcessorPil.from_pretrained(model).to_dict()
    newer.write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert load(model, row).train[0].images == of_older.images
    larger = {**own, "size": {"shortest_edge": 1024, "longest_edge": 4096}}
    newer.write_text(json.dumps({"processor_class": "Qwen3VLProcessor", "image_processor": larger}))
    assert Qwen2VLImageProcessorPil.from_pretrained(model).size["shortest_edge"] == 1024
    (of_newer,) = load(model, row).train
    assert of_newer.images[0].n_bytes == 3 * 1024 + 8 > of_older.images[0].n_bytes
    file.unlink()
    assert load(model, row).train[0].images == of_newer.images
    newer.write_text(json.dumps({"image_processor": {**own, "resample": 2}}))
    with pytest.raises(ConfigError, match=r": processor_config\.json has resample 2, and images"):
        load(model, row)
    newer.write_text(json.dumps({"image_processor": "none"}))
    with pytest.raises(ConfigError, match=r": processor_config\.json cannot be read, which images need"):
        load(model, row)
    newer.write_text("{}")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read, which images need"):
        load(model, row)


def test_file_without_a_value_means_that_of_transformers(model: Path, family: str) -> None:
    """The colors of Qwen3-VL are not those that transformers takes then."""
    row = {"prompt": asks({"type": "image"}), "images": ["a.png"]}
    file = model / "preprocessor_config.json"
    own = json.loads(file.read_text())
    del own["image_mean"]
    file.write_text(json.dumps(own))
    expected = Qwen2VLImageProcessorPil.from_pretrained(model).image_mean
    if FAMILIES[family].mean == tuple(expected):
        assert len(load(model, row).train) == 1
    else:
        with pytest.raises(ConfigError, match=rf"has image_mean {re.escape(str([*expected]))}"):
            load(model, row)
    for size in ({"height": 16, "width": 16}, 224):
        for limit in ("min_pixels", "max_pixels"):
            own.pop(limit, None)
        file.write_text(json.dumps({**own, "image_mean": FAMILIES[family].mean, "size": size}))
        with pytest.raises(ConfigError, match="images need shortest_edge and longest_edge"):
            load(model, row)


@pytest.mark.parametrize(
    "wrong", [{}, {"vision_config": 1}, {"vision_config": {"patch_size": 14}, "image_token_id": 3}]
)
def test_incomplete_configuration_is_refused(family: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json of {family}: .* is missing .*: add it"):
        vision_of({"model_type": family, **wrong})


def test_limits_of_pixels_are_those_of_transformers(model: Path) -> None:
    row = {"prompt": asks({"type": "image"}), "images": ["a.png"]}
    file = model / "preprocessor_config.json"
    own = {name: value for name, value in json.loads(file.read_text()).items() if "pixels" not in name}
    given: dict[str, dict[str, Any]] = {
        "in older files": {"min_pixels": 1024, "max_pixels": 4096, "size": {"shortest_edge": 256, "longest_edge": 512}},
        "in none": {"size": None},
        "in newer ones": {"size": {"shortest_edge": 1024, "longest_edge": 4096}},
    }
    for what, size in given.items():
        file.write_text(json.dumps({**own, **size}))
        expected = Qwen2VLImageProcessorPil.from_pretrained(model)(images=[picture("red")], return_tensors="np")
        n_tokens = int(expected["image_grid_thw"].prod()) // 4
        assert ints(load(model, row).train[0].tokens).count(IMAGE) == n_tokens, what


def test_text_model_refuses_images(tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model = with_chat_template(write_tokenizer(write_model(tmp_path / "text")), turns)
    (tmp_path / "a.png").write_bytes(png(picture("red")))
    with pytest.raises(ConfigError, match="models of qwen2_5_vl, qwen3_vl see images"):
        load(model, {"prompt": [{"role": "user", "content": "t5"}], "image": "a.png"})
    with pytest.raises(ConfigError, match="of type 'image'"):
        load(model, {"prompt": asks({"type": "image", "image": "a.png"})})


def problems(model: Path, row: object, **more: Any) -> list[str]:
    (model.parent / "train.jsonl").write_text(json.dumps(row))
    return check_job(job(model.parent, **more)).problems


def test_config_check_reads_images_and_names_what_does_not_see_them(model: Path, family: str) -> None:
    row = {"prompt": asks({"type": "image"}, "which"), "images": ["a.png"]}
    assert problems(model, row) == []
    assert problems(model, row, trainer={"data_parallel": 2, "freeze_vision_tower": True}) == []
    adapter = {"elastic": {"weights": "lora"}, "lora": {"rank": 2}}
    assert problems(model, row, **adapter) == []
    assert "no layer 'qkv'" in "".join(problems(model, row, **{**adapter, "lora": {"targets": ["qkv"]}}))
    assert "there is no file c.png" in "".join(problems(model, {**row, "images": ["c.png"]}))
    refused: dict[str, dict[str, Any]] = {
        "trainer.context_parallel": {"trainer": {"context_parallel": 2}},
        "trainer.compile": {"trainer": {"compile": True}},
        "trainer.backend": {"trainer": {"backend": "megatron"}},
        "algorithm.critic": {"algorithm": {"name": "ppo"}},
    }
    for key, more in refused.items():
        found = "\n".join(problems(model, row, **more))
        assert key in found, found
        assert f"not supported with models that see images ({family})" in found


def test_only_models_that_see_images_have_a_tower_to_freeze(model: Path) -> None:
    spec = parse(job(model.parent, trainer={"freeze_vision_tower": True}))
    for family in ("qwen3", "qwen2_vl"):
        with pytest.raises(ConfigError, match=rf"trainer\.freeze_vision_tower: {family} is not a model whose images"):
            require_supported(spec, {"model_type": family})
