"""The model card of an export, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.jobs.model_path import is_hub_id
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import pip_install

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from rlboost.export import Exported, ExportRequest

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
