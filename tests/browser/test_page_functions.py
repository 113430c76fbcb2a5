"""The page's pure functions, in a real browser, with its files served alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rlboost.job_lines import cost_line, dollars
from rlboost.services.rollout_manager.domain.jobs import Audit
from rlboost.services.rollout_manager.domain.money import cost_report
from rlboost.shared.page import STATIC
from tests.support.synthetic_record import (
    JOB,
    JOB_AT,
    KILLED_AT,
    LEFT_AT,
    MISSED_AT,
    NOTICED_AT,
    SILENT_S,
    gone,
    job_event,
    job_events,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytest.importorskip("playwright.sync_api", reason="run 'make test-browser', which installs it")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
HOST = "http://page.test"


@pytest.fixture
def files(page: Page) -> Page:
    """A page from which modules can be imported."""

    def serve(route: Route) -> None:
        name = route.request.url.removeprefix(f"{HOST}/")
        if name:
            route.fulfill(path=STATIC / name)
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    page.route(f"{HOST}/**", serve)
    page.goto(f"{HOST}/")
    return page


def call(page: Page, module: str, code: str, *arguments: Any) -> Any:
    """Return the value of an expression of a module's exports `m` and of arguments `a`."""
    script = f"async (a) => {{ const m = await import('/{module}'); return {code}; }}"
    return page.evaluate(script, list(arguments))


def events(*more: Any) -> list[dict[str, Any]]:
    return [event.model_dump() for event in sorted([*job_events(), *more], key=lambda event: event.at)]


def test_texts_of_completions_are_never_markup(files: Page) -> None:
    parts = files.evaluate(
        """async () => {
          const { el } = await import("/dom.js");
          const { completionParts } = await import("/facts.js");
          const sample = { completion: "<img src=x onerror=alert(1)>", spans: [["w-1", 0, 3], ["w-2", 0, 5]],
                           span_characters: [4, 24] };
          const pre = el("pre", {}, ...completionParts(sample).map(({ text }) => el("mark", {}, text)));
          return [pre.querySelectorAll("img").length, ...completionParts(sample).map(({ text }) => text)];
        }"""
    )
    assert parts == [0, "<img", " src=x onerror=alert(1)>"]


def test_each_held_out_set_has_a_curve(files: Page) -> None:
    rows = [
        {"step": 0, "eval/math/pass@1": 0.25, "eval/math/reward_mean": 0.5, "eval/aime/pass@1": 0.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "eval/math/pass@1": 0.5, "eval/aime/pass@1": 0.125, "eval/aime/pass@2": 0.25},
    ]
    found = call(files, "facts.js", "m.evaluations(a[0])", rows)
    assert found == [
        {"name": "eval/math/pass@1", "points": [[0, 0.25], [2, 0.5]]},
        {"name": "eval/aime/pass@1", "points": [[0, 0.0], [2, 0.125]]},
    ]
    assert call(files, "facts.js", "m.evaluations(a[0])", rows[1:2]) == [{"name": "eval/pass@1", "points": []}]


def test_preemptions_are_marked_in_their_steps_of_a_curve(files: Page) -> None:
    preempted = [
        {"step": 2, "worker": "w-1", "noticed": False},
        {"step": 2, "worker": "w-2", "noticed": True},
        {"step": 9, "worker": "w-1", "noticed": True},  # the curve does not have the step
    ]
    marks = files.evaluate(
        """async (preempted) => {
          const { lineChart } = await import("/charts.js");
          const box = document.createElement("div");
          lineChart(box, { name: "reward/mean", points: [[1, 0.1], [2, 0.9], [3, 1]] }, "blue", undefined, preempted);
          return [...box.querySelectorAll("svg > text")].filter((one) => one.querySelector("title"))
            .map((one) => [one.firstChild.textContent, one.textContent.slice(1)]);
        }""",
        preempted,
    )
    assert marks == [
        ["✕", "step 2: w-1 preempted without notice"],
        ["▼", "step 2: w-2 preempted with notice"],
    ]


def test_completion_parts_of_a_cut_completion_keep_their_workers(files: Page) -> None:
    sample = {
        "completion": "aaabb\n[4 characters cut]\nbcccc",
        "spans": [["w-1", 0, 3], ["w-2", 0, 7], ["w-3", 0, 4]],
        "span_characters": [3, 7, 4],
    }
    code = "m.completionParts(a[0]).map(({ text, span }) => `${span}:${text.trim()}`)"
    assert call(files, "facts.js", code, sample) == ["0:aaa", "1:bb", "null:[4 characters cut]", "1:b", "2:cccc"]


def test_turns_of_a_conversation_show_tool_calls_and_what_the_environment_rewards(files: Page) -> None:
    call_text = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call_text, "{broken"], "spans": [["w-1", 0, 9]]},
        {"role": "environment", "content": "3", "reward": 0, "over": ""},
        {"role": "assistant", "content": "It is 3.", "tool_calls": [], "spans": [["w-1", 0, 4]]},
        {"role": "environment", "content": "", "reward": 0.5, "over": "done"},
    ]
    code = "m.turns({ messages: a[0] }).map((t) => [t.who, t.text, t.calls, t.note])"
    assert call(files, "facts.js", code, messages) == [
        ["model, turn 1", "", ["calls add(a=1, b=[2])", "malformed call: {broken"], ""],
        ["environment", "3", [], ""],
        ["model, turn 2", "It is 3.", [], ""],
        ["environment", "", [], "reward 0.500, ended the conversation"],
    ]


def test_turns_show_when_they_were_generated(files: Page) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [], "spans": []}
    sample = {
        "turns": 2,
        "duration_s": 8.0,
        "outside_s": 3.0,
        "messages": [turn | {"time": [0, 4]}, turn | {"time": [7, 8]}],
    }
    assert call(files, "facts.js", "m.turns(a[0]).map((t) => [t.note, t.bar])", sample) == [
        ["from 0.0 s for 4.0 s", [0, 0.5]],
        ["from 7.0 s for 1.0 s", [0.875, 1]],
    ]
    text = call(files, "facts.js", "m.turnsText(a[0])", sample)
    assert text == "2 turns in 8.0 s, 3.0 s of it outside the model (tools, sandbox, the code's own)"
    assert call(files, "facts.js", "m.turnsText({ turns: 2 })") == "2 turns"


def test_lives_of_workers_show_notices_kills_and_the_time_until_a_loss_is_detected(files: Page) -> None:
    killed = job_event(KILLED_AT, "worker_killed", worker="worker-2-aaaa")
    spans_of = "([name, life]) => [name, life.spans.map((s) => [s.state, s.from, s.to])]"
    code = f"Object.fromEntries([...m.lives(a[0], a[1])].map({spans_of}))"
    spans = call(files, "history.js", code, events(killed), JOB)
    ms = 1000
    assert spans["worker-2"][-2:] == [
        ["ready", (JOB_AT + 1) * ms, KILLED_AT * ms],
        ["silent", KILLED_AT * ms, MISSED_AT * ms],
    ]
    assert spans["worker-1"][-1] == ["draining", NOTICED_AT * ms, LEFT_AT * ms]
    assert spans["worker-3"][0][0] == "joining"
    assert spans["worker-3"][-1] == ["ready", (JOB_AT + 1) * ms, None]


def test_speeds_are_the_tokens_of_each_step_by_worker(files: Page) -> None:
    made = [
        job_event(10.0, "step_ended", step=0, step_s=4.0, tokens={"worker-3-a": 4800, "worker-1-a": 2000}),
        job_event(12.0, "step_ended", step=1, step_s=2.0, tokens={"worker-1-a": 20, "worker-1-b": 40}),
    ]
    first, second = {"worker-3": 1200, "worker-1": 500}, {"worker-1": 30}
    expected = [[6000, first], [10_000, first], [10_000, second], [12_000, second]]
    assert call(files, "history.js", "m.speeds(a[0])", [event.model_dump() for event in made]) == expected


def test_samples_resumed_bit_by_bit_are_one_migration(files: Page) -> None:
    code = "m.migrations(a[0]).filter((one) => one.cause !== 'suspended').map((one) => [one.from, one.to, one.samples, "
    code += "one.tokens])"
    assert call(files, "history.js", code, events()) == [
        ["worker-2", "worker-1", 30, 1500],
        ["worker-2", "worker-3", 20, 1000],
        ["worker-1", "worker-3", 20, 900],
    ]


def test_samples_that_finished_are_not_looked_for_in_a_later_step(files: Page) -> None:
    made = [
        job_event(1.0, "samples_unassigned", worker="worker-2-a", samples=9, tokens=90, cause="lost"),
        job_event(1.0, "samples_migrated", worker="worker-1-a", samples=5, tokens=50),
        job_event(2.0, "seeding_started", step=3),
        job_event(3.0, "samples_unassigned", worker="worker-1-a", samples=2, tokens=20, cause="left"),
        job_event(3.0, "samples_migrated", worker="worker-3-a", samples=2, tokens=20),
    ]
    code = "m.migrations(a[0]).map((one) => [one.from, one.to, one.samples])"
    found = call(files, "history.js", code, [event.model_dump() for event in made])
    assert found == [["worker-2", "worker-1", 5], ["worker-1", "worker-3", 2]]


def test_preemptions_have_their_step_and_the_time_until_their_samples_resumed(files: Page) -> None:
    begins = [job_event(JOB_AT + 2 + 5 * step - 1, "seeding_started", step=step) for step in range(12)]
    found_in = "m.preemptions(a[0], m.migrations(a[0]), a[1])"
    code = found_in + ".map((p) => [p.worker, p.step, p.noticed, p.samples, p.tokens, p.resumed_s])"
    found = call(files, "history.js", code, events(*begins), JOB)
    assert found == [["worker-2", 3, False, 50, 2500, pytest.approx(SILENT_S + 0.6)], ["worker-1", 7, True, 20, 900, 0]]
    incidents = f"m.stepIncidents(a[0], {found_in}, a[2], a[1])"
    texts = call(files, "history.js", incidents, events(*begins), JOB, 3)
    assert texts == [
        "worker-2 was preempted without notice; 50 samples migrated",
        "the reserved workers began to train with 40 samples unfinished, which other workers completed",
    ]
    assert len(call(files, "history.js", incidents, events(*begins), JOB, 2)) == 1


def test_preemption_cost_counts_the_job_while_its_samples_paused(files: Page) -> None:
    job = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T01:00:00Z"}
    cost = {"dollars": 7.2, "dollars_per_million_tokens": 4.0}
    one = {"resumed_s": 1.5, "samples": 20, "tokens": 5000}
    code = "[m.preemptionCost(a[0], a[1], a[2], 0), m.keptWorth(a[0], a[2])]"
    assert call(files, "facts.js", code, one, job, cost) == [pytest.approx(0.003), pytest.approx(0.02)]
    assert call(files, "facts.js", code, {**one, "resumed_s": None}, job, {"dollars": 0}) == [None, None]
    text = call(files, "facts.js", "m.preemptionCostText([a[0], a[0]], a[1], a[2], 0)", one, job, cost)
    assert text.startswith("Together they cost at most $0.0060: ")
    assert call(files, "facts.js", "m.preemptionCostText([], a[0], a[1], 0)", job, cost) == ""


def test_running_job_tells_its_price_and_what_it_will_cost(files: Page) -> None:
    job = {"started_at": "2026-01-01T00:00:00Z", "finished_at": None, "step": 10, "steps": 50}
    half_an_hour_later = 1_767_225_600_000 + 1_800_000
    code = "m.forecastText(a[0], { dollars: 4 }, a[1])"
    assert call(files, "facts.js", code, job, half_an_hour_later) == (
        "So far the job costs $8.00 per hour in all; all 50 steps will cost about $20.00."
    )
    ended = {**job, "finished_at": "2026-01-01T01:00:00Z"}
    assert call(files, "facts.js", code, ended, half_an_hour_later) == ""


def test_step_tells_how_many_samples_reserved_workers_left_unfinished(files: Page) -> None:
    seen = [
        job_event(1.0, "seeding_started", step=0),
        job_event(2.0, "samples_unassigned", worker="reserved-1-a", samples=19, tokens=90, cause="suspended"),
        job_event(2.0, "samples_unassigned", worker="reserved-2-a", samples=2, tokens=9, cause="suspended"),
        job_event(3.0, "seeding_started", step=1),
    ]
    past = [event.model_dump() for event in seen]
    assert call(files, "history.js", "m.stepIncidents(a[0], [], 1, a[1])", past, JOB) == [
        "the reserved workers began to train with 21 samples unfinished, which other workers completed"
    ]
    assert call(files, "history.js", "m.stepIncidents(a[0], [], 2, a[1])", past, JOB) == []


def test_preemption_text_tells_moves_by_preemptions_from_others(files: Page) -> None:
    audit = {
        "preemptions": {"without_notice": 1},
        "migrations": 70,
        "tokens_saved": 900,
        "tokens_generated": 1000,
        "tokens_regenerated": {},
        "requested": 80,
        "delivered": 80,
        "duplicates": 0,
        "dropped": {},
    }
    text = call(files, "facts.js", "m.preemptionText(a[0], a[1])", audit, [{"samples": 20}])
    assert text.startswith(
        "1 preemption (1 without notice) migrated 20 samples to other workers. Samples migrated 50 times for "
    )
    none = call(files, "facts.js", "m.preemptionText(a[0], [])", {**audit, "preemptions": {}})
    assert none.startswith("No preemption so far. Samples migrated 70 times for other reasons: reserved workers ")


def test_workers_of_another_job_and_dismissed_ones_are_no_preemptions_of_a_job(files: Page) -> None:
    at = JOB_AT
    moved = {"worker": "worker-9-aaaa", "samples": 0}
    seen = [
        job_event(at, "seeding_started", step=0),
        gone(at + 1, "worker_lost", "worker-6", "its lease ran out", "without_notice", "other"),
        gone(at + 1, "worker_lost", "worker-7", "it missed commands", None),
        job_event(at + 1, "worker_notice", worker="worker-8-aaaa", job_id="other", reason="sigterm", lead_s=30.0),
        gone(at + 2, "worker_left", "worker-8", "sigterm", "with_notice", "other"),
        job_event(at + 3, "worker_state", job_id="other", role="preemptible", state="ready", before="joining", **moved),
        job_event(at + 4, "worker_reassigned", job_id=JOB, before="other", **moved),
        job_event(at + 5, "worker_reassigned", job_id="other", before=JOB, **moved),
        gone(at + 6, "worker_lost", "worker-9", "its lease ran out", "without_notice", "other"),
        gone(at + 7, "worker_lost", "worker-5", "its lease ran out", "without_notice", ""),
    ]
    past = [event.model_dump() for event in seen]
    assert call(files, "history.js", "m.preemptions(a[0], [], a[1]).map((p) => p.worker)", past, JOB) == ["worker-5"]
    assert call(files, "history.js", "m.stepIncidents(a[0], [], 1, a[1])", past, JOB) == [
        "worker-7 was lost (it missed commands)",
        "worker-9 came from another job",
        "worker-9 was given to another job",
    ]
    code = "m.lives(a[0], a[1]).get('worker-9').spans.map((span) => span.state)"
    assert call(files, "history.js", code, past, JOB) == ["joining", "other job", "pulling", "other job"]


def step(number: int, wait_s: float, length: float = 100.0) -> dict[str, float]:
    return {
        "step": number - 1,
        "time/step_s": wait_s + 2.0,
        "time/wait_s": wait_s,
        "time/train_s": 2.0,
        "completions/mean_length": length,
    }


def test_step_text_says_why_a_step_took_longer_than_those_before(files: Page) -> None:
    rows = [*(step(n, 2.0) for n in range(1, 6)), step(6, 8.0, length=150.0)]
    text = call(files, "facts.js", "m.stepText(a[0], 6, ['worker-2 joined'])", rows)
    assert text == (
        "Step 6 took 10 s: waiting for samples 8.0 s (80 %), training 2.0 s (20 %). "
        "That is 6.0 s longer than the median of the 5 steps before, mostly waiting for samples (6.0 s longer). "
        "Completions were 50 % longer than in the 5 steps before. "
        "During it worker-2 joined."
    )
    rows[-1] |= {"turns/model_s": 30.0, "turns/outside_s": 12.0}
    text = call(files, "facts.js", "m.stepText(a[0], 6, [])", rows)
    assert "A conversation spent 30 s in the model and 12 s outside it (tools, sandboxes, its own code)" in text
    usual = call(files, "facts.js", "m.stepText(a[0], 5, [])", rows)
    assert usual == "Step 5 took 4.0 s: waiting for samples 2.0 s (50 %), training 2.0 s (50 %)."


PHASE = {"name": "training", "step": 6, "since": "2026-01-01T00:00:00Z", "last_s": 50.0}
WAIT = {"for": "samples", "because": "7 of 8", "since": "2026-01-01T00:00:30Z", "limit_s": 600.0}


def test_activity_text_names_the_phase_and_the_wait(files: Page) -> None:
    jobs = [
        {"phase": PHASE},
        {"phase": {**PHASE, "name": "publishing", "last_s": None}},
        {"phase": PHASE, "waiting": WAIT},
        {"phase": {**PHASE, "name": "paused"}, "waiting": {**WAIT, "limit_s": None}},
        {"finished_at": "2026-01-01T00:00:00Z"},
    ]
    code = "a[0].map((job) => m.activityText(job, Date.parse('2026-01-01T00:00:42Z')))"
    assert call(files, "facts.js", code, jobs) == [
        "Training step 7, for 42 s (the last took 50 s).",
        "Publishing weights, for 42 s.",
        "Training step 7, for 42 s (the last took 50 s). Waiting for samples: 7 of 8 (for 12 s; limit 10 min).",
        "Waiting for samples: 7 of 8 (for 12 s).",
        "",
    ]


COST = {
    "dollars": 10.0,
    "dollars_per_step": 0.5,
    "dollars_regenerated_by_cause": {"late": 0.25, "gap": 0.0},
    "reserved_only": {"seconds": 7100.0, "dollars": 20.0, "break_even_price_per_hour": 3.0},
}
FLEET = {
    "present": 3,
    "target_workers": 4.2,
    "worth_of_one_more": {"job_id": "j", "tokens_per_hour": 5e5, "dollars_per_hour": 2.0, "price_per_hour": 1.5},
}


def test_cheaper_texts_weigh_one_more_worker_and_the_reserved_ones_alone(files: Page) -> None:
    code = "m.cheaperTexts({ id: 'j' }, [{ frac_reward_zero_std: 0.5 }], a[0], a[1])"
    assert call(files, "facts.js", code, FLEET, COST) == [
        (
            "With one more spot worker the job would get about 500,000 more tokens per hour, worth $2.00 per hour at "
            "what tokens cost now. It costs $1.50 per hour: tokens would become cheaper."
        ),
        (
            "The reserved workers alone would have taken about 1.97 h and cost $20.00 so far: with spot workers the "
            "job is 50 % cheaper. They make it cheaper while each costs less than $3.00 per hour."
        ),
        "Tokens regenerated: arrived after the sample had migrated: $0.25.",
        (
            "In the last step 50 % of the groups had equal rewards, from which GRPO learns nothing: prompts that the "
            "model sometimes solves (data.curriculum) use more of what is generated."
        ),
    ]


AMOUNTS = [None, 0.0, 1e-9, 1e-6, 3e-5, 0.000125, 0.0996, 0.125, 0.994, 0.995, 0.996, 1.005, 1.125, 2.675, 1234567.5]


def test_page_shows_the_amounts_that_the_command_line_prints(files: Page) -> None:
    amounts = AMOUNTS + [i / 64 for i in range(1, 1024)]  # ties of rounding, which the languages break differently
    assert call(files, "facts.js", "a[0].map(m.dollars)", amounts) == [dollars(amount) for amount in amounts]


def test_counts_of_millions_have_three_digits(files: Page) -> None:
    counts = [0, 291_568, 1_291_568, 23_456_789_012]
    assert call(files, "facts.js", "a[0].map(m.shortCount)", counts) == ["0", "291,568", "1.29M", "23.5B"]


@pytest.mark.parametrize(
    ("spent", "max_dollars", "only"),
    [
        (0.0, 5.0, None),
        (3.125, 5.0, {"seconds": 7110.0, "dollars": 3.0, "break_even_price_per_hour": None}),
        (3.125, 5.0, {"seconds": 7110.0, "dollars": 3.0, "break_even_price_per_hour": 0.0}),
        (2.1e-5, None, {"seconds": 9.0, "dollars": 2.4e-5, "break_even_price_per_hour": 0.125}),
    ],
)
def test_page_says_what_a_job_cost_as_the_command_line_does(
    files: Page, spent: float, max_dollars: float | None, only: dict[str, float | None] | None
) -> None:
    audit = Audit(tokens_generated=64_000, tokens_saved=1000, delivered=320)
    audit.tokens_regenerated.update({"late": 8, "gap": 3, "of a newer release": 2})
    for role, kind, part in (("preemptible", "h100", 0.5), ("reserved", "own", 0.375), ("trainer", "", 0.125)):
        audit.cost.charge(role, kind, part * spent * 8, 450.0)
    cost = cost_report(audit, steps=3, max_dollars=max_dollars) | {"reserved_only": only}
    code = "[m.costText(a[0]), ...(a[0].dollars ? m.costDetails(a[0]) : [])].join('\\n')"
    shown = call(files, "facts.js", code, cost)
    assert shown == cost_line(cost if spent else cost | {"max_dollars": None})
    assert bool(shown) == bool(spent)


def test_cheaper_texts_name_workers_that_do_not_shorten_the_steps(files: Page) -> None:
    worth = {"job_id": "j", "tokens_per_hour": 0, "dollars_per_hour": 0, "price_per_hour": 1.5}
    fleet = {"present": 5, "target_workers": 2.1, "worth_of_one_more": worth}
    assert call(files, "facts.js", "m.cheaperTexts({ id: 'j' }, [], a[0], null)", fleet) == [
        "One more spot worker would not shorten the steps.",
        "2 of the 5 spot workers do not shorten the steps: without them the job costs less.",
    ]
    assert call(files, "facts.js", "m.cheaperTexts({ id: 'other' }, [], a[0], null)", fleet) == []
