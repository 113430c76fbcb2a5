"""The `rlboost` command: one module of `rlboost.commands` per group of verbs.

Those modules import their implementation only when a command runs, so that `--help` stays fast.
"""

from __future__ import annotations

from rlboost.commands import config, demo, export, jobs, ps, report, samples, up, worker
from rlboost.commands import eval as evaluation
from rlboost.commands.common import new_app

app = new_app("Reinforcement learning of language models on spot GPUs: nothing is lost when they go.", top=True)
up.register(app)
demo.register(app)
report.register(app)
jobs.register(app)
samples.register(app)
evaluation.register(app)
export.register(app)
ps.register(app)
app.add_typer(worker.app, name="worker")
app.add_typer(config.app, name="config")


def main() -> None:
    """Run the command line and exit."""
    app()
