"""The tables of commands, REST routes, Prometheus metrics and job events, generated from the code.

python -m tests.support.interface_reference --write
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from rlboost.cli import app
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.http.guard import SCOPE_KEY
from tests.support.generated_docs import ROOT, write_block
from tests.support.memory_bus import MemoryBus

_METRIC_CLASSES = {"Counter", "Gauge", "CounterMetricFamily", "GaugeMetricFamily", "SummaryMetricFamily", "_gauge"}
_EMITTERS = {"emit_event", "_emit_event", "event"}
EVENTS: Mapping[str, str] = {
    "adapter_not_shared": "a worker cannot serve this adapter of the job next to those of others (reason); with "
    "`lasting` 1, no adapter of the job",
    "adapter_saved": "the LoRA adapter of a completed job is in its folder",
    "budget_reached": "the job has cost nearly `elastic.max_dollars`: no spot worker serves it any more",
    "checkpoint_failed": "a checkpoint could not be written",
    "checkpoint_saved": "a checkpoint is complete",
    "conversation_lost": "a fault of the environment ended a conversation, which begins again or is left out",
    "deadline_unreachable": "no workers within the limits finish the job by `elastic.finish_by`; when it will end",
    "device_lost": "the trainer was suspended for longer than its lease of a [shared device](time-sharing.md), which "
    "another job has taken",
    "disk_full": "a write of the job waits until its disk has space",
    "fleet_scaled": "autoscaling changed the number of workers of a kind",
    "group_dropped": "a group was not trained on: it could not be generated or scored",
    "job_quarantined": "a trainer cannot read the job",
    "job_resumed": "the trainer continued from a checkpoint, of another job if `begins_with` is present",
    "job_state_changed": "the job's state changed",
    "trainer_missing": "an external job was without a trainer for `pause_after_s`, and is paused",
    "model_published": "another model of the job is in the weight store, as version 0 of the job that serves it",
    "model_saved": "the model of a completed job is in its folder",
    "parity_check_failed": "a worker's engine disagrees with the trainer, or with itself; it generates nothing",
    "profile_written": "the [traces](monitoring.md#profile-the-trainer) of some steps, up to this one, are in a folder",
    "prompts_filtered": "rows beyond the job's length limits were left out",
    "rebalance_recommended": "the cloud recommends replacing a worker's machine",
    "reclaim_requested": "the manager reclaims running samples of a worker",
    "sample_failed": "a sample failed on an engine",
    "samples_migrated": "samples resumed on this worker, with the tokens that they had",
    "samples_unassigned": (
        "a worker's samples went back to the queue, since it was lost, left, was suspended, sent invalid tokens or "
        "generated too little (cause)"
    ),
    "seeding_ended": "reserved workers stopped generating for the step",
    "seeding_reopened": "reserved workers generate again, as no or too few spot workers are left for the step's "
    "samples or its requests to another model",
    "seeding_started": "reserved workers generate at the start of a step",
    "seeding_window_closing": "the manager reclaims the samples of the reserved workers",
    "seeding_window_changed": "the open window got another length, because the number of spot workers changed",
    "seeding_window_updated": "a step was measured: both waits, and the window before and after it",
    "serving_trouble": (
        "the vLLM server beside a borrowed worker does not answer, or misses its limit although the worker yields"
    ),
    "step_ended": "a step's seconds, and the tokens of its samples by the worker that generated them",
    "wait_limit_exceeded": (
        "a wait of the trainer has reached its limit, or the job has waited 5 minutes for a trainer or a worker and "
        "continues to wait (not if it is queued for the trainer of another job)"
    ),
    "warning": "something in the job needs attention",
    "warning_cleared": "a warning no longer holds",
    "weights_refused": "a version does not load on a worker (reason), which stays and serves other versions and jobs",
    "weights_restored": "a version was published again after a restart",
    "weights_unavailable": "a worker could not get a version",
    "worker_drained": "the manager commanded a worker to drain: a budget ends, or fewer workers are needed",
    "worker_joined": "a worker joined",
    "worker_left": (
        "a worker reported its exit: after a drain or notice, to join again, or because it failed (reason)"
    ),
    "worker_lost": (
        "a worker's lease expired, or the manager dismissed it: it missed commands, or has another protocol"
    ),
    "worker_notice": "a worker announced that it will be preempted",
    "worker_rejected": (
        "a worker is drained, as it sent invalid tokens for samples that others completed, or repeatedly held samples "
        "without generating"
    ),
    "worker_reassigned": "a worker changed jobs",
    "worker_suspected": (
        "a worker held samples and generated too little while others generated: they were taken from it, and it gets "
        "no more for some time"
    ),
    "worker_state": "a worker's state changed",
}
"""Event -> meaning."""
COMPUTED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "job_resumed": ("begins_with",),
    "parity_check_failed": ("mean", "reason", "tolerated_mean", "worst"),
    "seeding_window_updated": (
        *("train_wait_s", "remote_wait_s", "min_wait_s", "step_s", "fleet_mean", "latency_s", "work_s"),
        *("window_was_s", "change_s", "window_s", "remembered_for", "target_workers"),
    ),
}
"""Event -> fields that its call passes as a mapping (`**`)."""
COMMAND_GROUPS: Mapping[str, tuple[str, ...]] = {
    "System": ("up", "down", "ps", "top", "scale", "doctor", "demo"),
    "Jobs": (
        *("init", "config check", "run", "eval", "follow", "status"),
        *("logs", "samples", "report", "pause", "resume", "cancel"),
    ),
    "Models": ("export", "verify-run"),
    "Planning": ("plan", "prices", "simulate"),
    "Workers": ("worker list", "worker drain", "worker join"),
    "Training machines": ("trainer join",),
    "Tokens": ("token create", "token list", "token revoke"),
}
"""Group -> commands without `rlboost`, in the order of the overview."""


def commands() -> str:
    """Return a section for each command with its arguments and options, in the order of the overview."""
    root: Any = typer.main.get_command(app)
    leaves = dict(_leaves("rlboost", root))
    order = [f"rlboost {name}" for names in COMMAND_GROUPS.values() for name in names]
    paths = sorted(leaves, key=lambda path: order.index(path) if path in order else len(order))
    return "\n\n".join([_overview(leaves), *(_command(path, leaves[path]) for path in paths)])


def _overview(leaves: Mapping[str, Any]) -> str:
    """Return a table of all commands by group, with the first sentence about each."""
    lines = ["| group | command | |", "|---|---|---|"]
    grouped = [name for names in COMMAND_GROUPS.values() for name in names]
    groups = {**COMMAND_GROUPS, "Other": tuple(path.removeprefix("rlboost ") for path in leaves)}
    for group, names in groups.items():
        for name in names:
            if group == "Other" and name in grouped:
                continue
            path = f"rlboost {name}"
            first = re.split(r"(?<=\.)\s|[;:] ", _cell(leaves[path].help or ""), maxsplit=1)[0].rstrip(".")
            lines.append(f"| {group} | [`{path}`](#{path.replace(' ', '-')}) | {first} |")
    return "\n".join(lines)


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, child in command.commands.items():
        if not child.hidden:
            yield from _leaves(f"{path} {name}", child)


def _command(path: str, command: Any) -> str:
    shown = [param for param in command.params if not getattr(param, "hidden", False) and param.name != "help"]
    arguments = [_argument(param) for param in shown if _is_argument(param)]
    lines = [
        f"## `{path}`",
        "",
        "```text",
        " ".join([path, *arguments, "[OPTIONS]"]),
        "```",
        "",
        _cell(command.help or ""),
    ]
    if shown:
        lines += ["", "| argument or option | default | meaning |", "|---|---|---|"]
    for param in shown:
        name = _argument(param) if _is_argument(param) else _option(param)
        lines.append(f"| `{_cell(name)}` | {_default(param)} | {_cell(getattr(param, 'help', '') or '')} |")
    return "\n".join(lines)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper()).strip("[]") + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    names = "/".join((*param.opts, *param.secondary_opts))
    return f"{names} {param.metavar}" if param.metavar else names


def _default(param: Any) -> str:
    value = param.default
    if param.required:
        return "required"
    if callable(value) or value in (None, "", []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else getattr(value, 'value', value)}`"


def routes() -> str:
    """Return the manager's routes, from its OpenAPI description."""
    manager = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0)
    document = build(manager, MemoryBus(), Settings(token="t")).openapi()
    lines = ["| route | scope | parameters | body | meaning |", "|---|---|---|---|---|"]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            given = [f"`{one['name']}`" for one in route.get("parameters", []) if one["in"] != "path"]
            scope = f"`{route[SCOPE_KEY]}`" if SCOPE_KEY in route else ""
            body = _body(route, document["components"]["schemas"])
            cells = (f"`{method.upper()} {path}`", scope, ", ".join(given), body, _cell(route.get("description", "")))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _body(route: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return the fields of a request's body, optional ones in brackets."""
    if "requestBody" not in route:
        return ""
    schema = route["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" not in schema:
        return "a job file"
    fields = schemas[schema["$ref"].rpartition("/")[2]]
    shown = {name: f"`{name}`: {_values(field)}" for name, field in fields["properties"].items()}
    return ", ".join(text if name in fields.get("required", ()) else f"[{text}]" for name, text in shown.items())


def _values(field: Mapping[str, Any]) -> str:
    """Return the type of a body's field, or its values."""
    if "anyOf" in field:
        return " or ".join(text for part in field["anyOf"] if (text := _values(part)) != "null")
    words = field.get("enum", [field["const"]] if "const" in field else [])
    return " or ".join(f"`{word}`" for word in words) or field.get("type", "object")


@dataclass(frozen=True, slots=True, order=True)
class MetricFamily:
    """A Prometheus metric that a service defines."""

    name: str
    service: str
    labels: tuple[str, ...]
    text: str


def metric_families() -> list[MetricFamily]:
    """Return the metrics of all services, from their constructors in the code."""
    found = []
    for service, call in _calls(_METRIC_CLASSES):
        texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if len(texts) == 2:
            name = texts[0] if texts[0].startswith("rlboost_") else f"rlboost_worker_{texts[0]}"
            name += "_total" * ("Counter" in ast.unparse(call.func))
            lists = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "labels")]
            labels = [ast.literal_eval(one) for one in lists if isinstance(one, ast.List)]
            found.append(MetricFamily(name, service, tuple(*labels), _cell(texts[1]).rstrip(".")))
    return sorted(found)


def metrics() -> str:
    """Return the Prometheus metrics of each service."""
    lines = ["| metric | service | labels | meaning |", "|---|---|---|---|"]
    for one in metric_families():
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.name}` | {one.service} | {labels} | {one.text} |")
    return "\n".join(lines)


def events() -> str:
    """Return the events of jobs, with their fields."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for service, call in _calls(_EMITTERS):
        kinds = [arg for arg in call.args if isinstance(arg, ast.Constant | ast.IfExp)]
        names = {part.value for kind in kinds for part in ast.walk(kind) if isinstance(part, ast.Constant)}
        for name in sorted(str(name) for name in names if isinstance(name, str)):
            services, fields = found.setdefault(name, (set(), set()))
            services.add(service)
            fields.update(keyword.arg for keyword in call.keywords if keyword.arg)
            if any(keyword.arg is None for keyword in call.keywords):
                if name not in COMPUTED_FIELDS:
                    raise LookupError(f"{name} has fields that its call passes as a mapping: name them")
                fields.update(COMPUTED_FIELDS[name])
    lines = ["| event | from | fields | meaning |", "|---|---|---|---|"]
    for name, (services, fields) in sorted(found.items()):
        shown = ", ".join(f"`{field}`" for field in sorted(fields))
        lines.append(f"| `{_cell(name)}` | {', '.join(sorted(services))} | {shown} | {EVENTS.get(name, '')} |")
    return "\n".join(lines)


def _calls(functions: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of functions with these names, each with its service; `all` for code that services share."""
    for file in sorted([*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]):
        top, part = file.relative_to(ROOT).parts[:2]
        service = "all" if top == "shared" else part.replace("_", " ")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in functions:
                yield service, node


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


BLOCKS: tuple[tuple[Path, str, Callable[[], str]], ...] = (
    (ROOT / "docs" / "cli.md", "commands", commands),
    (ROOT / "docs" / "rest.md", "routes", routes),
    (ROOT / "docs" / "metrics.md", "metrics", metrics),
    (ROOT / "docs" / "events.md", "events", events),
)


if __name__ == "__main__":
    for page, block, generate in BLOCKS:
        if sys.argv[1:] == ["--write"]:
            write_block(page, block, generate())
        else:
            print(generate(), end="\n\n")
