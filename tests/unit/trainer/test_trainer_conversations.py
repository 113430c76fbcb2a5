"""A whole job with an environment on fakes: no sockets, no torch, no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlboost.services.trainer.domain.conversations import messages_of
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.services.trainer.step import texts
from rlboost.shared.ids import SampleId
from rlboost.shared.job.environment import Message, Step
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import Event, GroupRequested, SampleDropped, SampleFinished, TurnAnswered
from rlboost.shared.streams import names
from rlboost.shared.wire import F32, I32, U8, ints, length
from rlboost.tracing import SampleTraces
from tests.support.conversation_rig import GAME, TURNS, ConversationRig, Echo, done
from tests.support.eventually import eventually
from tests.support.scripted_manager import Answer
from tests.support.trainer_rig import JOB
from tests.support.training_rows import advantage_of


async def first_turns_answered(rig: ConversationRig) -> list[TurnAnswered]:
    """Return the answers to the first turns of all eight samples, once the log has them."""

    async def answers() -> list[TurnAnswered]:
        found = await rig.answers()
        return found if len(found) == 8 else []

    return await eventually(answers)


async def played(rig: ConversationRig) -> ConversationRig:
    rig.manager.script = done
    assert (await rig.run()).state == "completed"
    return rig


async def test_a_conversation_is_one_row_in_which_only_the_models_tokens_are_trained_on(tmp_path: Path) -> None:
    keep = {"group_size": 2, "equal_groups": "keep"}  # chance may give both samples of a prompt the same reward
    rig = await played(ConversationRig(tmp_path, steps=1, algorithm=keep))
    assert len(rig.rows) == 8
    by_prompt = {request.group: request for request in rig.turns}
    for row in rig.rows:
        tokens, trained = ints(row.completion), ints(row.loss_mask, U8)
        said = [token for token, mine in zip(tokens, trained, strict=True) if mine]
        told = [token for token, mine in zip(tokens, trained, strict=True) if not mine]
        assert length(row.sampled, F32) == len(said) == row.n_loss_tokens
        assert told[::2] == [50] * (2 if ints(row.prompt)[1] % 2 else 1)
        # Each later turn was asked for with exactly what stands before it.
        starts = [i for i in range(1, len(trained)) if trained[i] and not trained[i - 1]]
        asked = [ints(request.prompt) for request in by_prompt.values()]
        assert all(ints(row.prompt) + tokens[:start] in asked for start in starts)
    for request in rig.turns:
        behind = length(request.prompt, I32) - 2
        assert request.sampling.max_tokens == 40 - behind
        assert (request.n, request.preferred_worker) == (1, "w-1")
    assert sum(environments.held for environments in rig.environments) == 0
    assert rig.environments[0].closed


async def test_scored_conversations_are_traced_turn_by_turn(tmp_path: Path) -> None:
    rig = await played(ConversationRig(tmp_path, steps=1, algorithm={"group_size": 2}))
    for sample in await rig.samples():
        scored = Event(kind="sample_scored", at=0.0, source="trainer", fields=sample)
        (trace,) = SampleTraces().take(scored, 0.0, JOB)
        turns = [part for part in trace.children if part.name == "turn"]
        assert len(turns) == trace.attributes["rlboost.turns"] == sample["turns"]
        assert sum(int(part.attributes["rlboost.tokens"]) for part in turns) == sample["n_tokens"]
        assert 0 < trace.start == sample["began_at"] <= trace.end


class Priced(Echo):
    """Costs half a dollar for each word that it hears; all rewards are equal."""

    def step(self, text: str) -> Step:
        step = super().step(text)
        return replace(step, reward=0.5, cost=0.5 * len(text.split()))


async def test_costs_lower_advantages_and_are_kept_apart_from_rewards(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path, Priced, steps=1, algorithm={"name": "dr_grpo", "group_size": 2, "cost_coef": 0.1})
    await played(rig)
    (report,) = await rig.steps()
    samples = await rig.samples()
    costs = [sample["cost"] for sample in samples]
    assert report.metrics["cost/mean"] == pytest.approx(sum(costs) / 8)
    assert report.metrics["reward/cost_penalty"] == pytest.approx(0.1 * sum(costs) / 8)
    assert len(set(costs)) > 1
    for sample in samples:  # the rewards are those of the environment
        told = [message for message in sample["messages"] if message["role"] == "environment"]
        assert sample["reward"] == pytest.approx(0.5 * len(told))
        assert sample["cost"] == pytest.approx(sum(message["cost"] for message in told))
    trained = sorted(advantage_of(row) for row in rig.rows)
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample["sample"].rpartition("/")[0], []).append(-0.1 * sample["cost"])
    expected = sorted(value - sum(group) / 2 for group in groups.values() for value in group)
    assert trained == pytest.approx(expected, abs=1e-6)


async def test_costs_without_a_coefficient_are_logged_and_not_trained(tmp_path: Path) -> None:
    rig = await played(ConversationRig(tmp_path, Priced, steps=1, algorithm={"group_size": 2}))
    (report,) = await rig.steps()
    assert report.metrics["cost/mean"] > 0
    assert "reward/cost_penalty" not in report.metrics
    assert rig.rows == [], "groups of equal rewards"


async def test_turn_rewards_and_function_rewards_are_summed(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path, steps=1, reward={"function": "m:f"})
    asked: list[RewardBatch] = []

    def reward(batch: RewardBatch) -> Scores:
        asked.append(batch)
        return Scores((100.0,) * len(batch.completions))

    rig.reward = reward
    await played(rig)
    answers = await rig.answers()
    given = sum(answer.reward for answer in answers)
    (report,) = await rig.steps()
    assert report.metrics["reward/mean"] == pytest.approx(100 + given / 8)
    assert report.metrics["reward/environment/mean"] == pytest.approx(given / 8)
    assert report.metrics["turns/mean"] == len(answers) / 8
    assert (report.metrics["turns/max"], report.metrics["tokens/observation"]) == (3.0, 2.0 * len(rig.turns))
    assert all(" 50 " in text for batch in asked for text in batch.completions if isinstance(text, str))
    shown = await rig.samples()
    assert [sample["reward"] for sample in shown] == [100 + sample["rewards"]["environment"] for sample in shown]
    assert {sample["turns"] for sample in shown} == {2, 3}


async def test_samples_are_read_with_the_tools_of_the_environment_next_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that takes long to read must not cost the trainer its lease."""

    class WithTools(Echo):
        tools: ClassVar = [{"function": {"name": "f"}}]

        def reset(self, row: dict[str, Any], seed: int) -> Message | None:
            super().reset(row, seed)
            return "1 2"

    def messages(*arguments: Any) -> list[dict[str, Any]]:
        assert list(arguments[4]) == WithTools.tools
        assert threading.current_thread() is not threading.main_thread()
        return messages_of(*arguments)

    monkeypatch.setattr(texts, "messages_of", messages)
    rig = await played(ConversationRig(tmp_path, WithTools, steps=1))
    assert len(await rig.samples()) == 8


async def test_conversation_ends_at_the_turn_and_length_limits(tmp_path: Path) -> None:
    class Endless(Echo):
        def step(self, text: str) -> Step:
            return replace(super().step(text), done=False)

    rig = await played(ConversationRig(tmp_path, Endless, steps=1))
    assert [answer.over for answer in await rig.answers() if answer.over] == ["cut"] * 8
    (report,) = await rig.steps()
    assert report.metrics["turns/max"] == TURNS
    assert report.metrics["completions/clipped_ratio"] == 1.0
    assert all(length(row.completion, I32) <= 40 for row in rig.rows)


async def test_conversation_that_a_limit_ended_is_masked(tmp_path: Path) -> None:
    """Those of prompts with an odd number want a third turn."""
    algorithm = {"group_size": 2, "equal_groups": "keep", "mask_truncated": True}
    environment = {"function": "m:game", "max_turns": 2}
    rig = await played(ConversationRig(tmp_path, steps=1, environment=environment, algorithm=algorithm))
    n_cut = [answer.over for answer in await rig.answers()].count("cut")
    (report,) = await rig.steps()
    assert 0 < n_cut < 8
    assert report.metrics["completions/masked_ratio"] == report.metrics["completions/clipped_ratio"] == n_cut / 8
    assert len(rig.rows) == 8 - n_cut
    assert all(ints(row.prompt)[1] % 2 == 0 for row in rig.rows)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_successor_continues_conversations_and_trains_on_the_same_rows(
    tmp_path: Path, max_staleness: int, turn: int
) -> None:
    elastic = {"max_staleness": max_staleness}
    undisturbed = await played(ConversationRig(tmp_path / "a", elastic=elastic))
    first = 0 if turn == 0 else 4 + (turn - 1) * 8

    def is_late(sample: int) -> bool:
        """Return True if a sample is of the turn that nobody sees before the trainer is killed."""
        found = SampleId.unpack(sample)
        return found.step == 2 and found.group >= first and (turn > 0 or found.group == 1)

    rig = ConversationRig(tmp_path / "b", elastic=elastic)
    rig.manager.script = done
    rig.manager.withholds = is_late
    async with rig.trainer(killed=True):
        await rig.command("create")
        await rig.waits_for("samples of step 3")
    await rig.manager.release()
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    assert set(rig.manager.answered.values()) == {1}
    assert {r.group: r.prompt for r in rig.manager.requests} == {
        r.group: r.prompt for r in undisturbed.manager.requests
    }
    assert all(report.metrics["samples/duplicates"] == 0 for report in await rig.steps())
    assert all(report.metrics["groups/dropped"] == 0 for report in await rig.steps())
    assert rig.environments[1].held == 0
    rows = [
        {(row.prompt, row.completion, row.loss_mask, row.advantages) for row in one.rows} for one in (rig, undisturbed)
    ]
    assert rows[0] == rows[1]


async def test_successor_answers_turns_of_a_later_evaluation(tmp_path: Path) -> None:
    data = {"train": "t", "eval": "e", "prompts_per_step": 4}
    rig = ConversationRig(tmp_path, data=data, eval={"every": 3, "samples": 5}, elastic={"max_staleness": 1})
    rig.manager.script = done

    def is_late(sample: int) -> bool:
        found = SampleId.unpack(sample)
        return found.step == 3 and found.is_eval and found.group >= 3

    rig.manager.withholds = is_late
    async with rig.trainer(killed=True):
        await rig.command("create")
        # It goes on from step 2, where the log has turns of step 3's evaluation already.
        await eventually(lambda: sum(is_late(sample) for sample in rig.manager.answered) >= 5)
    await rig.manager.release()
    rig.lease_runs_out()
    report = await rig.resume()
    assert (report.state, report.error) == ("completed", "")
    assert set(rig.manager.answered.values()) == {1}
    rows = {one.step: one.metrics for one in await rig.steps()}
    assert all("eval/reward_mean" in rows[step] for step in (0, 3, 5))


async def test_successor_does_not_repeat_answered_turns(
    tmp_path: Path,
) -> None:
    rig = ConversationRig(tmp_path, steps=1)
    rig.manager.script = done
    rig.manager.withholds = lambda sample: SampleId.unpack(sample).group >= 4
    async with rig.trainer(killed=True):
        await rig.command("create")
        before = await first_turns_answered(rig)
    await rig.manager.release()
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    after = await rig.answers()
    assert after[: len(before)] == before
    assert len({answer.sample for answer in after}) == len(after) == 8 + len(rig.turns)


async def test_nondeterministic_environment_drops_its_group(tmp_path: Path) -> None:
    n_made = 0

    class Moody(Echo):
        def __init__(self) -> None:
            nonlocal n_made
            n_made += 1
            self.mood = n_made

        def step(self, text: str) -> Step:
            step = super().step(text)
            return replace(step, observation=f"{self.mood}") if self.n == 3 else step

    rig = ConversationRig(tmp_path, Moody, steps=1, environment={**GAME["environment"], "replacements": 0})
    rig.manager.script = done
    rig.manager.withholds = lambda sample: SampleId.unpack(sample).group >= 4
    async with rig.trainer(killed=True):
        await rig.command("create")
        await first_turns_answered(rig)
    await rig.manager.release()
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    (report,) = await rig.steps()
    odd = {request.group for request in rig.manager.requests if ints(request.prompt)[1] % 2 and request.n == 2}
    assert 0 < len(odd) < 4
    assert report.metrics["groups/dropped/environment_nondeterministic"] == len(odd)


async def test_failing_environment_drops_its_group_with_the_reason(tmp_path: Path) -> None:
    class Failing(Echo):
        def step(self, text: str) -> Step:
            if self.n == 3 and self.n_turns == 1:
                raise ValueError("no more")
            return super().step(text)

    rig = await played(ConversationRig(tmp_path, Failing, steps=1))
    (report,) = await rig.steps()
    n_dropped = report.metrics["groups/dropped/environment_raised"]
    assert 0 < n_dropped < 4
    assert report.metrics["groups/dropped"] == n_dropped
    dropped = [fields for kind, fields in await rig.events() if kind == "group_dropped"]
    assert {fields["detail"] for fields in dropped} == {"ValueError: no more"}
    assert rig.environments[0].held == 0


class Flaky(Echo):
    """Raises in the second turn of the conversations that the test names by their number of creation."""

    n_made = 0
    fails: Callable[[int], bool]

    def __init__(self) -> None:
        type(self).n_made += 1
        self.number = self.n_made

    def step(self, text: str) -> Step:
        if self.n_turns == 1 and type(self).fails(self.number):
            raise OSError("the sandbox is gone")
        return super().step(text)


def flaky(fails: Callable[[int], bool]) -> type[Flaky]:
    return type("FlakyHere", (Flaky,), {"fails": staticmethod(fails)})


async def test_conversation_that_a_fault_ends_begins_again_alone(tmp_path: Path) -> None:
    rig = await played(ConversationRig(tmp_path, flaky(lambda number: number == 6), steps=1))
    (report,) = await rig.steps()
    assert report.metrics["groups/dropped"] == 0
    assert report.metrics["conversations/lost/environment_raised"] == report.metrics["conversations/begun_again"] == 1
    assert report.metrics["conversations/lost_ratio"] == 1 / 9
    (lost,) = [fields for kind, fields in await rig.events() if kind == "conversation_lost"]
    assert (lost["detail"], lost["turn"], lost["begins_again"]) == ("OSError: the sandbox is gone", 2, True)
    (warning,) = [fields["text"] for kind, fields in await rig.events() if kind == "warning"]
    assert warning.startswith("a conversation of step 1 was lost (environment_raised)")
    (fault,) = [answer for answer in await rig.answers() if answer.reason]
    (again,) = [request for request in rig.manager.requests if request.group == fault.replaced_by]
    (group,) = [one for one in rig.manager.requests if str(SampleId.unpack(one.group)) == lost["sample"][:-1] + "0"]
    assert (again.prompt, again.n, again.sampling) == (group.prompt, 1, group.sampling)
    samples = await rig.samples()
    assert len({sample["sample"] for sample in samples}) == len(samples) == 8, "each sample once"
    assert rig.environments[0].held == 0


async def test_group_trains_on_the_samples_that_are_left(tmp_path: Path) -> None:
    game = {**GAME["environment"], "replacements": 0, "min_group_size": 3}
    changes: dict[str, Any] = {"data": {"train": "x", "prompts_per_step": 2}, "algorithm": {"group_size": 4}}
    rig = await played(
        ConversationRig(tmp_path, flaky(lambda number: number == 3), steps=1, environment=game, **changes)
    )
    (report,) = await rig.steps()
    assert (report.metrics["conversations/lost"], report.metrics["conversations/begun_again"]) == (1, 0)
    assert report.metrics["groups/dropped"] == 0
    assert len(await rig.samples()) == len(rig.rows) == 7


async def test_successor_of_a_killed_trainer_continues_what_began_again(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path, flaky(lambda number: number % 5 == 0), steps=1)
    rig.manager.script = done
    n_turns = 0

    def withholds(sample: int) -> bool:
        nonlocal n_turns
        n_turns += 1
        return n_turns > 12

    rig.manager.withholds = withholds
    async with rig.trainer(killed=True):
        await rig.command("create")

        async def is_lost() -> bool:
            return any(answer.reason for answer in await rig.answers())

        await eventually(is_lost)
    before = await rig.answers()
    await rig.manager.release()
    rig.lease_runs_out()
    assert (await rig.resume()).state == "completed"
    after = await rig.answers()
    assert after[: len(before)] == before
    assert len({answer.sample for answer in after}) == len(after), "a turn was answered twice"
    (report,) = await rig.steps()
    assert report.metrics["conversations/lost"] == sum(bool(answer.reason) for answer in after)
    assert len({sample["sample"] for sample in await rig.samples()}) == 8
    assert max(rig.manager.answered.values()) == 1


async def test_failure_in_a_dropped_group_is_not_answered(tmp_path: Path) -> None:
    n_failed = 0

    class Failing(Echo):
        async def step(self, text: str) -> Step:  # type: ignore[override]
            nonlocal n_failed
            if self.n == 2:
                return super().step(text)
            n_failed += 1
            if n_failed > 1:
                await eventually(is_dropped)
            raise ValueError("no more")

    async def is_dropped() -> bool:
        return any(kind == "group_dropped" for kind, _ in await rig.events())

    rig = ConversationRig(tmp_path, Failing, steps=1, environment={**GAME["environment"], "replacements": 0})
    await played(rig)
    failed = [SampleId.unpack(answer.sample).group for answer in await rig.answers() if answer.reason]
    assert failed.count(failed[0]) == 1


async def test_an_answer_that_the_model_cannot_read_drops_the_group(tmp_path: Path) -> None:
    class Verbose(Echo):
        def step(self, text: str) -> Step:
            return replace(super().step(text), observation="words" if self.n == 3 else "5")

    rig = await played(ConversationRig(tmp_path, Verbose, steps=1))
    (report,) = await rig.steps()
    assert report.metrics["groups/dropped/environment_unformattable"] > 0


async def test_a_group_that_cannot_begin_is_dropped_and_a_step_without_any_is_an_error(tmp_path: Path) -> None:
    class Picky(Echo):
        def reset(self, row: dict[str, Any], seed: int) -> Message | None:
            super().reset(row, seed)
            if self.n == 3:
                raise ValueError("not this row")
            return f"1 {row['row']} {seed % 7 + 10}"

    rig = await played(ConversationRig(tmp_path / "some", Picky, steps=1))
    (report,) = await rig.steps()
    assert 0 < report.metrics["groups/dropped/environment_raised"] < 4
    assert all(len(ints(row.prompt)) == 3 for row in rig.rows)

    class Closed(Echo):
        def reset(self, row: dict[str, Any], seed: int) -> Message | None:
            raise ValueError("we are closed")

    rig = ConversationRig(tmp_path / "none", Closed, steps=1)
    ended = await rig.run()
    assert ended.state == "failed"
    assert "no conversation of step 1 could start" in ended.error
    assert "we are closed" in ended.error
    assert "environment.function m:game" in ended.error


async def test_groups_are_requested_while_other_environments_reset(tmp_path: Path) -> None:
    n_begun = 0
    waited_for: set[str] = set()

    class Slow(Echo):
        async def reset(self, row: dict[str, Any], seed: int) -> Message | None:  # type: ignore[override]
            nonlocal n_begun
            n_begun += 1
            waited_for.update(wait.subject for wait in rig.waits.current())
            if n_begun == 65:
                await eventually(lambda: rig.manager.requests)
            return super().reset(row, seed)

    data = {"train": "t", "prompts_per_step": 70}
    rig = ConversationRig(tmp_path, Slow, steps=1, data=data)
    await played(rig)
    (report,) = await rig.steps()
    assert report.metrics["groups/dropped"] == 0
    assert "the environment" in waited_for


async def test_a_curriculum_is_recorded_before_its_groups_begin(tmp_path: Path) -> None:
    class Closed(Echo):
        def reset(self, row: dict[str, Any], seed: int) -> Message | None:
            raise ValueError("we are closed")

    data = {"train": "t", "prompts_per_step": 4, "curriculum": {"skip_solved_above": 1.0}}
    rig = ConversationRig(tmp_path, Closed, steps=1, data=data)
    assert (await rig.run()).state == "failed"
    assert set(await rig.bus.hash_all(names.job_curriculum(JOB))) == {"0"}


async def test_a_turn_without_a_token_ends_its_conversation(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path, steps=1)

    def script(request: GroupRequested, sample: int) -> Answer:
        answer = done(request, sample)
        if request.n == 1 or not isinstance(answer, SampleFinished):
            return answer
        return answer.model_copy(update={"tokens": b"", "logprobs": b"", "spans": []})

    rig.manager.script = script
    report = await rig.run()
    assert (report.state, report.error) == ("completed", "")
    assert [answer.over for answer in await rig.answers()] == ["cut"] * 8
    assert not rig.rows


async def test_a_turn_that_cannot_be_generated_drops_its_group(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path, steps=1)

    def script(request: GroupRequested, sample: int) -> Answer:
        if request.n == 1 and not rig.turns:
            return SampleDropped(sample=sample, reason="failed 3 times", group_done=True)
        return done(request, sample)

    rig.manager.script = script
    assert (await rig.run()).state == "completed"
    (report,) = await rig.steps()
    assert report.metrics["groups/dropped/generation"] >= 1


async def test_evaluation_has_conversations_too(tmp_path: Path) -> None:
    data = {"train": "t", "eval": "e", "prompts_per_step": 4}
    rig = await played(ConversationRig(tmp_path, steps=1, data=data, eval={"every": 1, "samples": 5}))
    rows = {report.step: report.metrics for report in await rig.steps()}
    assert all("eval/reward_mean" in rows[step] for step in (0, 1))
    turns = [SampleId.unpack(request.group) for request in rig.manager.requests]
    assert {found.group for found in turns if found.is_eval and found.step == 0} > {0, 1, 2}
    trained = {
        SampleId.unpack(request.group).is_eval: request.sampling.whole_logprobs for request in rig.manager.requests
    }
    assert trained == {False: True, True: False}, "only what is trained on needs them"


async def test_a_job_that_only_evaluates_has_conversations(tmp_path: Path) -> None:
    rig = ConversationRig(tmp_path)
    environment, sampling = GAME["environment"], GAME["sampling"]
    raw = {"kind": "eval", "model": "m", "data": {"eval": "e"}, "environment": environment, "sampling": sampling}
    rig.job = parse({**raw, "eval": {"samples": 5}})
    await played(rig)
    (report,) = await rig.steps()
    assert report.metrics["eval/reward_mean"] > 0
    assert {SampleId.unpack(request.group).is_eval for request in rig.manager.requests} == {True}
    assert any(SampleId.unpack(request.group).group >= 3 for request in rig.manager.requests)
