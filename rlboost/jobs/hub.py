"""Upload an exported model to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import pip_install

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LOG_IN = "set HF_TOKEN to a token with write access, or run 'hf auth login'"


class HubRepository:
    """A model repository of the Hub that HF_ENDPOINT names, huggingface.co by default."""

    def __init__(self, name: str) -> None:
        """Check that one may log in, before anything is exported.

        Raises:
            ConfigError: the name is no repository's, the library or a token is missing, or the Hub refuses the token.

        """
        owner, slash, repository = name.partition("/")
        if not (owner and slash and repository) or "/" in repository:
            raise ConfigError(f"--push-to-hub {name}: name a repository as OWNER/NAME")
        try:
            from huggingface_hub import HfApi, get_token  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(f"--push-to-hub needs huggingface_hub: {pip_install('worker')}") from error
        if get_token() is None:
            raise ConfigError(f"--push-to-hub {name}: there is no token: {_LOG_IN}")
        self.name = name
        self._api: HfApi = HfApi(library_name="rlboost")
        with self._errors():
            self._api.whoami()

    def push(self, folder: Path, *, private: bool) -> str:
        """Upload the files of a folder, subfolders excluded, as one commit; return the repository's URL.

        A repository that exists keeps its visibility and its other files.

        Raises:
            ConfigError: the Hub does not answer, or refuses it.

        """
        with self._errors():
            url = self._api.create_repo(self.name, private=private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                ignore_patterns=["*/*"],
                commit_message="Upload by rlboost export",
            )
        return str(url)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415 - an extra

        try:
            yield
        except HfHubHTTPError as error:
            status, reason = error.response.status_code, _reason(error)
            advice = {401: _LOG_IN, 403: f"the token may not write there: {_LOG_IN}"}.get(status, "try again later")
            raise ConfigError(f"--push-to-hub {self.name}: the Hub answered {status} ({reason}): {advice}") from error
        except Exception as error:  # of the network, or a name that is none
            raise ConfigError(f"--push-to-hub {self.name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
