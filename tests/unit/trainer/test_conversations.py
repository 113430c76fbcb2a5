"""The pure part of conversations: ids of turns, what an answer comes to, and the fold from turns to whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain import plan
from rlboost.services.trainer.domain.advantages import centered
from rlboost.services.trainer.domain.conversations import Conversation, Interval, StepTurnIds, TurnIds, messages_of
from rlboost.services.trainer.domain.groups import (
    DroppedGroup,
    GroupOutcome,
    StepCollector,
    WholeGroup,
)
from rlboost.shared.errors import ConfigError, Fatal, Unprocessable
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import GroupOpened, Message, SampleDropped, SampleFinished, SeedingEnded, TurnAnswered
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.wire import F32, I32, U8, ints, pack
from tests.support.trainer_rig import spec

IDS = TurnIds(n_groups=2, group_size=2, max_turns=3)
CALL = '{"name": "add", "arguments": {"a": "é"}}'
GROUP, OTHER = SampleId(1, False, 4, 0, 0).pack(), SampleId(1, False, 4, 1, 0).pack()


def said(sample: int, number: int, *tokens: int, finish: str = "stop", version: int = 4) -> SampleFinished:
    return SampleFinished(
        sample=IDS.id_of(sample, number),
        tokens=pack(tokens, I32),
        logprobs=pack([-0.5 * token for token in tokens], F32),
        finish="stop" if finish == "stop" else "length",
        spans=[(f"w{number}", version, len(tokens))],
        attempts=number + 1,
        group_done=True,
    )


def told(sample: int, number: int, *tokens: int, reward: float = 0.0, over: str = "") -> TurnAnswered:
    turn = IDS.id_of(sample, number)
    return TurnAnswered(sample=turn, tokens=pack(tokens, I32), reward=reward, over=over)  # type: ignore[arg-type]


def collector(max_staleness: int = 0) -> StepCollector:
    return StepCollector(1, 4, {GROUP: 2, OTHER: 2}, max_staleness, StepTurnIds(IDS, None))


def folded(collecting: StepCollector, *messages: Message) -> list[GroupOutcome]:
    return [outcome for message in messages if (outcome := collecting.apply(message)) is not None]


def alone(sample: int) -> list[Message]:
    """A conversation of one turn."""
    return [said(sample, 0, 5, 2), told(sample, 0, reward=1.0, over="done")]


# --- as messages for people ---


@pytest.mark.parametrize("tags_are_special", [True, False])
def test_messages_of_a_conversation_have_tool_calls_and_answers(tags_are_special: bool) -> None:
    texts = {
        5: "I add.",
        6: "<tool_call>",
        7: CALL,
        8: "</tool_call>",
        9: "<end>",
        10: "\ntool: 3\n",
        11: "3",
    }
    special = {9, 6, 8} if tags_are_special else {9}

    def decode(tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(texts[token] for token in tokens if not (skip_special_tokens and token in special))

    conversation = Conversation(
        GROUP,
        [said(GROUP, 0, 5, 6, 7, 8, 6, 7, 8, 9), said(GROUP, 1, 11, 9)],
        [told(GROUP, 0, 10), told(GROUP, 1, reward=1.0, over="done")],
        generation=[Interval(0.0, 1.5), Interval(2.0, 2.25)],
    )
    assert messages_of(conversation, decode) == [
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [CALL] * 2,
            "spans": [["w0", 4, 8]],
            "time": [0.0, 1.5],
        },
        {"role": "environment", "content": "tool: 3", "reward": 0.0, "over": ""},
        {"role": "assistant", "content": "3", "tool_calls": [], "spans": [["w1", 4, 2]], "time": [2.0, 2.25]},
        {"role": "environment", "content": "", "reward": 1.0, "over": "done"},
    ]


def test_messages_show_the_arguments_that_the_tool_got() -> None:
    said_it = "<tool_call><function=f><parameter=n>2</parameter></function></tool_call>"
    tool = {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}
    conversation = Conversation(GROUP, [said(GROUP, 0, 5)], [told(GROUP, 0, over="done")])

    def decode(tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return said_it if list(tokens) == [5] else ""

    turn, _ = messages_of(conversation, decode, CallStyle("qwen3_coder"), tools=[tool])
    assert turn["tool_calls"] == ['{"name": "f", "arguments": {"n": 2}}']


def test_environment_takes_the_time_between_a_turn_and_its_answer() -> None:
    collecting = collector()
    timed = [
        *((10.0, said(GROUP, 0, 5)), (13.0, told(GROUP, 0, 10)), (14.0, said(GROUP, 1, 6))),
        (14.5, told(GROUP, 1, over="done")),
    ]
    for at, message in timed:
        collecting.apply(message, at)
    (conversation,) = collecting.conversations(GROUP)
    assert conversation.generation == [(10.0, 10.0), (13.0, 14.0)], "when the first was asked for is not in the log"
    assert conversation.lifetime == (10.0, 14.5)
    assert (conversation.model_s, conversation.outside_s) == (1.0, 3.5)


# --- ids --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_turn_ids_are_unique_and_encode_their_sample(
    n: int, size: int, turns: int, replacements: int, is_eval: bool
) -> None:
    ids = TurnIds(n, size, turns, replacements)
    seen = {}
    for group in range(n):
        first_member = SampleId(3, is_eval, 8, group, 0).pack()
        members = [first_member + member for member in range(size)]
        for first in (*members, *(ids.replacement(first_member, index) for index in range(replacements))):
            assert ids.group_of(first) == first_member
            for turn in range(turns):
                packed = ids.id_of(first, turn)
                assert ids.turn_of(packed) == (first, turn)
                assert SampleId.unpack(packed)[:3] == (3, is_eval, 8)
                assert packed in members or packed == group_of(packed)
                seen[packed] = (first, turn)
    assert len(seen) == n * (size + replacements) * turns
    assert {SampleId.unpack(packed).group for packed in seen} == set(range(ids.n_numbers))


def test_more_turns_than_a_step_has_ids_for_are_refused() -> None:
    much = {"data": {"train": "t", "prompts_per_step": 512}, "algorithm": {"group_size": 16}}
    plan.check(spec(**much, environment={"function": "m:f", "max_turns": 8}), ())
    with pytest.raises(ConfigError, match=r"environment\.max_turns: 512 prompts with 16 samples of 9 turns"):
        plan.check(spec(**much, environment={"function": "m:f", "max_turns": 9}), ())
    with pytest.raises(
        ConfigError, match=r"16 samples, and 2 that may begin again, of 8 turns .* environment\.replace"
    ):
        plan.check(spec(**much, environment={"function": "m:f", "max_turns": 8, "replacements": 2}), ())


def test_conversations_begin_again_twice_or_as_often_as_ids_allow() -> None:
    def training(prompts: int, **more: int) -> TurnIds | None:
        data = {"data": {"train": "t", "prompts_per_step": prompts}, "algorithm": {"group_size": 16}}
        return plan.turn_ids(spec(**data, environment={"function": "m:f", "max_turns": 8, **more}), ()).training

    assert [ids and ids.replacements for ids in (training(64), training(512), training(580))] == [2, 1, 0]
    assert training(64, replacements=5) == TurnIds(64, 16, 8, 5)


@pytest.mark.parametrize(("prompts", "given", "starts"), [(4, None, 3), (4, 0, 1), (4, 5, 6), (2048, None, 1)])
def test_session_of_another_policy_has_turns_for_each_time_that_its_agent_begins_again(
    prompts: int, given: int | None, starts: int
) -> None:
    agent = {"function": "m:f", "max_turns": 16, "leader": "solver-1", "replacements": given}
    raw = spec(data={"train": "x.jsonl", "prompts_per_step": prompts}, algorithm={"group_size": 16}).model_dump()
    ids = plan.turn_ids(type(spec()).model_validate({**raw, "reward": None, "agent": agent}), ()).training
    assert ids == TurnIds(prompts, 16, 16 * starts + 5, 0)


# --- answers ----------------------------------------------------------------------------------------------------------


def answer(*turns: SampleFinished, told: list[int], done: bool = False, max_tokens: int = 10) -> TurnAnswered:
    talk = Conversation(GROUP, list(turns))
    return talk.answer(told, 0.5, 0.25, done=done, max_tokens=max_tokens, max_turns=2)


def test_conversation_continues_while_turns_and_length_remain() -> None:
    assert answer(said(GROUP, 0, 5, 2), told=[7, 8]) == told(GROUP, 0, 7, 8, reward=0.5).model_copy(
        update={"cost": 0.25}
    )


def test_environment_ends_the_conversation_even_in_a_truncated_turn() -> None:
    assert answer(said(GROUP, 0, 5, finish="length"), told=[], done=True).over == "done"


@pytest.mark.parametrize(
    ("turns", "told_"),
    [
        ([said(GROUP, 0, 5, 2, finish="length")], [7]),
        ([said(GROUP, 0, 5, 2), said(GROUP, 1, 5, 2)], [7]),
        ([said(GROUP, 0, 5, 2)], [7] * 8),
    ],
    ids=["the turn was cut off", "no turn is left", "the answer leaves no room"],
)
def test_it_is_cut_where_nothing_can_follow(turns: list[SampleFinished], told_: list[int]) -> None:
    found = answer(*turns, told=told_)
    assert (found.over, found.tokens, found.reward) == ("cut", b"", 0.5)


def test_conversation_continues_with_one_token_left() -> None:
    assert answer(said(GROUP, 0, 5, 2), told=[7] * 7).over == ""


def test_a_conversation_is_one_sample_of_the_models_own_tokens() -> None:
    talk = Conversation(GROUP, [said(GROUP, 0, 5, 2), said(GROUP, 1, 6, 9, 2)])
    talk.answers = [told(GROUP, 0, 7, 8, reward=1.0), told(GROUP, 1, reward=0.25, over="done")]
    assert ints(talk.completion) == [5, 2, 7, 8, 6, 9, 2]
    assert ints(talk.loss_mask, U8) == [1, 1, 0, 0, 1, 1, 1]
    assert (talk.reward, talk.n_observation_tokens) == (1.25, 2)
    assert talk.as_sample() == SampleFinished(
        sample=GROUP,
        tokens=pack([5, 2, 6, 9, 2], I32),
        logprobs=pack([-2.5, -1.0, -3.0, -4.5, -1.0], F32),
        finish="stop",
        spans=[("w0", 4, 2), ("w1", 4, 3)],
        attempts=2,
        group_done=False,
    )


def test_as_sample_of_a_cut_last_turn_has_the_finish_length() -> None:
    talk = Conversation(GROUP, [said(GROUP, 0, 5, 2), said(GROUP, 1, 6, finish="length")])
    talk.answers = [told(GROUP, 0, 7), told(GROUP, 1, over="done")]
    assert talk.as_sample().finish == "length"


# --- the fold ---------------------------------------------------------------------------------------------------------


def test_a_group_is_whole_with_the_answer_that_ends_its_last_conversation() -> None:
    collecting = collector()
    turns = [said(GROUP + 1, 0, 5, 2), said(GROUP, 0, 6, 2), told(GROUP, 0, reward=1.0, over="done")]
    assert folded(collecting, *turns, told(GROUP + 1, 0, 9), said(GROUP + 1, 1, 7)) == []
    assert (collecting.n_arrived, collecting.n_samples, collecting.complete) == (1, 4, False)
    (outcome,) = folded(collecting, told(GROUP + 1, 1, reward=2.0, over="cut"))
    assert isinstance(outcome, WholeGroup)
    assert [sample.sample for sample in outcome.samples] == [GROUP, GROUP + 1]
    assert [sample.finish for sample in outcome.samples] == ["stop", "length"]
    assert [ints(talk.completion) for talk in outcome.conversations] == [[6, 2], [5, 2, 9, 7]]
    assert [talk.reward for talk in outcome.conversations] == [1.0, 2.0]
    assert len(folded(collecting, *alone(OTHER), *alone(OTHER + 1))) == 1
    assert collecting.complete
    assert collecting.duplicates == 0


def test_a_turn_is_to_be_answered_once_and_not_where_an_answer_follows() -> None:
    collecting = collector()
    folded(collecting, said(GROUP, 0, 5, 2), said(OTHER, 0, 6, 2), told(OTHER, 0, 9))
    assert [talk.sample for talk in collecting.take_unanswered()] == [GROUP]
    assert collecting.take_unanswered() == []
    folded(collecting, said(OTHER, 1, 6, 2))
    assert [talk.sample for talk in collecting.take_unanswered()] == [OTHER]


def test_of_two_answers_the_first_counts() -> None:
    collecting = collector()
    folded(collecting, said(GROUP, 0, 5, 2), told(GROUP, 0, 9), told(GROUP, 0, 8, 8), said(GROUP, 1, 6, 2))
    (talk,) = collecting.take_unanswered()
    assert ints(talk.completion) == [5, 2, 9, 6, 2]
    folded(collecting, told(GROUP, 0, reward=9.0, over="done"))
    assert talk.reward == 0.0


def test_duplicate_turn_is_counted_without_effect() -> None:
    collecting = collector()
    folded(collecting, said(GROUP, 0, 5, 2), said(GROUP, 0, 5, 2))
    earlier = said(SampleId(1, False, 3, 0, 0).pack(), 1, 5)
    folded(collecting, earlier)
    assert collecting.duplicates == 2
    (talk,) = collecting.take_unanswered()
    assert len(talk.turns) == 1


@pytest.mark.parametrize(
    "turn", [said(GROUP, 1, 5), said(GROUP + 3, 0, 5)], ids=["before its predecessor", "of a member that there is not"]
)
def test_unrequested_turn_is_rejected_without_effect(turn: SampleFinished) -> None:
    collecting = collector()
    with pytest.raises(Unprocessable, match="not requested"):
        collecting.apply(turn)
    assert collecting.take_unanswered() == []


def lost(turn: int, replaced_by: int = 0) -> TurnAnswered:
    return TurnAnswered(sample=turn, reason="environment_crashed", detail="it died", replaced_by=replaced_by)


def forgiving(size: int = 4, replacements: int = 1, least: int = 2) -> StepCollector:
    ids = TurnIds(n_groups=2, group_size=size, max_turns=3, replacements=replacements)
    return StepCollector(1, 4, {GROUP: size}, 0, StepTurnIds(ids, None), least)


def begun_again(message: SampleFinished | TurnAnswered, first: int) -> Message:
    return message.model_copy(update={"sample": first})


def test_lost_conversation_begins_again_and_its_late_messages_have_no_effect() -> None:
    collecting = forgiving()
    again = collecting.reserve_replacement(GROUP + 1)
    assert again is not None
    assert collecting.reserve_replacement(GROUP + 2) is None, "the group has one only"
    folded(collecting, said(GROUP + 1, 0, 5, 2), lost(GROUP + 1, again))
    assert collecting.take_unanswered() == []
    late = [said(GROUP + 1, 0, 5, 2), lost(GROUP + 1, again), told(GROUP + 1, 0, 9)]
    folded(collecting, *late, begun_again(said(GROUP + 1, 0, 7, 2), again))
    (talk,) = collecting.take_unanswered()
    assert (talk.sample, talk.first, ints(talk.completion)) == (GROUP + 1, again, [7, 2])
    others = [message for member in (0, 2, 3) for message in alone(GROUP + member)]
    (whole,) = folded(collecting, begun_again(told(GROUP, 0, over="done"), again), *others)
    assert isinstance(whole, WholeGroup)
    assert [sample.sample for sample in whole.samples] == [GROUP, GROUP + 1, GROUP + 2, GROUP + 3]
    assert whole.completions[1] == pack([7, 2], I32)
    assert (dict(collecting.lost), collecting.n_begun_again) == ({"environment_crashed": 1}, 1)


def test_group_is_complete_without_lost_samples_and_dropped_with_too_few() -> None:
    collecting = forgiving(replacements=0)
    messages = [message for member in (0, 1) for message in alone(GROUP + member)]
    assert folded(collecting, *messages, said(GROUP + 2, 0, 5, 2), said(GROUP + 3, 0, 5, 2), lost(GROUP + 2)) == []
    (whole,) = folded(collecting, lost(GROUP + 3), lost(GROUP + 3))
    assert isinstance(whole, WholeGroup)
    assert [sample.sample for sample in whole.samples] == [GROUP, GROUP + 1]
    assert collecting.complete
    assert collecting.n_arrived == 4

    collecting = forgiving(replacements=0)
    said_all = [said(GROUP + member, 0, 5, 2) for member in range(4)]
    assert folded(collecting, *said_all, lost(GROUP), lost(GROUP + 1)) == []
    assert folded(collecting, lost(GROUP + 2)) == [DroppedGroup(GROUP, "environment_crashed", "it died")]


def test_turn_of_a_replacement_that_did_not_begin_is_rejected() -> None:
    collecting = forgiving()
    first = TurnIds(n_groups=2, group_size=4, max_turns=3, replacements=1).replacement(GROUP, 0)
    with pytest.raises(Unprocessable, match="not requested"):
        collecting.apply(begun_again(said(GROUP, 0, 5, 2), first))


def test_faults_of_one_in_twenty_conversations_waste_few_samples_and_bias_none() -> None:
    random = Random(7)
    size, n_generated = 8, 0
    advantages: dict[float, list[float]] = {0.0: [], 1.0: []}
    for _ in range(400):
        collecting = forgiving(size, replacements=2, least=4)
        waiting = [(GROUP + member, GROUP + member) for member in range(size)]
        outcome: GroupOutcome | None = None
        while waiting:
            sample, first = waiting.pop()
            n_generated += 1
            collecting.apply(begun_again(said(GROUP, 0, 5, 2), first))
            if random.random() < 0.05:  # whatever the model wrote
                again = collecting.reserve_replacement(sample)
                outcome = collecting.apply(lost(first, again or 0))
                waiting += [] if again is None else [(sample, again)]
            else:
                reward = float(random.random() < 0.5)
                outcome = collecting.apply(begun_again(told(GROUP, 0, reward=reward, over="done"), first))
        assert isinstance(outcome, WholeGroup)
        rewards = [conversation.reward for conversation in outcome.conversations]
        for reward, advantage in zip(rewards, centered(rewards), strict=True):
            advantages[reward].append(advantage)
    assert sum(map(len, advantages.values())) >= 0.93 * n_generated
    # Of rewards 0 and 1 at one half each, a sample is above the mean of its group by half of what the others leave it.
    expected = 0.5 * (1 - 1 / size)
    assert fmean(advantages[1.0]) == pytest.approx(expected, rel=0.05)
    assert fmean(advantages[0.0]) == pytest.approx(-expected, rel=0.05)


def test_failed_environment_drops_its_group_without_further_requests() -> None:
    collecting = collector()
    bad = TurnAnswered(sample=GROUP, reason="environment_raised", detail="ValueError: no")
    folded(collecting, said(GROUP, 0, 5, 2), said(GROUP + 1, 0, 5, 2))
    assert folded(collecting, bad) == [DroppedGroup(GROUP, "environment_raised", "ValueError: no")]
    assert collecting.take_unanswered() == []
    assert folded(collecting, told(GROUP + 1, 0, 9), said(GROUP + 1, 1, 5, 2)) == []
    assert collecting.take_unanswered() == []
    folded(collecting, *alone(OTHER), *alone(OTHER + 1))
    assert collecting.complete
    assert collecting.duplicates == 0


def test_a_later_turn_that_cannot_be_generated_drops_its_group() -> None:
    collecting = collector()
    folded(collecting, said(GROUP, 0, 5, 2), told(GROUP, 0, 9))
    lost = SampleDropped(sample=IDS.id_of(GROUP, 1), reason="failed 3 times", group_done=True)
    assert folded(collecting, lost) == [DroppedGroup(GROUP, "generation", "failed 3 times")]


def test_turns_of_other_weights_follow_the_jobs_rule() -> None:
    with pytest.raises(Fatal, match="weight versions"):
        collector().apply(said(GROUP, 0, 5, version=3))
    collecting = collector(max_staleness=1)
    turns = [
        said(GROUP, 0, 5, 2, version=2),
        told(GROUP, 0, 9),
        said(GROUP, 1, 5, version=3),
        told(GROUP, 1, over="cut"),
    ]
    (outcome,) = folded(collecting, *turns, *alone(GROUP + 1))
    assert isinstance(outcome, DroppedGroup)
    assert outcome.reason == "stale"


def test_group_with_another_prompt_digest_is_dropped() -> None:
    collecting = collector()
    collecting.expect(GROUP, b"new")
    collecting.expect(OTHER, b"same")
    opened = [GroupOpened(group=GROUP, prompt_digest=b"old"), GroupOpened(group=OTHER, prompt_digest=b"same")]
    (dropped,) = folded(collecting, *opened, GroupOpened(group=OTHER, prompt_digest=b"later"))
    assert isinstance(dropped, DroppedGroup)
    assert (dropped.group, dropped.reason) == (GROUP, "environment_nondeterministic")


def test_the_end_of_the_seeding_is_still_heard() -> None:
    collecting = collector()
    collecting.apply(SeedingEnded(step=4, window_s=1.0, reason="window"))
    assert collecting.trainer_has_device
