"""An object store; the only module that imports `obstore`.

Writes of objects are atomic. A conditional write succeeds only if the object has not changed since it was read; S3,
Google Cloud Storage and Azure support it, and the weight store's lease checks that the server does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from rlboost.shared.errors import ConfigError, Fatal, Fenced, NotFound, Retryable, StoreUnavailable

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore

_CLIENT = {"allow_http": True, "connect_timeout": timedelta(seconds=3), "timeout": timedelta(seconds=20)}
"""Plain HTTP is used only for endpoints that are configured with it."""
_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
"""Enough for a server that throttles. Callers learn within seconds that a server is unavailable, and wait."""
_PERMISSIONS = "check that its credentials may read, write, list and delete there"
# The library has no error types for the next two.
_METADATA = ("/latest/api/token", "/latest/meta-data/", "/computeMetadata/", "/metadata/identity/")
"""Paths of a machine's metadata service, which is the last source of credentials."""
_REFUSALS = ("status code: 401", "status code: 403")
"""How the error of a forbidden listing is recognized."""
_LINK_LIFE = timedelta(minutes=10)
_BLOCK_BYTES = 1 << 20
SCHEMES = frozenset({"s3", "gs", "az", "memory"})
"""Schemes of object-store URLs."""


class Changed(Retryable):
    """A conditional write failed: the object has changed since it was read."""


class Refused(StoreUnavailable):
    """The credentials do not permit the operation; they may be renewed, or permissions restored."""


class NoCredentials(StoreUnavailable):
    """Neither the environment nor the machine's metadata service has credentials."""


class StoredObject(NamedTuple):
    """An object; `version` is for a conditional write that replaces it."""

    data: bytes
    version: UpdateVersion
    metadata: Mapping[str, str]


class Listed(NamedTuple):
    """An object's entry in a listing."""

    n_bytes: int
    modified: float
    """Unix seconds, by the object store's clock."""


class Bucket:
    """The objects under one URL."""

    def __init__(self, url: str) -> None:
        """Describe the bucket; the first call connects.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or `memory:///`, which is empty at
                start and gone at the end. Credentials and endpoints come from the environment.

        Raises:
            ConfigError: the URL or the configuration in the environment is invalid.

        """
        self.url = url
        try:
            if url.startswith("memory:"):
                self._store: ObjectStore = from_url(url)
            else:
                self._store = from_url(url, client_options=_CLIENT, retry_config=_RETRIES)  # type: ignore[call-overload]
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(
                f"object store {url}: {_brief(error)}; give s3://bucket/prefix, gs://bucket/prefix or "
                "az://container/prefix, and set the environment variables of its provider's tools"
            ) from error

    async def get(self, path: str) -> StoredObject:
        """Return an object, raising `NotFound`."""
        with self._errors():
            result = await obstore.get_async(self._store, path)
            data = await result.bytes_async()
            metadata = {str(name): value for name, value in result.attributes.items()}
            return StoredObject(data.to_bytes(), _version(result.meta["e_tag"], result.meta["version"]), metadata)

    async def metadata(self, path: str) -> Mapping[str, str]:
        """Return the metadata of an object, raising `NotFound`."""
        with self._errors():
            result = await obstore.get_async(self._store, path, options={"head": True})
            return {str(name): value for name, value in result.attributes.items()}

    async def blocks(self, path: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Open an object and return its bytes from `start` up to `stop` in blocks; raises `NotFound`."""
        with self._errors():
            result = await obstore.get_async(self._store, path, options={"range": (start, stop)})

        async def stream() -> AsyncIterator[bytes]:
            with self._errors():
                async for block in result.stream(min_chunk_size=_BLOCK_BYTES):
                    yield bytes(block)

        return stream()

    async def put(self, path: str, data: bytes) -> None:
        """Write an object, replacing any earlier one."""
        with self._errors():
            await obstore.put_async(self._store, path, data, use_multipart=False)

    async def put_if_version(
        self, path: str, data: bytes, version: UpdateVersion | None, metadata: Mapping[str, str] | None = None
    ) -> UpdateVersion:
        """Write an object if its present version is `version`, None if it must not exist; return the new version.

        Raises:
            Changed: the object has another version.

        """
        with self._errors():
            result = await obstore.put_async(
                self._store, path, data, mode=version or "create", attributes=dict(metadata or {}), use_multipart=False
            )
        return _version(result["e_tag"], result["version"])

    async def replace(self, path: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Replace the present version of an object.

        A delayed write of a process that was assumed dead cannot undo this one.
        """
        try:
            await self.put_if_version(path, data, None, metadata)
        except Changed:
            await self.put_if_version(path, data, (await self.get(path)).version, metadata)

    async def remove(self, paths: Sequence[str]) -> None:
        """Delete objects, ignoring missing ones."""
        with self._errors():
            try:
                await obstore.delete_async(self._store, list(paths))
            except FileNotFoundError:
                # Raised by stores without bulk deletion, after one missing object; delete the others one by one.
                for path in paths:
                    with suppress(FileNotFoundError):
                        await obstore.delete_async(self._store, path)

    async def sizes(self, folder: str) -> dict[str, int]:
        """Return the name relative to `folder` and the size in bytes of every object in it."""
        return {name: found.n_bytes for name, found in (await self.objects(folder)).items()}

    async def objects(self, folder: str) -> dict[str, Listed]:
        """Return the name relative to `folder` and the listing entry of every object in it."""
        found = {}
        with self._errors():
            async for batch in obstore.list(self._store, folder):
                for meta in batch:
                    name = meta["path"].removeprefix(f"{folder}/")
                    found[name] = Listed(meta["size"], meta["last_modified"].timestamp())
        return found

    async def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in `folder`, in order."""
        with self._errors():
            listing = await obstore.list_with_delimiter_async(self._store, folder)
        return sorted(path.removeprefix(f"{folder}/") for path in listing["common_prefixes"])

    async def link(self, path: str) -> str:
        """Return a signed URL for reading an object, valid for some minutes.

        Raises:
            Fatal: this object store, or its credentials, does not support signed URLs.

        """
        if not isinstance(self._store, (S3Store, GCSStore, AzureStore)):
            raise Fatal(f"object store {self.url} has no signed URLs")
        with self._errors():
            return await obstore.sign_async(self._store, "GET", path, _LINK_LIFE)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate the library's errors. After a missing response, a write may have taken effect."""
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"object store {self.url}: {_brief(error)}") from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise Changed(f"object store {self.url}: {_brief(error)}") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise Refused(f"object store {self.url} refuses: {_brief(error)}; {_PERMISSIONS}") from error
        except exceptions.NotSupportedError as error:
            raise Fatal(f"object store {self.url}: {_brief(error)}") from error
        except exceptions.BaseError as error:
            text = _brief(error)
            if any(sign in text for sign in _METADATA):
                raise NoCredentials(f"object store {self.url}: {text}") from error
            if any(sign in text for sign in _REFUSALS):
                raise Refused(f"object store {self.url} refuses: {text}; {_PERMISSIONS}") from error
            raise StoreUnavailable(f"object store {self.url}: {text}") from error


@contextmanager
def configuration() -> Iterator[None]:
    """Raise missing credentials, permissions and buckets as `ConfigError`, for use at the start."""
    try:
        yield
    except NoCredentials as error:
        raise ConfigError(
            f"{error}: no credentials were found; set the environment variables of the provider's tools "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME "
            "and AZURE_STORAGE_ACCOUNT_KEY), or give this machine a role"
        ) from error
    except NotFound as error:
        raise ConfigError(f"{error}: create the bucket, or correct its name") from error
    except Refused as error:
        raise ConfigError(str(error)) from error


class ExclusiveObject:
    """An object that only this process writes; detects writes of other processes."""

    def __init__(self, bucket: Bucket, path: str, version: UpdateVersion | None) -> None:
        """Start from the version that was read, None for no object."""
        self._bucket = bucket
        self._path = path
        self._version = version
        self._attempted: set[bytes] = set()
        """Contents of writes without a response, one of which may have taken effect."""

    async def write(self, data: bytes) -> None:
        """Replace the object.

        Raises:
            Fenced: another process has written it, and this write did not take effect.

        """
        self._attempted.add(data)
        while True:
            try:
                self._version = await self._bucket.put_if_version(self._path, data, self._version)
                break
            except Changed as error:
                try:
                    found = await self._bucket.get(self._path)
                except NotFound:
                    found = None
                if found is None or found.data not in self._attempted:
                    raise Fenced(
                        f"{self._path} of {self._bucket.url} was written by another process: it has taken over"
                    ) from error
                self._version = found.version
                if found.data == data:
                    break
        self._attempted.clear()


def _version(e_tag: str | None, version: str | None) -> UpdateVersion:
    """Return what identifies a version of an object: the tag on S3 and Azure, the version on Google."""
    known: UpdateVersion = {}
    if e_tag is not None:
        known["e_tag"] = e_tag
    if version is not None:
        known["version"] = version
    return known


def _brief(error: BaseException) -> str:
    """Return an error's message without the internals that the library appends."""
    text = str(error).partition("\n\nDebug source:")[0]
    return " ".join(text.split())
