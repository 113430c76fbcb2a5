"""The images of a job's prompts: files of the trainer, copied to the weight store while samples with them are open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlboost.shared.data.images import ImageReader, split_images
from rlboost.shared.data.vision import ImageRef, expanded, vision_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.files import replace_file
from rlboost.shared.job.images import require_images
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.manifest import ChunkRef, digest_of


class ImageFolder:
    """Files of images, named by their digests."""

    def __init__(self, folder: Path | None) -> None:
        """Use a folder, which `add` creates; with None nothing is written."""
        self._folder = folder

    def add(self, data: bytes) -> ImageRef:
        """Add an image's bytes, unless they are there."""
        ref = ImageRef(digest_of(data), len(data))
        if self._folder is not None and not (file := self._folder / ref.digest).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, data)
        return ref

    def read(self, digest: str) -> bytes:
        """Return an image's bytes."""
        assert self._folder is not None
        return (self._folder / digest).read_bytes()


class TakenImages(NamedTuple):
    """A row and its images."""

    values: dict[str, Any]
    """The row, its messages with `vision.MARK` in place of images."""
    refs: tuple[ImageRef, ...] = ()
    grids: Sequence[tuple[int, int]] = ()
    """Rows and columns of patches of each image."""
    columns: dict[str, Any] = {}  # noqa: RUF012 - of a tuple, and never changed
    """The digests of the images, in the column that they were in."""


NO_IMAGES = TakenImages({})


class PromptImages:
    """Reads the images of rows."""

    def __init__(self, spec: JobSpec, model: Path, config: Mapping[str, Any], folder: Path | None) -> None:
        """Read for a job's model, into a folder of images if there is one."""
        self._spec = spec
        self._model = model
        self._vision = vision_of(config)
        self._reader: ImageReader | None = None
        self._folder = ImageFolder(folder)

    def take(self, values: dict[str, Any], key: str, source: str) -> TakenImages:
        """Read the images of a row.

        Args:
            values: the row.
            key: the column of its prompt.
            source: the file or dataset that it is from.

        Raises:
            ConfigError: an image cannot be read, or the job does not support images.

        """
        if self._vision is None or not (row := split_images(values, key)).images:
            return TakenImages(values)
        require_images(self._spec)
        if self._reader is None:
            self._reader = ImageReader.of(self._model, self._vision, self._spec.data.max_image_pixels)
        place = Path(source).expanduser()
        folder = place if place.is_dir() else place.parent if place.is_file() else None
        refs, grids = [], []
        for number, image in enumerate(row.images, 1):
            try:
                data = self._reader.read(image, folder)
            except ConfigError as error:
                raise ConfigError(f"image {number}: {error}") from error
            refs.append(self._folder.add(data))
            grids.append(self._reader.grid(data))
        return TakenImages(row.values, tuple(refs), grids, {row.column or "images": [ref.digest for ref in refs]})

    def expanded(self, ids: list[int], grids: Sequence[tuple[int, int]]) -> list[int]:
        """Return a prompt's tokens, those of its images included; see `vision.expanded`."""
        return ids if self._vision is None else expanded(ids, grids, self._vision)


class ImageUploads:
    """Copies images to the weight store, which keeps them for an hour after the last `renew`."""

    def __init__(self, client: StoreClient, folder: Path, waits: Waits, limit_s: float) -> None:
        """Copy from a folder, with an open client.

        Args:
            client: of the weight store.
            folder: that of `PromptImages`.
            waits: registry of waits.
            limit_s: how long the store may be unavailable.

        """
        self._client = client
        self._folder = ImageFolder(folder)
        self._waits = waits
        self._limit_s = limit_s
        self._open: dict[int, set[ChunkRef]] = {}
        """Step -> images of its prompts."""

    async def upload(self, step: int, images: Iterable[tuple[str, int]]) -> None:
        """Upload the images of prompts of a step that the store lacks."""
        if chunks := {ChunkRef(*image) for image in images}:
            self._open.setdefault(step, set()).update(chunks)
            await self._upload(chunks)

    async def renew(self, step: int) -> None:
        """Keep the images of a step and of later ones in the store; it may remove others."""
        self._open = {number: chunks for number, chunks in self._open.items() if number >= step}
        if chunks := {chunk for of_step in self._open.values() for chunk in of_step}:
            await self._upload(chunks)

    async def _upload(self, chunks: set[ChunkRef]) -> None:
        because = f"{len(chunks)} images of prompts"
        async with self._waits.on("the weight store", because=because, limit_s=self._limit_s):
            missing = await retry_unavailable(lambda: self._client.missing(chunks))
            for chunk in chunks:
                if chunk.digest in missing:
                    data = memoryview(self._folder.read(chunk.digest))
                    await retry_unavailable(lambda: self._client.put_chunk(chunk, data))  # noqa: B023 - awaited
