"""Redis users of workers, in memory."""

from __future__ import annotations

from collections.abc import Collection


class FakeUsers:
    """`ports.WorkerUsers` of a Redis that may forget them."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}

    async def put(self, worker: str, secret_sha256: str) -> None:
        self.secrets[worker] = secret_sha256

    async def remove(self, workers: Collection[str]) -> None:
        for worker in workers:
            del self.secrets[worker]

    async def present(self) -> set[str]:
        return set(self.secrets)
