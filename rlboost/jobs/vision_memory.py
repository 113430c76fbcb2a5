"""The sizes of a vision tower from its configuration, and what it saves for a backward pass. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlboost.shared.data.vision import vision_of


@dataclass(frozen=True)
class TowerSize:
    """The dimensions that determine the number of weights and of activations."""

    layers: int
    hidden: int
    mlp: int
    gated: bool
    """True if the MLP is gated and norms are RMSNorm, as in Qwen2.5-VL."""
    patch: int
    """Numbers of a patch."""
    patches_per_token: int
    out: int
    """The language model's hidden size."""
    mergers: int = 1
    """Modules that make tokens of patches."""
    positions: int = 0
    """Learned positions."""

    @property
    def layer(self) -> int:
        """Return the parameters of a layer."""
        return self.hidden * (4 * self.hidden + (3 if self.gated else 2) * self.mlp)

    @property
    def root(self) -> int:
        """Return the parameters outside of layers."""
        merged = self.patches_per_token * self.hidden
        return (self.patch + self.positions) * self.hidden + self.mergers * merged * (merged + self.out)

    @property
    def total(self) -> int:
        """Return all parameters, without biases and norms."""
        return self.layers * self.layer + self.root

    def layer_bytes(self, *, half: bool) -> int:
        """Return what a layer saves of each patch; `half`: with matrices in bfloat16."""
        if self.gated:
            return 32 * self.hidden + 8 * self.mlp if half else 52 * self.hidden + 16 * self.mlp
        return (1 if half else 2) * (22 * self.hidden + 4 * self.mlp)

    def saved_bytes(self, *, half: bool, checkpointed: bool, frozen: bool) -> int:
        """Return what the tower saves of each patch: with `frozen` weights only the inputs of checkpointed layers."""
        element = 2 if half else 4
        saved = self.layers * (element * self.hidden if checkpointed else 0 if frozen else self.layer_bytes(half=half))
        if frozen:
            return saved
        merger = (12 if half else 20) if self.gated else (7 if half else 14)
        return saved + element * self.patch + self.mergers * merger * self.hidden


def tower_of(config: Mapping[str, Any]) -> TowerSize | None:
    """Return the sizes that a `config.json` describes, None if the model sees no images.

    Raises:
        ConfigError: a key that images need is missing; see `vision_of`.
        KeyError: another key is missing.

    """
    if (vision := vision_of(config)) is None:
        return None
    tower, is_older = config["vision_config"], config["model_type"] == "qwen2_5_vl"
    return TowerSize(
        layers=tower["depth"],
        hidden=tower["hidden_size"],
        mlp=tower["intermediate_size"],
        gated=is_older,
        patch=3 * vision.temporal_patch_size * vision.patch_size**2,
        patches_per_token=vision.merge_size**2,
        out=tower["out_hidden_size"],
        mergers=1 if is_older else 1 + len(tower["deepstack_visual_indexes"]),
        positions=0 if is_older else tower["num_position_embeddings"],
    )
