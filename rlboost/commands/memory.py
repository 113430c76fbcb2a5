"""`rlboost memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost.commands.common import JobFileArgument, JsonOption, OverridesArgument, print_json

_GIB = 1 << 30


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(memory)


def memory(
    job_file: JobFileArgument,
    overrides: OverridesArgument = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of the longest sample with its prompt; 0: sampling.max_tokens, for sft the micro-batch's.",
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compute the GPU memory of a job's training from its model's config.json, before anything loads.

    With LoRA and with megatron only weights, gradients and optimizer are computed. A CUDA context, libraries'
    workspaces and fragmentation come on top.
    """
    from rlboost.jobs.training_memory import estimate  # noqa: PLC0415 - keeps --help quick
    from rlboost.shared.job.file import load  # noqa: PLC0415 - likewise
    from rlboost.shared.job.spec import parse  # noqa: PLC0415 - likewise

    spec = parse(load(str(job_file), overrides or []))
    found = estimate(spec, tokens)
    if as_json:
        print_json(found._asdict())
        return
    typer.echo(
        f"{spec.model}: {found.parameters / 1e9:.2f} billion parameters, {found.active_parameters / 1e9:.2f} per token"
    )
    typer.echo(f"on each of {found.gpus} GPUs, with {found.tokens} tokens in a micro-batch:")
    for name, n_bytes in found.bytes.items():
        typer.echo(f"  {name.replace('_', ' '):<28}{n_bytes / _GIB:>8.1f} GiB")
