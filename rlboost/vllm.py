"""`rlboost` as a transport of vLLM's trainer side, for trainers that send weights by its engines.

    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=rank), client=HTTPVLLMWeightSyncClient("http://localhost:8000"), source=ModuleSource(model)
    )
    engine.send_weights()

The client is that of a gateway. Importing this module registers the transport. Written for vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo, VLLMWeightSyncClient

from rlboost.publishing import WeightFolder
from rlboost.shared.errors import ConfigError

NAME = "rlboost"


@dataclass
class TrainerInit(TrainerInitInfo):  # type: ignore[misc] # vLLM may not be installed
    """What a trainer's process tells the transport.

    Args:
        rank: of this process in the trainer, by keyword; that of rank 0 sends.
        folder: where weights are written, which the gateway reads; by default a temporary folder of this machine.

    """

    backend: ClassVar[str] = NAME
    folder: str = ""


class TrainerEngine(TrainerWeightTransferEngine[TrainerInit]):  # type: ignore[misc] # as above
    """Publishes whole weights through a gateway; each call is a version, unless the weights are those of the newest."""

    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> TrainerEngine:
        """Connect in each of the trainer's processes.

        Raises:
            ConfigError: there is no source, or one that holds a part of the model in each process.

        """
        if source is None:
            raise ConfigError(
                "source: the transport rlboost sends whole weights: give one, such as ModuleSource(model)"
            )
        if source.held_names() is not None:
            raise ConfigError(
                "source: held_names: rank 0 publishes the whole model: let the source gather it, as ModuleSource does"
            )
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._folder = WeightFolder(init_info.folder) if engine.is_sender else None
        if engine.is_sender:
            client.init_weight_transfer_engine({"backend": NAME})
        return engine

    _folder: WeightFolder | None = None

    def send_weights(self, weight_version: str | None = None) -> None:
        """Publish the source's weights, under the trainer's own name of the version; returns when a worker serves them.

        All processes call it, since reading a source may gather shards.
        """
        if self._folder is None:
            for _ in self.source:
                pass
            return
        path = self._folder.write(self.source)
        self.client.start_weight_update()
        self.client.update_weights({"path": str(path)})
        self.client.finish_weight_update(weight_version)

    def shutdown(self) -> None:
        """Remove a temporary folder."""
        if self._folder is not None:
            self._folder.close()


WeightTransferTrainerFactory.register_engine(NAME, TrainerEngine)
