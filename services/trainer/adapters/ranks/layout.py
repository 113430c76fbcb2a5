"""How a job's ranks split the work: tensor, pipeline, context, data and expert parallelism."""

from __future__ import annotations

from typing import NamedTuple

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import TrainerSpec


class Layout(NamedTuple):
    """The degrees of parallelism of one model."""

    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool
    distributed_optimizer: bool
    context: int = 1
    expert: int = 1
    """Neighboring copies (`Coordinates.copy`) that each hold a part of every layer's experts; divides `data`."""

    fsdp_size: int = 0
    """Neighboring ranks over which FSDP2 shards the model; 0: all, however many remain after machines were lost."""

    @classmethod
    def of(cls, spec: TrainerSpec) -> Layout:
        """Return the layout that a job file requests."""
        return cls(
            spec.tensor_parallel,
            spec.pipeline_parallel,
            spec.data_parallel,
            spec.sequence_parallel,
            spec.distributed_optimizer,
            spec.context_parallel,
            spec.expert_parallel,
            spec.fsdp_size,
        )

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def n_shards(self) -> int:
        """Number of ranks over which FSDP2 shards the model."""
        return self.fsdp_size or self.n_ranks


class Coordinates(NamedTuple):
    """One rank's coordinates in the layout."""

    tensor: int
    pipeline: int
    data: int
    context: int = 0

    @classmethod
    def of(cls, rank: int, layout: Layout) -> Coordinates:
        """Return the coordinates that megatron-core gives a rank: tensor varies fastest, then context."""
        outer, tensor = divmod(rank, layout.tensor)
        outer, context = divmod(outer, layout.context)
        pipeline, data = divmod(outer, layout.data)
        return cls(tensor, pipeline, data, context)

    def replica_index(self, layout: Layout) -> int:
        """Return the rank's index among the `data` x `context` ranks that hold the same part of the dense model."""
        return self.data * layout.context + self.context

    def expert_part(self, layout: Layout) -> int:
        """Return the index of the part of every layer's experts that the rank holds, of `layout.expert` parts."""
        return self.replica_index(layout) % layout.expert


def require_divisible_heads(n_heads: int, context: int) -> None:
    """Check that context parallelism can divide a model's attention.

    Raises:
        ConfigError: it cannot.

    """
    if n_heads % context:
        raise ConfigError(
            f"trainer.context_parallel is {context}, which does not divide the model's {n_heads} attention heads: "
            "change it"
        )
