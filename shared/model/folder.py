"""Reads Hugging Face model directories without torch or transformers."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from rlboost.shared.data.vision import is_in_tower, tensor_name
from rlboost.shared.errors import ConfigError

# --- The tokens that end a completion of a model, from the files of its folder ----------------------------------------


def merge_eos_ids(*sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the stop token ids that any source names, ascending.

    Args:
        sources: the `eos_token_id` of the tokenizer, the model's config and its generation config: one id, several, or
            None.

    """
    found: set[int] = set()
    for ids in sources:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return tuple(sorted(found))


# --- Model directories ------------------------------------------------------------------------------------------------


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LONGEST_HEADER_BYTES = 100_000_000
"""The limit of the .safetensors format."""

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of weight files."""
_SHORT_FLOATS = ("f4", "f6_", "f8", "float4", "float8")
_UNQUANTIZED = (
    "use the model in bfloat16 or float32. vLLM workers quantize it as they load it with RLBOOST_WORKER_VLLM_ARGS, "
    'such as {"quantization": "fp8_per_channel"}'
)
_ADAPTER = "adapter_config.json"
_ABOUT_OLD_WEIGHTS = (_ADAPTER, "README.md", "trainer_state.json")
"""Files that are not true of the model once it is trained."""

Shape = tuple[int, ...]


def require_tokenizer(model: Path) -> None:
    """Check that the directory has a tokenizer.

    Raises:
        ConfigError: it has none.

    """
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model {model} has no tokenizer ({', '.join(TOKENIZER_FILES)}): put its files there")


def read_config(model: Path) -> dict[str, Any]:
    """Return `config.json`.

    Raises:
        ConfigError: the file is missing, or is not a JSON object.

    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model}: config.json cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {model}: config.json is not a JSON object")
    return config


def require_unquantized(config: Mapping[str, Any]) -> None:
    """Check that a model's files hold its weights in full, since training needs them.

    Args:
        config: the model's `config.json`.

    Raises:
        ConfigError: they are quantized.

    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if quantization := part.get("quantization_config") or part.get("compression_config"):
            method = quantization.get("quant_method", "of an unnamed method")
            raise ConfigError(f"config.json: the model's weights are quantized ({method}): {_UNQUANTIZED}")


def is_quantized(tensor: str, dtype: str) -> bool:
    """Return True if a tensor has weights in integers or in floats of 8 bits or less, which need scales.

    Args:
        tensor: its name.
        dtype: as safetensors or torch name it.

    """
    is_weight = "weight" in tensor.rpartition(".")[2] or tensor.endswith("_blocks")  # as gpt-oss is published
    return dtype.lower().startswith(_SHORT_FLOATS) or (is_weight and dtype.lower().startswith(("i", "u")))


def require_unquantized_tensor(tensor: str, dtype: str) -> None:
    """Check that a tensor to publish has no quantized weights; for the arguments see `is_quantized`.

    Raises:
        ConfigError: it has.

    """
    if is_quantized(tensor, dtype):
        raise ConfigError(f"{tensor} is quantized ({dtype}): load the model without quantization")


def require_teachable(student: Path, teacher: Path) -> None:
    """Check that a model can learn from the probabilities that another one gives to its tokens.

    Raises:
        ConfigError: a token of the student is another token of the teacher, or none.

    """
    own, others = _token_ids(student), _token_ids(teacher)
    if different := sorted((number, token) for token, number in own.items() if others.get(token) != number):
        number, token = different[0]
        has = f"is {others[token]} there" if token in others else "is none there"
        raise ConfigError(
            f"algorithm.teacher.model: {teacher} and {student} have different tokenizers: token {number}, {token!r}, "
            f"{has}: use a teacher of the same family"
        )
    sizes = [vocabulary_size(read_config(model)) for model in (student, teacher)]
    if sizes[0] > sizes[1]:
        raise ConfigError(
            f"algorithm.teacher.model: {teacher} has {sizes[1]} logits, fewer than the {sizes[0]} of {student}: use a "
            "teacher with a vocab_size that is not smaller"
        )


def vocabulary_size(config: Mapping[str, Any]) -> int:
    """Return how many token ids a model has, by its `config.json`; 0 if it does not say."""
    size: int = (config.get("text_config") or config).get("vocab_size") or 0
    return size


def _token_ids(model: Path) -> dict[str, int]:
    """Return the id of each token, also of added ones."""
    try:
        raw = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, list):  # of (token, score)
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{added["content"]: added["id"] for added in raw.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model {model}: tokenizer.json cannot be read ({error}), which a job with a teacher needs: save the "
            "tokenizer there with save_pretrained"
        ) from error


# --- Reward models ----------------------------------------------------------------------------------------------------


HEAD = "score.weight"
"""The head of a reward model, as transformers' classes of sequence classification have it: [1, hidden size]."""
_CLASSIFIER = "ForSequenceClassification"


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return True if `config.json` describes a model of sequence classification, such as a reward model."""
    return any(name.endswith(_CLASSIFIER) for name in config.get("architectures") or ())


def require_language_model(config: Mapping[str, Any]) -> None:
    """Check that `config.json` does not describe a reward model or one with an encoder, which continue no text.

    Raises:
        ConfigError: it does.

    """
    if is_classifier(config):
        raise ConfigError(
            f"config.json: the model is a reward model ({', '.join(config['architectures'])}), which generates no "
            "tokens: name a causal language model, or train it with kind: reward"
        )
    architectures = config.get("architectures") or []
    if config.get("is_encoder_decoder") or any(name.endswith("ForMaskedLM") for name in architectures):
        raise ConfigError(
            f"config.json: the model has an encoder ({', '.join(architectures) or config.get('model_type')}), and only "
            "decoders can be trained: name a causal language model, such as one of Qwen or Llama"
        )


def require_scores(model: Path) -> None:
    """Check that a directory has a reward model: one with a head of one score.

    Raises:
        ConfigError: it has another model, or its head is missing or has several numbers.

    """
    config = read_config(model)
    if not is_classifier(config):
        found = ", ".join(config.get("architectures") or ["no architecture"])
        raise ConfigError(
            f"model {model} is no reward model: config.json has {found}, not one that ends with {_CLASSIFIER}: train "
            "one with kind: reward"
        )
    shape = read_tensor_shapes(model).get(HEAD)
    if shape is None:
        raise ConfigError(f"model {model} has no tensor {HEAD}, the head of a reward model: copy the model again")
    if shape[0] != 1:
        raise ConfigError(f"model {model} has {shape[0]} labels ({HEAD} is {list(shape)}): a reward model has one")


REWARD_MODEL = "reward.model"
"""The key of a job file that names a reward model, for errors."""


def require_served_model(model: Path, field: str, *, scores: bool) -> None:
    """Check the files of another model of a job, which workers serve.

    Args:
        model: its directory.
        field: the key of the job file that names it.
        scores: whether it is a reward model. Others generate.

    Raises:
        ConfigError: names the key.

    """
    if scores:
        require_reward_model(model, field)
        return
    try:
        require_whole_weights(model)
        _require_generator(model)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def _require_generator(model: Path) -> None:
    config = read_config(model)
    if is_classifier(config):
        raise ConfigError(
            f"{model} is a reward model ({', '.join(config['architectures'])}), which generates no tokens: let "
            "reward.model have its name among models, or remove it"
        )
    require_language_model(config)


def require_reward_model(model: Path, field: str = REWARD_MODEL) -> None:
    """Check the files of a reward model that scores the completions of a job; `field` is the key that names it.

    Raises:
        ConfigError: names the key of the job file.

    """
    try:
        require_scores(model)
        require_whole_weights(model)
        require_tokenizer(model)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def digest_of_weights(model: Path) -> str:
    """Return a digest of a directory's weights, as hexadecimal digits, which changes with any of their bits.

    Raises:
        OSError: they cannot be read.

    """
    digest = blake2b(digest_size=16)
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(file_digest(file, blake2b).digest())
    return digest.hexdigest()


def declare_scores(folder: Path, architecture: str, pad_id: int | None) -> None:
    """Make `config.json` describe a reward model of one score, whose batches are padded with a token.

    Raises:
        OSError: it cannot be read or written.

    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # For a score, vLLM's pooling applies no activation to the output of a regression.
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    config.update(labels, architectures=[architecture], pad_token_id=pad_id)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# --- The tensors of a model's files -----------------------------------------------------------------------------------


def tensor_names(model: Path) -> Callable[[str], str]:
    """Return what gives a tensor of a directory's files its name in transformers' model; see `vision.tensor_name`.

    Raises:
        ConfigError: `config.json` cannot be read.

    """
    config = read_config(model) if (model / "config.json").is_file() else {}
    return partial(tensor_name, model_type=str(config.get("model_type")))


def read_tensor_shapes(model: Path) -> dict[str, Shape]:
    """Return the shape of every tensor in the directory's .safetensors files, by its name in transformers' model.

    Raises:
        ConfigError: one of the files is damaged.

    """
    name_of = tensor_names(model)
    return {
        name_of(name): shape
        for path in sorted(model.glob("*.safetensors"))
        for name, shape in _shapes_in(model, path).items()
    }


def require_model_files(model: Path) -> None:
    """Check that a directory has the files of one whole model.

    Raises:
        ConfigError: it has an adapter, which transformers would add to the model, weights of another format, or only
            checkpoints of another trainer.

    """
    if (model / _ADAPTER).is_file():
        raise ConfigError(
            f"{model} has a LoRA adapter ({_ADAPTER}): merge it into its model with PEFT (merge_and_unload, "
            "save_pretrained) and name that folder, or move the adapter's files away to train without it"
        )
    if not (model / "config.json").is_file():
        inner = sorted((one for one in model.glob("checkpoint-*/config.json")), key=lambda one: one.stat().st_mtime)
        hint = f", but {inner[-1].parent} may be one" if inner else ""
        raise ConfigError(f"{model} has no config.json: it is not a Hugging Face model directory{hint}")
    if not any(model.glob("*.safetensors")):
        others = sorted(file.name for file in model.glob("*") if file.name.endswith(_WEIGHTS))
        hint = f", not as {others[0]}: load it with transformers and call save_pretrained" if others else ""
        raise ConfigError(f"{model} has no *.safetensors file: save the model's weights there{hint}")


def require_whole_weights(model: Path) -> None:
    """Check that the weight files are whole, by their headers and sizes, that none is missing, and none quantized.

    Raises:
        ConfigError: names the file that is truncated, damaged, missing or quantized; see also `require_model_files`.

    """
    require_model_files(model)
    require_unquantized(read_config(model))
    files = sorted(model.glob("*.safetensors"))
    shapes = {path.name: _shapes_in(model, path) for path in files}
    for path in files:
        _require_valid(model, path)
    index = model / "model.safetensors.index.json"
    if "model.safetensors" in shapes:  # transformers ignores an index then
        return
    if not index.is_file():
        raise ConfigError(
            f"model {model} has neither model.safetensors nor {index.name}, only {', '.join(shapes)}: "
            "copy the model again"
        )
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model {model}: {index.name} has no readable weight_map ({error}): copy it again") from error
    for name, file in places.items():
        if file not in shapes:
            raise ConfigError(f"model {model}: {file} is missing, which {index.name} names: copy it again")
        if name not in shapes[file]:
            raise ConfigError(f"model {model}: {file} has no tensor {name}, unlike {index.name}: copy both again")


def _require_valid(model: Path, path: Path) -> None:
    """Check the rest of a file's header: types, shapes and places of tensors."""
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - a library of those who load models
    except ImportError:
        return
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model {model}: {path.name} is not a whole .safetensors file: {error}: copy it again"
        ) from error


def _shapes_in(model: Path, path: Path) -> dict[str, Shape]:
    """Return the shapes in a .safetensors file, whose size must be what its header says.

    Raises:
        ConfigError: it is damaged.

    """
    try:
        with path.open("rb") as file:
            n_file_bytes = os.fstat(file.fileno()).st_size
            n_bytes = int.from_bytes(file.read(8), "little")
            n_data_bytes = n_file_bytes - 8 - n_bytes
            if n_bytes > _LONGEST_HEADER_BYTES or n_data_bytes < 0:
                raise ValueError(f"its header has {n_bytes} bytes, the file {n_file_bytes}")  # noqa: TRY301 - one text
            header = json.loads(file.read(n_bytes))
        if not isinstance(header, dict):
            raise TypeError("its header is not a JSON object")  # noqa: TRY301 - as above
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != n_data_bytes:
            raise ValueError(f"its tensors have {end} bytes, the file {n_data_bytes} for them")  # noqa: TRY301 - as above
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        if wrong := [name for name, shape in shapes.items() if any(type(n) is not int or n < 0 for n in shape)]:
            raise ValueError(f"the shape of {wrong[0]} is {shapes[wrong[0]]!r}")  # noqa: TRY301 - as above
        dtypes = {name: str(entry.get("dtype")) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"model {model}: {path.name} is not a whole .safetensors file: {reason}: copy it again"
        ) from error
    # transformers would read such numbers as weights, and ignore their scales.
    if quantized := next((name for name, dtype in dtypes.items() if is_quantized(name, dtype)), ""):
        raise ConfigError(
            f"model {model}: {path.name} has quantized weights ({quantized} is {dtypes[quantized]}): {_UNQUANTIZED}"
        )
    return shapes


def count_parameters(model: Path) -> int:
    """Return the number of parameters.

    Raises:
        ConfigError: the weights cannot be read.

    """
    return sum(map(math.prod, read_tensor_shapes(model).values()))


def count_in_tower(model: Path) -> int:
    """Return how many of them are in towers for images or sound.

    Raises:
        ConfigError: the weights cannot be read.

    """
    return sum(math.prod(shape) for name, shape in read_tensor_shapes(model).items() if is_in_tower(name))


def non_weight_files(model: Path) -> list[Path]:
    """Return the directory's files without the weight files and what describes only these weights, such as a card.

    Raises:
        OSError: the directory cannot be read.

    """
    return [
        file
        for file in model.iterdir()
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in _ABOUT_OLD_WEIGHTS
    ]


def copy_without_weights(model: Path, to: Path) -> None:
    """Copy `non_weight_files` to another directory.

    Raises:
        OSError: one cannot be read or written.

    """
    for file in non_weight_files(model):
        shutil.copyfile(file, to / file.name)


def declare_dtype(folder: Path, dtype: str) -> None:
    """Set the dtype of the weights in `config.json`, so that `from_pretrained` loads them in it.

    The file then names no folder of the machine on which the model was made (`_name_or_path`).

    Raises:
        OSError: it cannot be read or written.

    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if Path(str(config.get("_name_or_path", ""))).is_absolute():
        del config["_name_or_path"]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
