"""The samples of a job: which to show, and how at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlboost.client import Client, ClientError
from rlboost.terminal import printable

_NOT_FOUND = 404
_PROMPT_CHARS, _COMPLETION_CHARS = 400, 1_200
"""Longest texts shown; of a prompt the end, of a completion both ends."""
_LABEL = 12

Sample = dict[str, Any]


def of_step(client: Client, record: dict[str, Any], step: int | None, *, evaluation: bool) -> list[Sample]:
    """Return the training or evaluation samples of a step; a job of kind eval has only the latter.

    Args:
        client: of the manager.
        record: the job.
        step: from 0; None: the newest. The evaluation after the last step has the number of steps.
        evaluation: those of the evaluation.

    Raises:
        ClientError: there are none; says which steps have some.

    """
    everything = client.jobs.samples(record["id"])
    if not everything:
        raise ClientError("No samples", f"{record['id']} {_why_none(record)}", _NOT_FOUND)
    is_eval = evaluation or all(sample["is_eval"] for sample in everything)
    of_kind = [sample for sample in everything if sample["is_eval"] is is_eval]
    steps = sorted({sample["step"] for sample in of_kind})
    if step is None and steps:
        step = steps[-1]
    found = [sample for sample in of_kind if sample["step"] == step]
    if not found:
        kind = "evaluation samples" if is_eval else "samples"
        has = (
            f"the newest 2,000 samples have steps {_ranges([one + 1 for one in steps])}"
            if steps
            else "there are only training samples"
        )
        where = "" if step is None else f" of step {step + 1}"
        raise ClientError("No samples", f"{record['id']} has no {kind}{where}: {has}", _NOT_FOUND)
    return found


def _why_none(record: dict[str, Any]) -> str:
    if record.get("kind") == "served":
        job_id = record["id"].rpartition(".")[0]
        return f"is a model that {job_id} asks, and records no samples: 'rlboost samples {job_id}' shows its scores"
    if record["finished_at"]:
        why = "it generated none (kind: sft or dpo), or it ended more than 7 days ago"
        return f"is {record['state']} and has no samples: {why}"
    return (
        f"has no samples yet: it is {record['state']} at step {record['step']} of {record['steps']}; "
        f"'rlboost status {record['id']}' shows what it waits for"
    )


def select(found: Sequence[Sample], number: int, *, best: bool, worst: bool) -> list[Sample]:
    """Return `number` samples: the best or worst ones, those without a reward last; or the first of each group."""
    if best or worst:
        return sorted(found, key=lambda sample: _rank(sample, -1 if best else 1))[:number]
    groups: dict[str, list[Sample]] = {}
    for sample in found:
        groups.setdefault(_group(sample), []).append(sample)
    firsts = [group[0] for group in groups.values()]
    return (firsts + [sample for group in groups.values() for sample in group[1:]])[:number]


def _rank(sample: Sample, sign: int) -> tuple[bool, float]:
    reward = sample["reward"]
    return reward is None, sign * (reward or 0.0)


def _group(sample: Sample) -> str:
    return str(sample["sample"]).rpartition("/")[0]


def lines(sample: Sample, width: int) -> Iterator[str]:
    """Yield a sample as lines of at most `width` columns."""
    reward, reason = sample["reward"], sample.get("reason")
    scored = f"reward {reward:g}" if reward is not None else f"not scored ({reason or 'unknown'})"
    turns = [_turns(sample)] if "turns" in sample else []
    cost = [f"cost {sample['cost']:g}"] if sample.get("cost") else []
    facts = [scored, *cost, *turns, f"{sample['n_tokens']} tokens", f"finish {sample['finish']}"]
    place = f"{sample['set']}, " if sample.get("set") else ""
    place += f"group {_group(sample).rpartition('/')[2]}, sample {str(sample['sample']).rpartition('/')[2]}"
    yield f"--- {place}: {', '.join(facts)}"
    if parts := sample.get("rewards"):
        named = (f"{name} {'-' if value is None else format(value, 'g')}" for name, value in parts.items())
        yield from _labelled("rewards", ", ".join(named), width)
    prompt, completion = str(sample["prompt"]), str(sample["completion"])
    if len(completion) > _COMPLETION_CHARS:
        half = _COMPLETION_CHARS // 2
        n_cut = len(completion) - 2 * half
        completion = f"{completion[:half]}\n[{n_cut:,} characters more; --json has them]\n{completion[-half:]}"
    yield from _labelled("prompt", prompt if len(prompt) <= _PROMPT_CHARS else "..." + prompt[-_PROMPT_CHARS:], width)
    if messages := sample.get("messages"):
        for message in messages:
            yield from _message_lines(message, width)
    else:
        yield from _labelled("completion", completion, width)


def _turns(sample: Sample) -> str:
    """Return how many turns a conversation has, and how long it took, and how much of it outside the model."""
    taken = f" in {sample['duration_s']:.1f} s" if sample.get("duration_s") else ""
    outside = f" ({sample['outside_s']:.1f} s outside the model)" if taken else ""
    return f"{sample['turns']} turns{taken}{outside}"


def _message_lines(message: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield a turn of the model with its tool calls, or the environment's answer."""
    if message["role"] == "assistant":
        if message["content"] or not message["tool_calls"]:
            yield from _labelled("model", message["content"], width)
        for call in message["tool_calls"]:
            yield from _labelled("tool call", call, width)
        return
    reward = f"[reward {message['reward']:g}]" if message["reward"] else ""
    ended = {"done": "[the conversation is over]", "cut": "[cut at a limit]"}.get(message["over"], "")
    if text := " ".join(part for part in (message["content"], reward, ended) if part):
        yield from _labelled("environment", text, width)


def _labelled(label: str, text: str, width: int) -> Iterator[str]:
    start = label.ljust(_LABEL)
    for paragraph in printable(text).split("\n"):
        for line in textwrap.wrap(paragraph, max(20, width - _LABEL), replace_whitespace=False) or [""]:
            yield (start + line).rstrip()
            start = " " * _LABEL


def _ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers as ranges: `0-4, 7`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1][1:] = [step]
        else:
            ranges.append([step])
    return ", ".join("-".join(map(str, one)) for one in ranges)
