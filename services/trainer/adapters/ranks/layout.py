"""How a job's ranks split the work: tensor, pipeline and data parallelism."""

from __future__ import annotations

from typing import NamedTuple

from rlboost.shared.job.training import TrainerSpec


class Layout(NamedTuple):
    """The degrees of parallelism of one model."""

    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool
    distributed_optimizer: bool

    @classmethod
    def of(cls, spec: TrainerSpec) -> Layout:
        """Return the layout that a job file requests."""
        return cls(
            spec.tensor_parallel,
            spec.pipeline_parallel,
            spec.data_parallel,
            spec.sequence_parallel,
            spec.distributed_optimizer,
        )

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline * self.data


class Coordinates(NamedTuple):
    """One rank's coordinates in the layout."""

    tensor: int
    pipeline: int
    data: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> Coordinates:
        """Return the coordinates that megatron-core gives a rank: tensor varies fastest, pipeline slowest."""
        outer, tensor = divmod(rank, layout.tensor)
        pipeline, data = divmod(outer, layout.data)
        return cls(tensor, pipeline, data)
