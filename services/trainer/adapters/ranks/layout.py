"""How many ranks train one model, and what each has of it."""

from __future__ import annotations

from typing import NamedTuple

from shared.training import TrainerSpec


class Layout(NamedTuple):
    """How many ranks train one model, and what each has of it."""

    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool
    distributed_optimizer: bool

    @classmethod
    def of(cls, spec: TrainerSpec) -> Layout:
        """Return the layout that a job asks for."""
        return cls(
            spec.tensor_parallel,
            spec.pipeline_parallel,
            spec.data_parallel,
            spec.sequence_parallel,
            spec.distributed_optimizer,
        )

    @property
    def n_ranks(self) -> int:
        """All ranks together."""
        return self.tensor * self.pipeline * self.data


class Place(NamedTuple):
    """One rank's coordinates."""

    tensor: int
    pipeline: int
    data: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> Place:
        """Return where megatron-core puts a rank: tensor changes fastest, pipeline slowest."""
        rest, tensor = divmod(rank, layout.tensor)
        pipeline, data = divmod(rest, layout.data)
        return cls(tensor, pipeline, data)
