"""The weight store's REST API. The only module that imports its client, which takes long to import."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlboost.shared.errors import ConfigError, Fatal, StoreUnavailable

if TYPE_CHECKING:
    from rlboost.shared.weights.client import StoreClient
    from rlboost.shared.weights.rest_models import ModelInfo

_LIMIT_S = 5.0


async def list_models(url: str, token: str) -> tuple[ModelInfo, ...]:
    """Return every job's weight versions.

    Raises:
        StoreUnavailable: the weight store does not answer, or not as expected.

    """
    client_class = await asyncio.to_thread(_import_client)
    try:
        async with asyncio.timeout(_LIMIT_S), client_class(url, token) as client:
            return (await client.models()).models
    except (StoreUnavailable, ConfigError, Fatal, TimeoutError) as error:
        raise StoreUnavailable(str(error) or f"{url} does not answer") from error


def _import_client() -> type[StoreClient]:
    # Importing it at the top would make starting a manager, and a takeover by one, a seventh slower.
    from rlboost.shared.weights.client import StoreClient  # noqa: PLC0415 - see above

    return StoreClient
