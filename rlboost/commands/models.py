"""Commands of models: `rlboost eval`, `export`, `gateway`, `tinker`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_FAILED,
    JobArgument,
    JsonOption,
    OverridesArgument,
    StateOption,
    command,
    connect,
    endpoint,
    print_json,
    print_table,
)
from rlboost.commands.job_files import NoCheckOption, require_sound
from rlboost.commands.jobs import connect_to_follow, print_change
from rlboost.commands.system import SERVICE_PACKAGES, require_packages
from rlboost.shared.errors import ConfigError
from rlboost.shared.secrets import clean_secret
from rlboost.terminal import echo

if TYPE_CHECKING:
    from rlboost.client import Client


# --- `rlboost eval`: evaluate a model on a job's held-out data --------------------------------------------------------


_FILES = {".yaml", ".yml", ".toml", ".json"}


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="JOB.yaml|JOB", help="A job file, or the id or name of a completed job.")
    ],
    overrides: OverridesArgument = None,
    model: Annotated[str | None, typer.Option(help="What to evaluate in place of the job's (final) model.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Completions of each set; else eval.samples.")] = None,
    no_check: NoCheckOption = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Generate completions for a job's held-out prompts, score them, and print the result. Nothing is trained.

    For a job file this evaluates its model, for a completed job its final model.
    """
    from rlboost.job_lines import end_line  # noqa: PLC0415 - keeps --help quick
    from rlboost.jobs import file as jobfile  # noqa: PLC0415 - only this command needs it
    from rlboost.shared.job.file import load  # noqa: PLC0415 - only this command needs it

    overrides = overrides or []
    for override in overrides:
        jobfile.require_read(override)
    asked = None
    if Path(target).suffix in _FILES:
        asked = _evaluation_of(target, load(target, overrides), model, samples)
        if not no_check:
            require_sound(target, asked, state)
    with connect(state) as client:
        if asked is None:
            trained = client.jobs.find(target)
            raw = _spec_of(client, trained["id"], overrides)
            asked = _evaluation_of(target, raw, model or raw["model"] or _final_model(client, trained), samples)
        job = jobfile.resolved(target, asked)
        ended, row = _watched(client, client.jobs.create(job)["id"], state)
    if as_json:
        print_json({"job": ended, "model": job["model"], "metrics": row})
    if ended["state"] != "completed":
        log = command(f"logs {ended['id']}", state)
        echo(f"rlboost: {end_line(ended, log)}", err=True)
        raise typer.Exit(EXIT_FAILED)
    if not as_json:
        shown = [(name, f"{value:.4g}") for name, value in sorted(row.items(), key=_order) if _is_shown(name, value)]
        echo(f"{job['model']}, evaluated by {ended['id']}")
        print_table("", ("", ""), shown)


def _spec_of(client: Client, job_id: str, overrides: list[str]) -> dict[str, Any]:
    """Return a job's job file without its model, which is not the final one, unless an override names one."""
    from rlboost.shared.job.file import set_by_override  # noqa: PLC0415 - keeps --help quick

    raw = client.jobs.spec(job_id)
    raw["model"] = None
    for override in overrides:
        set_by_override(raw, override)
    return raw


def _evaluation_of(target: str, raw: dict[str, Any], model: str | None, samples: int | None) -> dict[str, Any]:
    from rlboost.jobs.file import evaluation_of  # noqa: PLC0415 - keeps --help quick

    try:
        return evaluation_of(raw, model, samples)
    except ConfigError as error:
        raise ConfigError(f"{target}: {error}") from error


def _order(metric: tuple[str, float]) -> tuple[str, int]:
    """Sort `eval/pass@2` before `eval/pass@16`."""
    name, _, k = metric[0].partition("@")
    return name, int(k) if k.isdecimal() else 0


def _final_model(client: Client, job: dict[str, Any]) -> str:
    """Return where the trainer saved the model of a completed job.

    Raises:
        ConfigError: the job has not completed, or its events have been trimmed.

    """
    job_id = job["id"]
    if job["state"] != "completed":
        raise ConfigError(
            f"{job_id} is {job['state']}, not completed: write its newest version with "
            f"'rlboost export {job_id} --out FOLDER', then name it with --model FOLDER"
        )
    saved = [event.data["fields"]["path"] for event in client.jobs.events(job_id) if event.kind == "model_saved"]
    if not saved:
        raise ConfigError(f"where {job_id} saved its model is unknown: name it with --model")
    return str(saved[-1])


def _watched(client: Client, job_id: str, state: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `_watch`; an interrupted command cancels its evaluation."""
    echo(f"created {job_id}", err=True)
    try:
        return _watch(job_id, state)
    except KeyboardInterrupt:
        client.jobs.cancel(job_id)
        echo(f"cancelled {job_id}", err=True)
        raise


def _watch(job_id: str, state: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job's record once it has ended, and its row of metrics, which may be empty."""
    from rlboost.follow import follow  # noqa: PLC0415 - keeps --help quick

    job: dict[str, Any] = {}
    row: dict[str, Any] = {}
    for kind, news in follow(lambda: connect_to_follow(state), job_id):
        if kind == "job":
            job = news
        elif kind == "step":
            row = news
        else:
            print_change(job_id, 0, (kind, news), all_err=True)
    return job, row


def _is_shown(name: str, value: float) -> bool:
    return name.startswith("eval/") or (name.startswith("groups/dropped") and value > 0)


# --- `rlboost export` -------------------------------------------------------------------------------------------------


def export(  # noqa: PLR0913, PLR0917 - the command's options
    job: JobArgument,
    out: Annotated[Path, typer.Option("--out", help="Output folder.")],
    version: Annotated[int | None, typer.Option("--version", min=0, help="Version; the newest if not given.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, as a PEFT folder.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with the tokenizer of the job's model, where it is not here.")
    ] = None,
    weight_store: Annotated[
        str, typer.Option("--weight-store", help="URL of the weight store, if not the one advertised to workers.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Also upload the folder to this repository of the Hugging Face Hub."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create that repository for everyone to read.")] = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Write a job's model as a Hugging Face folder: the result of a finished run, or a stored version."""
    from rlboost import export as work  # noqa: PLC0415 - keeps --help quick
    from rlboost.export import new_folder  # noqa: PLC0415 - likewise
    from rlboost.jobs.hub import HubRepository, add_card  # noqa: PLC0415 - likewise

    if public and push_to_hub is None:
        raise ConfigError("--public is for --push-to-hub OWNER/NAME: give it too")
    repository = None if push_to_hub is None else HubRepository(push_to_hub)
    # The runs of a remote system are not on this machine.
    runs = None if os.environ.get("RLBOOST_URL") else state / "runs"
    request = work.ExportRequest(job, version, adapter)
    with new_folder(out, force=force, adapter=adapter) as to:
        left = work.finished(runs, request) if runs else None  # an id needs no running system
        if left is None:
            with connect(state) as client:
                request = request._replace(job_id=client.jobs.find(job)["id"])
            left = work.finished(runs, request) if runs else None
        if left is not None:
            done = work.copy(left, to)
        else:
            _, token = endpoint(state)
            with connect(state) as client:
                done = work.from_store(client, request, weight_store, token, model, to)
        with to.writing():
            add_card(to.scratch, (push_to_hub or "").rpartition("/")[2], done, request)
            names = {file.name for file in to.scratch.iterdir()}
    url = None if repository is None else repository.push(out, names, private=not public)
    if as_json:
        pushed = {} if url is None else {"url": url}
        print_json({"job": request.job_id, "version": done.version, "path": str(out.absolute()), **pushed})
    else:
        echo(f"{done.source} is in {out}{'' if url is None else f', and at {url}'}")
        if done.state == "failed":
            echo(f"rlboost: warning: {request.job_id} failed: these are its last weights, not its result", err=True)


def gateway(
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face id of the model; clients use this name.")],
    job: Annotated[str, typer.Option(help="Name of the external job, created if there is none, or its id.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; vLLM's default.")] = 8000,
    replace: Annotated[bool, typer.Option("--replace", help="Take the job from another trainer.")] = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Make the fleet look like one vLLM or SGLang server, to a trainer that knows either.

    It publishes the folders with weights that the trainer names, so run it where the trainer runs.
    RLBOOST_GATEWAY_API_KEY is the key that clients need; without one, only this machine may connect.
    """
    require_packages(*SERVICE_PACKAGES)
    from rlboost.fleet import AsyncFleet  # noqa: PLC0415 - keeps --help quick
    from rlboost.gateway.gateway import Gateway  # noqa: PLC0415 - likewise
    from rlboost.gateway.vllm_routes import create_app  # noqa: PLC0415 - likewise
    from rlboost.shared.http.server import serve  # noqa: PLC0415 - likewise

    api_key = clean_secret("RLBOOST_GATEWAY_API_KEY", os.environ.get("RLBOOST_GATEWAY_API_KEY", ""))
    if host not in {"127.0.0.1", "::1", "localhost"} and not api_key:
        raise ConfigError(
            f"--host {host} lets other machines connect: set RLBOOST_GATEWAY_API_KEY, which they need then"
        )
    url, token = endpoint(state)
    fleet = AsyncFleet(url, token, job=job, model=model, replace=replace, trainer="gateway")
    serve(create_app(Gateway(fleet, url, token, model), api_key, host), host, port)


def tinker(  # noqa: PLR0913, PLR0917 - the command's options
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face id of the base model.")],
    job: Annotated[str, typer.Option(help="Name of the external job, created if there is none, or its id.")],
    name: Annotated[str | None, typer.Option(help="How clients call the base model; MODEL if not given.")] = None,
    device: Annotated[str | None, typer.Option(help="Where it trains, such as cuda:0; the first GPU, or cpu.")] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of saved weights; 'tinker/JOB' in the state folder if not given.")
    ] = None,
    price_per_hour: Annotated[float, typer.Option(min=0, help="Dollars per hour of this machine.")] = 0.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 8000,
    replace: Annotated[bool, typer.Option("--replace", help="Take the job from another trainer.")] = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Serve Tinker's API: clients of Tinker train LoRA on this machine, and sample on the fleet.

    RLBOOST_TINKER_API_KEY is the key that clients need, as TINKER_API_KEY; it begins with tml-. Without one, only this
    machine may connect, with any key.
    """
    require_packages(*SERVICE_PACKAGES, "peft")
    import torch  # noqa: PLC0415 - keeps --help quick

    from rlboost.client import Client  # noqa: PLC0415 - likewise
    from rlboost.fleet import AsyncFleet  # noqa: PLC0415 - likewise
    from rlboost.shared.http.server import serve  # noqa: PLC0415 - likewise
    from rlboost.tinker.model import LoraModel  # noqa: PLC0415 - likewise
    from rlboost.tinker.routes import API_KEY, KEY_PREFIX, create_app  # noqa: PLC0415 - likewise
    from rlboost.tinker.server import Tinker  # noqa: PLC0415 - likewise

    api_key = clean_secret(API_KEY, os.environ.get(API_KEY, ""))
    if api_key and not api_key.startswith(KEY_PREFIX):
        raise ConfigError(f"{API_KEY} does not begin with {KEY_PREFIX}: Tinker's client sends no other keys")
    if host not in {"127.0.0.1", "::1", "localhost"} and not api_key:
        raise ConfigError(f"--host {host} lets other machines connect: set {API_KEY}, which they need then")
    url, token = endpoint(state)
    base = LoraModel(model, device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    folder = checkpoints or state / "tinker" / job
    options: dict[str, Any] = {"trainer": "tinker", "resume": False, "price_per_hour": price_per_hour}
    fleet = AsyncFleet(url, token, job=job, model=model, replace=replace, **options)
    with Client(url, token) as client:
        served = Tinker(fleet, client, base, name or model, folder, price_per_hour)
        serve(create_app(served, api_key, host), host, port)


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("eval")(evaluate)
    app.command()(export)
    app.command()(gateway)
    app.command()(tinker)
