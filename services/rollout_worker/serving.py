"""A worker whose engine also serves a model to others: it adds the adapters of jobs, and keeps the model's own weights.

*Seats*. Consumes: the times to the first token of the requests that are served, every 50 ms. Produces: calls of
`Seated.use_seats`. Waits for: nothing; handing samples back waits for the command that is being executed. Ends when:
the worker stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from rlboost.services.rollout_worker.domain.borrowing import Seats
from rlboost.services.rollout_worker.domain.stop_strings import StopStrings
from rlboost.services.rollout_worker.generator import Generator, ReplacementTimes
from rlboost.services.rollout_worker.ports import Engine, StagedWeights
from rlboost.shared.errors import UnsuitableWeights
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.system import run_in_thread

log = structlog.get_logger(__name__)

_INTERVAL_S = 0.05


class ServingTimes(Protocol):
    """Times the requests that an engine serves."""

    def take_first_tokens_s(self) -> list[float]:
        """Return the times to the first token of the requests that had theirs since the last call."""

    def longest_wait_s(self) -> float:
        """Return how long a request has waited for its first token; 0 if none waits."""


class Seated(Protocol):
    """Holds as many samples as there are seats; the worker."""

    async def use_seats(self, seats: int) -> None:
        """Hand the samples above this number back; idempotent."""


class SeatsWatch:
    """Sets the seats of one worker by what the requests in its engine wait."""

    def __init__(self, times: ServingTimes, seats: Seats, worker: Seated) -> None:
        self._times = times
        self._seats = seats
        self._worker = worker

    async def run(self, stop: asyncio.Event) -> None:
        """Set the seats until the stop."""
        count = 0
        while True:
            times_s, wait_s = self._times.take_first_tokens_s(), self._times.longest_wait_s()
            seats = self._seats.observe(times_s, wait_s, time.monotonic())
            await self._worker.use_seats(seats)
            if seats < count:
                log.info("seats_reduced", seats=seats, before=count, calm_s=self._seats.calm_s)
            count = seats
            if await until_stop(stop, _INTERVAL_S):
                return


class ServingGenerator(Generator):
    """A `Generator` over an engine that exists, whose model's weights stay.

    Args:
        engine: has the weights that are served.
        differing: returns the names of the tensors of a version that are not those that are served; blocks.
        options: of the `Generator`.

    """

    def __init__(self, engine: Engine, differing: Callable[[StagedWeights], list[str]], **options: Any) -> None:
        super().__init__(**options)
        self._engine = self._served = engine
        self._differing = differing

    async def replace_weights(self, weights: StagedWeights, *args: Any, **options: Any) -> ReplacementTimes:
        """See `Generator`; refuses everything but an adapter of the model that is served."""
        await self._admit(weights, options.get("tokenizer_json", ""))
        return await super().replace_weights(weights, *args, **options | {"alongside": True, "keep_kv": False})

    async def _admit(self, weights: StagedWeights, tokenizer_json: str) -> None:
        model, adapter = weights.unmerged()
        if self._loaded is not None and self._loaded.contents == model.contents:
            return
        if wrong := await run_in_thread("model-compare", lambda: self._differing(model)):
            raise UnsuitableWeights(
                f"{len(wrong)} tensors, such as {wrong[0]}, are not those of the model that this worker serves to "
                "others (RLBOOST_WORKER_BASE_MODEL, in RLBOOST_WORKER_DTYPE), and it loads adapters only: "
                + (
                    "train an adapter of that model"
                    if adapter
                    else "train an adapter (lora, with elastic.weights: lora)"
                )
                + ", or add other workers"
            )
        if self._loaded is None:
            self._config_json, self._tokenizer_json = weights.config_json, tokenizer_json
            self._stops = StopStrings(self._decoder(tokenizer_json))
            self._building = asyncio.get_running_loop().create_future()
            self._building.set_result(self._served)
        self._loaded = model
