"""Maps a PEFT LoRA adapter to the model tensors that it changes, by its configuration, names and shapes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlboost.shared.errors import ConfigError

Shape = tuple[int, ...]

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


class Factors(NamedTuple):
    """Names of the two adapter tensors for one model tensor: A [rank, in] and B [out, rank]."""

    a: str
    b: str


def factors_of(name: str) -> Factors:
    """Return the names of the two tensors that change the model tensor `name`."""
    module = _PREFIX + name.removesuffix(".weight")
    return Factors(module + _A, module + _B)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: the tensor W [out, in] becomes W + scaling * B @ A (LoRA, arXiv 2106.09685, section 4.1)."""

    scaling: float
    factors: dict[str, Factors]
    """Name of W -> names of A and B."""
    rank: int


class _Config(BaseModel):
    """The fields of `adapter_config.json` that matter. Only plain LoRA on linear layers is accepted."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    bias: Literal["none"] = "none"
    lora_bias: Literal[False] = False
    use_dora: Literal[False] = False
    use_rslora: Literal[False] = False
    fan_in_fan_out: Literal[False] = False
    modules_to_save: None = None
    layer_replication: None = None
    rank_pattern: dict[str, int] = Field({}, max_length=0)
    alpha_pattern: dict[str, float] = Field({}, max_length=0)


def adapter_of(config_json: str, tensors: Mapping[str, Shape], model: Mapping[str, Shape]) -> Adapter:
    """Return the adapter's scaling and the tensors that it changes.

    Args:
        config_json: PEFT's `adapter_config.json`.
        tensors: shapes of the adapter's tensors.
        model: shapes of the model's tensors.

    Raises:
        ConfigError: it is not a plain LoRA adapter, or not one for this model.

    """
    try:
        config = _Config.model_validate_json(config_json)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the adapter cannot be merged: adapter_config.json: {place}: {first['msg']}") from error
    factors = {}
    for name in sorted({_target_of(name) for name in tensors}):
        pair = factors_of(name)
        shape = model.get(name, ())
        if (
            len(shape) != 2
            or tensors.get(pair.a) != (config.r, shape[1])
            or tensors.get(pair.b) != (shape[0], config.r)
        ):
            raise ConfigError(
                f"the adapter does not belong to this model: {pair.a} {tensors.get(pair.a)} and {pair.b} "
                f"{tensors.get(pair.b)} of rank {config.r} do not fit {name} {shape}"
            )
        factors[name] = pair
    return Adapter(config.lora_alpha / config.r, factors, config.r)


class WrappedNames(NamedTuple):
    """The tensors of a model that PEFT has wrapped."""

    model: dict[str, str]
    """Name in the wrapped model -> in the model's checkpoint."""
    adapter: dict[str, str]
    """Name in the wrapped model -> in the adapter's file."""


def wrapped_names(names: Iterable[str], adapter: str) -> WrappedNames:
    """Divide the names of a wrapped model's tensors into the model's own and those of one adapter."""
    found = WrappedNames({}, {})
    for name in names:
        if ".lora_" not in name:
            found.model[name] = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        elif adapter in name.split("."):
            found.adapter[name] = name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
    return found


def config_json_of(config: Any) -> str:
    """Return the `adapter_config.json` of PEFT's configuration, with sets sorted so that the text is reproducible."""
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return json.dumps({**fields, "inference_mode": True}, sort_keys=True)


def _target_of(name: str) -> str:
    for ending in (_A, _B):
        if name.startswith(_PREFIX) and name.endswith(ending):
            return name.removeprefix(_PREFIX).removesuffix(ending) + ".weight"
    raise ConfigError(f"the adapter cannot be merged: {name!r} is not a LoRA tensor of a linear layer")
