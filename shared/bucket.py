"""An object store; the only file that knows `obstore` and its errors.

Every object is there whole or not at all. A conditional write takes place only if nobody has written since; S3, Google
Cloud Storage and Azure all have it. The weight store's lease finds out whether the server at hand keeps to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from shared.errors import ConfigError, Fatal, Fenced, NotFound, Retryable, StoreUnavailable

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore

_CLIENT = {"allow_http": True, "connect_timeout": timedelta(seconds=3), "timeout": timedelta(seconds=20)}
"""Plain HTTP is spoken only to an endpoint that was given so."""
_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
"""Enough for a server that asks to slow down. One that is away is the callers' to wait for: they hear in seconds."""
_PERMISSIONS = "see that its credentials may read, write, list and delete there"
# The library has no types of its own for these two.
_METADATA = ("/latest/api/token", "/latest/meta-data/", "/computeMetadata/", "/metadata/identity/")
"""Asked of a machine's metadata service, after every other place for credentials was empty."""
_REFUSALS = ("status code: 401", "status code: 403")
"""What a listing that is not allowed looks like."""
_LINK_LIFE = timedelta(minutes=10)
_BLOCK_BYTES = 1 << 20
SCHEMES = frozenset({"s3", "gs", "az", "memory"})
"""How the URL of an object store begins."""


class Changed(Retryable):
    """The object is not what the writer thought: a conditional write did not take place."""


class Refused(StoreUnavailable):
    """The credentials are not good for this; they may be renewed, or given back what was taken from them."""


class NoCredentials(StoreUnavailable):
    """The environment has no credentials, and this machine's metadata service gave none."""


class Found(NamedTuple):
    """An object as it was read; `version` is for a conditional write over it."""

    data: bytes
    version: UpdateVersion
    notes: Mapping[str, str]


class Listed(NamedTuple):
    """What a listing says of an object."""

    n_bytes: int
    modified: float
    """Unix seconds, by the object store's clock."""


class Bucket:
    """All objects below one URL."""

    def __init__(self, url: str) -> None:
        """Prepare connections; nothing is dialled yet.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or `memory:///`, which is empty at
                start and gone at the end. Credentials and endpoints come from the environment.

        Raises:
            ConfigError: the URL, or what the environment says of it, cannot be used.

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
                "az://container/prefix, and what its provider's tools read from the environment"
            ) from error

    async def get(self, path: str) -> Found:
        """Return an object, raising `NotFound`."""
        with self._errors():
            result = await obstore.get_async(self._store, path)
            data = await result.bytes_async()
            notes = {str(name): value for name, value in result.attributes.items()}
            return Found(data.to_bytes(), _version(result.meta["e_tag"], result.meta["version"]), notes)

    async def notes(self, path: str) -> Mapping[str, str]:
        """Return the notes that an object was written with, raising `NotFound`."""
        with self._errors():
            result = await obstore.get_async(self._store, path, options={"head": True})
            return {str(name): value for name, value in result.attributes.items()}

    async def blocks(self, path: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Open an object and return its bytes from `start` up to `stop`, in blocks; raises `NotFound`."""
        with self._errors():
            result = await obstore.get_async(self._store, path, options={"range": (start, stop)})

        async def rest() -> AsyncIterator[bytes]:
            with self._errors():
                async for block in result.stream(min_chunk_size=_BLOCK_BYTES):
                    yield bytes(block)

        return rest()

    async def put(self, path: str, data: bytes) -> None:
        """Write an object, whatever was there."""
        with self._errors():
            await obstore.put_async(self._store, path, data, use_multipart=False)

    async def put_over(
        self, path: str, data: bytes, over: UpdateVersion | None, notes: Mapping[str, str] | None = None
    ) -> UpdateVersion:
        """Write an object over the version that was read, None for no object; return the version that is there now.

        Raises:
            Changed: something else is there.

        """
        with self._errors():
            result = await obstore.put_async(
                self._store, path, data, mode=over or "create", attributes=dict(notes or {}), use_multipart=False
            )
        return _version(result["e_tag"], result["version"])

    async def replace(self, path: str, data: bytes, notes: Mapping[str, str] | None = None) -> None:
        """Write an object over whatever is there now.

        A write of a process that was thought dead, still on its way, cannot undo this one.
        """
        try:
            await self.put_over(path, data, None, notes)
        except Changed:
            await self.put_over(path, data, (await self.get(path)).version, notes)

    async def remove(self, paths: Sequence[str]) -> None:
        """Remove objects; nothing happens to those that are not there."""
        with self._errors():
            try:
                await obstore.delete_async(self._store, list(paths))
            except FileNotFoundError:
                # Said by stores that have no removal of many at once; the others have been tried nevertheless.
                for path in paths:
                    await self._remove_one(path)

    async def _remove_one(self, path: str) -> None:
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return

    async def sizes(self, folder: str) -> dict[str, int]:
        """Return the name below `folder` and the size in bytes of every object there."""
        return {name: found.n_bytes for name, found in (await self.objects(folder)).items()}

    async def objects(self, folder: str) -> dict[str, Listed]:
        """Return the name below `folder` of every object there, and what a listing says of it."""
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
        """Return a URL where anybody can get an object for some minutes.

        Raises:
            Fatal: this object store, or its credentials, cannot do that.

        """
        if not isinstance(self._store, (S3Store, GCSStore, AzureStore)):
            raise Fatal(f"object store {self.url} has no URLs for others")
        with self._errors():
            return await obstore.sign_async(self._store, "GET", path, _LINK_LIFE)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate what the object store says. An answer that does not come may hide a write that took place."""
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
    """At start, what the object store refuses is for somebody to mend: raise it as `ConfigError`."""
    try:
        yield
    except NoCredentials as error:
        raise ConfigError(
            f"{error}: no credentials were found; set what the provider's tools read from the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME "
            "and AZURE_STORAGE_ACCOUNT_KEY), or give this machine a role"
        ) from error
    except NotFound as error:
        raise ConfigError(f"{error}: make the bucket, or mend its name") from error
    except Refused as error:
        raise ConfigError(str(error)) from error


class Register:
    """One object that this process alone writes, and that tells when somebody else has."""

    def __init__(self, bucket: Bucket, path: str, version: UpdateVersion | None) -> None:
        """Go on from the version that was read, None where there was no object."""
        self._bucket = bucket
        self._path = path
        self._version = version
        self._tried: set[bytes] = set()
        """What was written without an answer: one of these may be there."""

    async def write(self, data: bytes) -> None:
        """Replace the object.

        Raises:
            Fenced: somebody else has written it, and this write did not take place.

        """
        self._tried.add(data)
        while True:
            try:
                self._version = await self._bucket.put_over(self._path, data, self._version)
                break
            except Changed as error:
                try:
                    found = await self._bucket.get(self._path)
                except NotFound:
                    found = None
                if found is None or found.data not in self._tried:
                    raise Fenced(
                        f"{self._path} of {self._bucket.url} was written by another process: it has taken over"
                    ) from error
                self._version = found.version
                if found.data == data:
                    break
        self._tried.clear()


def _version(e_tag: str | None, version: str | None) -> UpdateVersion:
    """Return what tells one version of an object from another; S3 and Azure go by the tag, Google by the version."""
    known: UpdateVersion = {}
    if e_tag is not None:
        known["e_tag"] = e_tag
    if version is not None:
        known["version"] = version
    return known


def _brief(error: BaseException) -> str:
    """Return what an error of the library says, without the internals that it appends."""
    text = str(error).partition("\n\nDebug source:")[0]
    return " ".join(text.split())
