"""Models of the Hugging Face Hub: whether a model is an id of it or a folder, the card of an export, and its upload."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import read_config
from rlboost.shared.process.modules import pip_install

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from rlboost.export import Exported, ExportRequest

# --- A folder or an id of the Hub -------------------------------------------------------------------------------------

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SUGGESTED = 3
_SIMILAR = 0.5


def is_hub_id(model: str) -> bool:
    """Return True if a model that is no folder here may be a Hugging Face id.

    It is a path if it is absolute, starts with `.` or `~`, has more or fewer parts than `owner/name`, or is in a folder
    that exists.
    """
    return _HUB_ID.fullmatch(model) is not None and model[0] not in ".~" and not Path(model).parent.exists()


def config_of(model: str) -> dict[str, Any]:
    """Return the `config.json` of a folder, or of a Hugging Face id, whose other files are not downloaded.

    Raises:
        ConfigError: it is neither, or cannot be downloaded.

    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_config(folder)
    if not is_hub_id(model):
        found = nearest(model)
        raise ConfigError(f"there is no folder {model}, and it is no Hugging Face id{f': {found}' if found else ''}")
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an extra, and quick without
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise ConfigError(f"{model}: downloading needs huggingface_hub: {pip_install('worker')}") from error
    try:
        return read_config(Path(hf_hub_download(model, "config.json")).parent)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{model}: its config.json cannot be downloaded ({reason}): correct the id, set HF_TOKEN for a private "
            "one, or name a folder"
        ) from error


def nearest(model: str) -> str:
    """Return a clause that names the folders most like a missing one, or what its nearest existing parent contains."""
    missing = Path(model).expanduser()
    parent = next(folder for folder in missing.parents if folder.exists())
    name = missing.relative_to(parent).parts[0]
    try:
        folders = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:  # no folder, or not ours to read
        return ""
    similar = difflib.get_close_matches(name, folders, _SUGGESTED, _SIMILAR)
    if similar:
        return f"did you mean {' or '.join(str(parent / found) for found in similar)}?"
    more = ", ..." if len(folders) > _SUGGESTED else ""
    return f"{parent}/ has {', '.join(folders[:_SUGGESTED])}{more}" if folders else f"{parent}/ has no folder"


# --- The model card of an export, and its upload ----------------------------------------------------------------------

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
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

    def push(self, folder: Path, names: Collection[str], *, private: bool) -> str:
        """Upload these files of a folder as one commit; return the repository's URL.

        They replace earlier weights of their kind. A repository that exists keeps its visibility and its other files.

        Raises:
            ConfigError: the Hub does not answer, or refuses it.

        """
        with self._errors():
            url = self._api.create_repo(self.name, private=private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                allow_patterns=sorted(names),
                delete_patterns=["adapter_model*"] if "adapter_config.json" in names else _WEIGHTS,
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


def add_card(folder: Path, title: str, done: Exported, request: ExportRequest) -> None:
    """Write a model card into an export. Of the job file it has the kind and names of the Hub, but no path.

    Args:
        folder: the export.
        title: of the card; if empty, the job's name.
        done: what was exported.
        request: what was asked for.

    """
    spec = done.spec
    kind, model, data = spec.get("kind", "rl"), spec.get("model", ""), spec.get("data", {}).get("train")
    facts: dict[str, Any] = {"library_name": "peft" if request.adapter else "transformers", "tags": ["rlboost", kind]}
    if is_hub_id(model):
        facts["base_model"] = model
    if isinstance(data, str) and is_hub_id(data):
        facts["datasets"] = [data]
    # JSON is YAML, whatever is in a name.
    head = "".join(f"{key}: {json.dumps(value)}\n" for key, value in facts.items())
    of = f" from {model}" if "base_model" in facts else ""
    which = "the result" if done.version is None else f"version {done.version}"
    text = f"Trained with RLBoost{of}: {which} of job {request.job_id}, of kind {kind}.\n"
    if done.certificate is not None:
        certificate, key = done.certificate
        text += f"""
The record of the run says which worker, version and prompt made each trained token. It has this certificate:

| | |
|---|---|
| certificate | `{certificate}` |
| signed with | `{key}` |

`rlboost verify-run RUN --key KEY` checks a copy of the run's folder, and prints its certificate.
"""
    title = title or spec.get("name", request.job_id)
    (folder / "README.md").write_text(f"---\n{head}---\n\n# {title}\n\n{text}", encoding="utf-8")
