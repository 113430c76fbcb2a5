"""Prompts with images in the torch engine and in training, against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from rlboost.services.rollout_worker.adapters.model_folder import ModelFolderSeeder  # noqa: E402
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402
from rlboost.services.rollout_worker.domain.speculation import Drafter  # noqa: E402
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder  # noqa: E402
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy  # noqa: E402
from rlboost.services.trainer.adapters.torch.ranks import Layout  # noqa: E402
from rlboost.services.trainer.domain.loss.function import sft_loss  # noqa: E402
from rlboost.services.trainer.domain.loss.policy import PolicyLoss  # noqa: E402
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow, constant  # noqa: E402
from rlboost.services.trainer.ports.engine import PolicySettings  # noqa: E402
from rlboost.shared.data.images import ImageReader  # noqa: E402
from rlboost.shared.data.vision import (  # noqa: E402
    FAMILIES,
    VisionConfig,
    decode,
    expanded,
    patches,
    rotary_positions,
    vision_of,
)
from rlboost.shared.errors import ConfigError  # noqa: E402
from rlboost.shared.job.training import LoraSpec, OptimizerSpec  # noqa: E402
from rlboost.shared.model.folder import read_config, read_tensor_shapes  # noqa: E402
from rlboost.shared.weights.cache import (  # noqa: E402
    AdaptedVersion,
    Cache,
    CachedVersion,
)
from rlboost.shared.weights.torch_tensors import named_shards  # noqa: E402
from rlboost.shared.wire import F32, I32, pack, unpack  # noqa: E402
from tests.support import tiny_models, tiny_vision  # noqa: E402
from tests.support.adapter_versions import pulled_base  # noqa: E402
from tests.support.engines import FreePasses, request  # noqa: E402
from tests.support.one_rank import trained_by  # noqa: E402
from tests.support.policy_comparison import assert_trained_equally, bits, values  # noqa: E402
from tests.support.recorded_run import KEY  # noqa: E402
from tests.support.staged_versions import pulled  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402
from tests.support.tiny_vision import (  # noqa: E402
    IMAGE,
    NO_IMAGE,
    SHORT,
    Shown,
    check_reasons_without_images,
    picture,
    png,
    run,
)

WIDE = (40, 24), (24, 64), (8, 48)
"""Sizes of images of more tokens than a window of the tower has."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return tiny_vision.write(tmp_path_factory.mktemp("vision") / "model", family=family)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return tiny_vision.make(family=family)


@pytest.fixture(scope="module")
def vision(folder: Path) -> VisionConfig:
    found = vision_of(read_config(folder))
    assert found is not None
    return found


@pytest.fixture
async def engine(folder: Path, model: Any) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(folder, slots=6, drafter=Drafter(64, FreePasses()))
    await engine.load_weights(0, Staged(tiny_models.weights(model)))
    yield engine
    await engine.close()


def test_patches_and_positions_are_those_of_transformers(folder: Path, vision: VisionConfig, model: Any) -> None:
    reader, processor = ImageReader.of(folder, vision), Qwen2VLImageProcessorPil.from_pretrained(folder)
    for size in ((16, 16), (40, 24), (33, 70), (100, 90), (7, 9)):
        image = picture("red", 1, size)
        expected = processor(images=[image], return_tensors="np")
        values, grid = patches(decode(reader.read({"bytes": png(image)}, None), vision), vision)
        assert [[1, *grid]] == expected["image_grid_thw"].tolist()
        assert np.array_equal(values, expected["pixel_values"])
    grids = [(4, 4), (6, 4)]
    ids = torch.tensor([expanded([*SHORT[:5], *SHORT], grids, vision)])
    expected, _ = model.model.get_rope_index(
        ids, (ids == IMAGE).int(), image_grid_thw=torch.tensor([(1, *grid) for grid in grids])
    )
    assert rotary_positions(ids[0].numpy(), grids, vision).tolist() == expected[:, 0].tolist()


async def test_samples_see_their_own_images(
    engine: TorchEngine, folder: Path, vision: VisionConfig, model: Any
) -> None:
    """Prompts with the same tokens and other images share no keys and values; those with the same images do."""
    shown = [
        Shown(folder, vision, SHORT, picture("red")),
        Shown(folder, vision, SHORT, picture("blue")),
        Shown(folder, vision, [*SHORT[:5], *SHORT], picture("green"), picture("white", size=(16, 24))),
    ]
    asked = [(shown[i % 3], shown[i % 3].request(i, max_tokens=24 + i, **NO_IMAGE)) for i in range(9)]
    plain = request(20, prompt=[2, 6, 8, 9, 1, 2, 7], max_tokens=20)
    engine.submit([plain])
    made = await run(engine, asked)
    for (prompt, _), one in zip(asked, made, strict=True):
        assert not one.error
        assert one.logprobs == pytest.approx(prompt.logprobs(model, one.tokens), abs=1e-4)
    assert shown[0].logprobs(model, made[0].tokens) != pytest.approx(shown[1].logprobs(model, made[0].tokens), abs=0.1)
    n_prompts = sum(len(one.ids) for one in shown)
    assert engine.prefilled_tokens_total < 3 * n_prompts, "samples of a prompt share its keys and values"


@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_resumed_sample_is_prefilled_with_its_images(
    engine: TorchEngine, folder: Path, vision: VisionConfig, batch_invariant: bool
) -> None:
    shown = Shown(folder, vision, SHORT, picture("green"))
    whole = shown.request(1, max_tokens=20, batch_invariant=batch_invariant)
    (first,) = await run(engine, [(shown, whole)])
    resumed = replace(whole, attempt=2, tokens=first.tokens[:7])
    other = Shown(folder, vision, SHORT, picture("white"))
    again, _ = await run(
        engine, [(shown, resumed), (other, other.request(2, max_tokens=20, batch_invariant=batch_invariant))]
    )
    assert again.tokens == first.tokens[7:]
    if batch_invariant:
        assert again.logprobs == first.logprobs[7:], "the same bits"


async def test_new_weights_see_images_anew(
    engine: TorchEngine, folder: Path, vision: VisionConfig, family: str
) -> None:
    shown, other = Shown(folder, vision, SHORT, picture("red")), tiny_vision.make(seed=3, family=family)
    await run(engine, [(shown, shown.request(1))])
    await engine.load_weights(1, Staged(tiny_models.weights(other)))
    (made,) = await run(engine, [(shown, shown.request(2, **NO_IMAGE))])
    assert made.logprobs == pytest.approx(shown.logprobs(other, made.tokens), abs=1e-4)


async def test_request_without_its_images_ends_with_the_reason(
    engine: TorchEngine, folder: Path, vision: VisionConfig
) -> None:
    await check_reasons_without_images(engine, folder, vision)


def policy_of(images: Path, n_ranks: int = 1, **settings: Any) -> TorchPolicy:
    layout = Layout(1, 1, n_ranks, sequence_parallel=False, distributed_optimizer=False)
    chosen = PolicySettings(optimizer=OptimizerSpec(lr=1e-2), images=str(images), **settings)
    return TorchPolicy(chosen, layout, device="cpu")


@pytest.fixture
def policy(folder: Path, tmp_path: Path) -> TorchPolicy:
    policy = policy_of(tmp_path)
    policy.load_hf(folder)
    return policy


def row_of(shown: Shown, tokens: Sequence[int], folder: Path) -> SequenceRow:
    for (digest, _), data in zip(shown.images, shown.data, strict=True):
        (folder / digest).write_bytes(data)
    return SequenceRow(pack(shown.ids, I32), pack(tokens, I32), images=[digest for digest, _ in shown.images])


def test_training_computes_the_log_probabilities_of_the_model(
    policy: TorchPolicy, folder: Path, vision: VisionConfig, tmp_path: Path, model: Any
) -> None:
    """Also where the model has written the token of an image, which shows none."""
    tokens = [11, IMAGE, 12, 1]
    shown = [
        Shown(folder, vision, SHORT, picture("red")),
        Shown(folder, vision, [*SHORT[:5], *SHORT], picture("green"), picture("white", size=(16, 24))),
    ]
    shown += [Shown(folder, vision, SHORT, picture("blue", 1, size)) for size in WIDE]
    rows = [row_of(one, tokens, tmp_path) for one in shown]
    rows.append(SequenceRow(pack([2, 6, 8], I32), pack([11, 1], I32)))
    found = [unpack(column, F32).tolist() for column in policy.logprobs([rows])]
    text = torch.log_softmax(model(input_ids=torch.tensor([[2, 6, 8, 11]])).logits[0, 2:], -1)
    for one, column in zip(shown, found, strict=False):
        assert column[:1] == pytest.approx(one.logprobs(model, tokens[:1]), abs=1e-5)
    assert found[-1] == pytest.approx([text[0, 11].item(), text[1, 1].item()], abs=1e-5)


async def test_engine_and_training_have_the_same_log_probabilities(
    policy: TorchPolicy, engine: TorchEngine, folder: Path, vision: VisionConfig, tmp_path: Path
) -> None:
    shown = [Shown(folder, vision, SHORT, picture("red", 1, size)) for size in ((16, 16), *WIDE)]
    # IMAGE is likely enough to be drawn by some of these.
    asked = [(shown[i % 4], shown[i % 4].request(i, max_tokens=20)) for i in range(12)]
    made = await run(engine, asked)
    assert any(IMAGE in one.tokens for one in made)
    rows = [row_of(one, result.tokens, tmp_path) for (one, _), result in zip(asked, made, strict=True)]
    for result, column in zip(made, policy.logprobs([rows]), strict=True):
        assert result.logprobs == pytest.approx(unpack(column, F32).tolist(), abs=1e-4)


def test_fine_tuning_has_the_loss_and_the_gradient_of_transformers(
    policy: TorchPolicy, folder: Path, vision: VisionConfig, tmp_path: Path, family: str
) -> None:
    """Of answers of different lengths, one of them to two images."""
    shown = [
        Shown(folder, vision, SHORT, picture("red")),
        Shown(folder, vision, [*SHORT[:5], *SHORT], picture("green"), picture("white", size=(16, 24))),
    ]
    answers = [[11, 1], [12, 7, 8, 1]]
    rows = [row_of(one, tokens, tmp_path) for one, tokens in zip(shown, answers, strict=True)]
    trained = [TrainingRow.of(replace(row, sampled=bytes(len(row.completion))), constant(1.0, row)) for row in rows]
    sums = policy.accumulate([trained], sft_loss)
    model = tiny_vision.make(family=family).requires_grad_()
    expected = sum(len(tokens) * one.loss(model, tokens) for one, tokens in zip(shown, answers, strict=True))
    assert isinstance(expected, torch.Tensor)
    expected.backward()
    assert sums["loss"] == pytest.approx(expected.item(), rel=1e-5)
    found = trained_by(policy).tensors
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_update_trains_the_tower(
    policy: TorchPolicy, folder: Path, vision: VisionConfig, tmp_path: Path, model: Any
) -> None:
    row = row_of(Shown(folder, vision, SHORT, picture("red")), [11, 1], tmp_path)
    before = {shard.name: bytes(shard.data) for shard in policy.export_shards()}
    (sampled,) = policy.logprobs([[row]])
    policy.accumulate([[TrainingRow.of(replace(row, sampled=sampled), constant(1.0, row))]], PolicyLoss())
    assert policy.step(1e-2) > 0
    after = {shard.name: bytes(shard.data) for shard in policy.export_shards()}
    assert before.keys() == {name for name, _ in tiny_models.weights(model)}
    assert all(after[name] != data for name, data in before.items() if "visual" in name and "norm" not in name)
    (later,) = policy.logprobs([[row]])
    assert unpack(later, F32).sum() > unpack(sampled, F32).sum()


def test_files_with_older_names_are_read_and_exported_ones_load_in_transformers(
    policy: TorchPolicy, folder: Path, tmp_path: Path, family: str
) -> None:
    in_files = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert ("visual.patch_embed.proj.weight" in in_files) == (family == "qwen2_5_vl")
    version = pulled(policy.export_shards("base"), tmp_path, 0)
    assert read_tensor_shapes(folder) == {shard.name: shard.global_shape for shard in policy.export_shards()}
    assert {shard.name: bytes(shard.data) for shard in named_shards(folder)} == dict(bits(policy))
    with closing(Cache(tmp_path / "cache")) as cache:
        assert ModelFolderSeeder(folder)(version.manifest, cache) == len([*version.manifest.chunks()])
    exported = LocalRunFolder(tmp_path / "run", folder, KEY).export(policy.export_shards())
    for model in (folder, exported):
        loaded, report = AutoModelForImageTextToText.from_pretrained(model, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        own = loaded.state_dict()
        assert {name: own[name].numpy().tobytes() for name, _ in bits(policy)} == dict(bits(policy))


def test_frozen_tower_stays_as_it_is(folder: Path, vision: VisionConfig, tmp_path: Path) -> None:
    policy = policy_of(tmp_path, freeze_vision_tower=True)
    policy.load_hf(folder)
    row = row_of(Shown(folder, vision, SHORT, picture("red")), [11, 1], tmp_path)
    (sampled,) = policy.logprobs([[row]])
    before = dict(bits(policy))
    policy.accumulate([[TrainingRow.of(replace(row, sampled=sampled), constant(1.0, row))]], PolicyLoss())
    assert policy.step(1e-2) > 0
    after = dict(bits(policy))
    assert {name for name, data in before.items() if after[name] == data} == {n for n in before if ".visual." in n}
    (checkpoint := tmp_path / "checkpoint").mkdir()
    policy.snapshot()(checkpoint)
    resumed = policy_of(tmp_path, freeze_vision_tower=True)
    resumed.load_hf(folder)
    resumed.load(checkpoint)
    assert dict(bits(resumed)) == after


def test_step_without_images_is_an_update_of_the_tower_that_a_checkpoint_restores(
    folder: Path, vision: VisionConfig, tmp_path: Path
) -> None:
    seeing = row_of(Shown(folder, vision, SHORT, picture("red")), [11, 1], tmp_path)
    reading = SequenceRow(pack([2, 6, 8, 9], I32), pack([11, 9, 1], I32))
    (checkpoint := tmp_path / "checkpoint").mkdir()
    policy, resumed = policy_of(tmp_path), policy_of(tmp_path)

    def train(one: TorchPolicy, row: SequenceRow) -> None:
        (sampled,) = one.logprobs([[row]])
        one.accumulate([[TrainingRow.of(replace(row, sampled=sampled), constant(1.0, row))]], PolicyLoss())
        one.step(1e-2)

    policy.load_hf(folder)
    for row in (seeing, reading):
        train(policy, row)
    policy.snapshot()(checkpoint)
    resumed.load_hf(folder)
    resumed.load(checkpoint)
    for one in (policy, resumed):
        train(one, seeing)
    assert dict(bits(resumed)) == dict(bits(policy))


async def test_adapter_has_the_same_log_probabilities_in_trainer_worker_and_peft(
    folder: Path, vision: VisionConfig, tmp_path: Path, model: Any, family: str
) -> None:
    """The worker has it apart from the weights, then merged into them."""
    policy = policy_of(tmp_path, lora=LoraSpec(rank=4))
    policy.load_hf(folder)
    shown = [Shown(folder, vision, SHORT, picture(color)) for color in ("red", "blue")]
    row = row_of(shown[0], [11, 1], tmp_path)
    for _ in range(3):
        (sampled,) = policy.logprobs([[row]])
        policy.accumulate([[TrainingRow.of(replace(row, sampled=sampled), constant(1.0, row))]], PolicyLoss())
        policy.step(3e-2)
    run_folder = LocalRunFolder(tmp_path / "run", folder, KEY)
    peft_folder = run_folder.export_adapter(policy.export_shards("adapter"), policy.adapter_json)
    adapted: Any = PeftModel.from_pretrained(tiny_vision.make(family=family), str(peft_folder)).eval()
    names = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert len(names) == 2 * 2 * 7, "all linear layers of the language model, and none of the tower"
    base = pulled_base(model, tmp_path)
    staged = AdaptedVersion(
        pulled(policy.export_shards("adapter"), tmp_path, 1, base=base, adapter_json=policy.adapter_json), base
    )
    engine = TorchEngine(folder, slots=6)
    await engine.load_weights(0, CachedVersion(base))
    assert engine.adapter_refusal(staged) == ""
    assert await engine.load_adapter("adapted", 1, staged) == []
    for merged in (False, True):
        if merged:
            await engine.load_weights(1, staged)
        asked = [
            (shown[i % 2], replace(shown[i % 2].request(10 * merged + i, max_tokens=9, **NO_IMAGE), job_id=job))
            for i, job in enumerate(["adapted", "adapted", *["" for _ in shown if not merged]])
        ]
        made = await run(engine, asked)
        rows = [row_of(one, result.tokens, tmp_path) for (one, _), result in zip(asked, made, strict=True)]
        trained = [unpack(column, F32).tolist() for column in policy.logprobs([rows])]
        for (prompt, request_), result, column in zip(asked, made, trained, strict=True):
            assert column == pytest.approx(prompt.logprobs(adapted, result.tokens), abs=1e-5)
            if request_.job_id:
                assert result.logprobs == pytest.approx(column, abs=1e-4)
            else:
                assert result.logprobs == pytest.approx(prompt.logprobs(model, result.tokens), abs=1e-4)
                assert result.logprobs != pytest.approx(column, abs=0.1)
    await engine.close()


def test_layers_of_the_tower_are_no_targets_of_an_adapter(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(tmp_path, lora=LoraSpec(targets=("qkv",)))
    with pytest.raises(ConfigError, match=r"lora\.targets: the model has no layer 'qkv', but .*q_proj"):
        policy.load_hf(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [{}, {"freeze_vision_tower": True, "activation_checkpointing": True}, {"lora": LoraSpec(rank=2)}],
    ids=["all", "frozen", "adapter"],
)
def test_ranks_train_as_one_process_whichever_of_them_see_images(
    folder: Path, vision: VisionConfig, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Of the micro-batches each rank sees images in one, a rank in another, no rank in a third; one has one row."""
    shown = [Shown(folder, vision, SHORT, picture(color)) for color in ("red", "blue")]
    shown.append(Shown(folder, vision, [*SHORT[:5], *SHORT], picture("green"), picture("white", size=(16, 24))))
    seeing = [row_of(one, [11, 12, 1], tmp_path) for one in shown]
    reading = [SequenceRow(pack([2, 6, 8, n], I32), pack([11, n, 1], I32)) for n in (9, IMAGE, 12)]
    batches = [[*seeing, reading[0]], [seeing[0], *reading], reading, seeing[2:]]
    one, many = (policy_of(tmp_path, ranks, reference=True, **settings) for ranks in (1, 2))
    found = []
    for policy in (one, many):
        policy.load_hf(folder)
        results = []
        for _ in range(2):
            columns = iter(policy.logprobs(batches))
            rows = [
                [TrainingRow.of(replace(row, sampled=next(columns)), constant(1.0 - n, row)) for row in batch]
                for n, batch in enumerate(batches)
            ]
            results += [policy.accumulate(rows, PolicyLoss(kl_coef=0.1))["loss"], policy.step(1e-3)]
            results += np.concatenate([unpack(column, F32) for column in policy.logprobs(batches)]).tolist()
        found.append((results, values(policy)))
        policy.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4, abs=1e-4)
    assert_trained_equally(found[1][1], found[0][1])
