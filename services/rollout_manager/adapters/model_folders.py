"""Finds the folder with a model's tokenizer and chat template: one of this machine, or one downloaded from a Hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlboost.services.rollout_manager.ports import TextProcessesBusy, TokenizationError
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.process.waiting import count_timeout

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
"""What is downloaded."""
MAX_FILE_BYTES = 64 << 20
WAIT_S = 20.0
"""How long a request waits for a download, less than workers wait for their answer."""
SILENCE_S = 10.0
"""How long the Hub may take to answer; its library would wait without end."""
RETRY_S = 60.0
"""After how long a download that failed is tried again."""
MAX_DOWNLOADS = 8
"""At once: each has a thread."""
JOBS_KEPT = 256


class _Search(NamedTuple):
    outcome: asyncio.Future[str]
    again_at: float
    """When it is repeated at the earliest, if it has failed."""
    failure: str
    """Of the search before, which requests get while this one runs."""


class ModelFolders:
    """`ports.FindModelFolder`. A job keeps the files that were the newest when it was first asked for."""

    def __init__(self) -> None:
        self._searches: dict[str, _Search] = {}
        """Of jobs with a model of the Hub."""

    async def __call__(self, job_id: str, model: str) -> str:
        """See `ports.FindModelFolder`."""
        # As the trainer tells them apart.
        if model.startswith((".", "/", "~")) or model.count("/") > 1 or await asyncio.to_thread(Path(model).is_dir):
            return model
        search, now = self._searches.get(job_id), time.monotonic()
        failure = str(search.outcome.exception() or "") if search is not None and search.outcome.done() else ""
        if search is None or (failure and now >= search.again_at):
            if sum(not one.outcome.done() for one in self._searches.values()) >= MAX_DOWNLOADS:
                busy = TextProcessesBusy(f"{MAX_DOWNLOADS} other tokenizers are being downloaded")
                raise TokenizationError(failure) if failure else busy
            search = _Search(run_in_thread("model-files", partial(_downloaded, model)), now + RETRY_S, failure)
            self._searches[job_id] = search
        while len(self._searches) > JOBS_KEPT:
            del self._searches[next(job for job, one in self._searches.items() if one.outcome.done())]
        if search.failure and not search.outcome.done():
            raise TokenizationError(search.failure)
        await asyncio.wait([search.outcome], timeout=WAIT_S)
        if not search.outcome.done():
            count_timeout("the files of a model", model, WAIT_S)
            raise TextProcessesBusy(f"the tokenizer of {model} is being downloaded")
        return search.outcome.result()


def _downloaded(model: str) -> str:
    """Return the folder with the newest files of a model of the Hub, or with those of an earlier download.

    Raises:
        TokenizationError: there are none.

    """
    try:
        folder = Path(_snapshot(model))
        _check_sizes({name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()})
    except Exception as error:  # the library raises those of several others
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TokenizationError(
            f"model {model} is no folder on the manager's machine, and its tokenizer cannot be downloaded ({reason}): "
            "send the prompt as token ids, give the manager a way to the Hub (HF_ENDPOINT, HF_TOKEN for private "
            "models), or put the model's folder where the manager can read it"
        ) from error
    return str(folder)


def _snapshot(model: str) -> str:
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - slow, and only such models need it
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415 - likewise
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - likewise

    disable_progress_bars()
    try:
        found = HfApi().model_info(model, files_metadata=True, timeout=SILENCE_S)
    except Exception as error:  # noqa: BLE001 - as above
        try:
            return snapshot_download(model, allow_patterns=[*FILES], local_files_only=True)
        except LocalEntryNotFoundError:
            raise error from None
    _check_sizes({file.rfilename: file.size or 0 for file in found.siblings or () if file.rfilename in FILES})
    return snapshot_download(model, allow_patterns=[*FILES])


def _check_sizes(sizes: Mapping[str, int]) -> None:
    if large := [name for name, n_bytes in sizes.items() if n_bytes > MAX_FILE_BYTES]:
        raise TokenizationError(f"{large[0]} has more than {MAX_FILE_BYTES >> 20} MiB")
