"""A judge that the same workers serve: each sample gets one verdict, whatever is killed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.black_box import ROOT, BlackBox, Observer, black_box
from tests.support.model_folder import with_chat_template
from tests.support.small_job import check, samples_of, small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LAST_DIGIT = r"\d(?=\D*\Z)|\A(?=\D*\Z)"
"""The last digit of an answer, or nothing if it has none."""


def write_judge(folder: Path) -> Path:
    """Write the judge's model, and return its folder."""
    shutil.copytree(ROOT / "examples/countdown/base", folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return with_chat_template(folder, TEMPLATE)


def judged_job(judge: Path, steps: int, **judged: Any) -> dict[str, Any]:
    """Return a small job with a verdict for each answer; `judged` are further keys of `reward.judge`."""
    section = {
        "model": "judge",
        # The completion comes first, so that the judge's answer follows the problem, as it was trained to.
        "prompt": "{completion}{prompt}",
        "parse": LAST_DIGIT,
        "values": {"": 0, **{str(digit): digit for digit in range(10)}},
        "max_tokens": 16,
        **judged,
    }
    models = {"judge": {"model": str(judge)}}
    return {**small_job(steps), "models": models, "reward": {"judge": section}}


@contextmanager
def judged(
    folder: Path, steps: int, *, reserved: int, workers: int
) -> Iterator[tuple[BlackBox, dict[str, Any], str, list[Observer]]]:
    """Yield a system with its job, and observers of the job and of its judge."""
    with black_box(folder / "state", reserved=reserved, workers=workers) as box, ExitStack() as stack:
        spec = judged_job(write_judge(folder / "state" / "judge"), steps)
        job = box.submit(spec)
        observers = [stack.enter_context(closing(Observer(box.redis_url, one))) for one in (job, f"{job}.judge")]
        yield box, spec, job, observers


def check_judged(box: BlackBox, job: str, observers: list[Observer], spec: dict[str, Any]) -> None:
    """Assert that a completed job got each sample once, and one verdict for each."""
    of_job, of_judge = observers
    check(box, job, of_job, spec)
    of_judge.close()
    audit = box.get(f"/v1/jobs/{job}.judge/audit")
    assert of_judge.check() == audit["requested"] == audit["delivered"] == samples_of(spec)
    assert not audit["dropped"]
    assert audit["in_flight"] == 0
    assert audit["tokens_generated"] == audit["tokens_delivered"] + sum(audit["tokens_regenerated"].values())
    assert box.get(f"/v1/jobs/{job}.judge")["state"] == "completed"


def busy(box: BlackBox, job: str) -> None:
    in_flight = f"/v1/jobs/{job}/audit"
    box.until(lambda: bool(box.get(in_flight)["in_flight"]), f"{job} has samples in flight", every_s=0.01)


@pytest.mark.parametrize(("reserved", "workers"), [(0, 1), (1, 2)])
def test_workers_generate_and_judge_through_kills(tmp_path: Path, reserved: int, workers: int) -> None:
    with judged(tmp_path, 6, reserved=reserved, workers=workers) as (box, spec, job, observers):
        box.until_step(job, 1)
        for role, of in (("preemptible", f"{job}.judge"), ("trainer", f"{job}.judge"), ("manager", job)):
            busy(box, of)
            box.kill(role)
        box.until_completed(job)
        check_judged(box, job, observers, spec)


def test_user_chats_with_another_model_while_the_job_trains_and_its_worker_is_killed(tmp_path: Path) -> None:
    with black_box(tmp_path / "state", reserved=0, workers=1) as box:
        helper = write_judge(tmp_path / "state" / "helper")
        spec = {**small_job(10), "models": {"helper": {"model": str(helper)}}}
        job = box.submit(spec)
        with closing(Observer(box.redis_url, job)) as observer:
            box.until_step(job, 1)
            body = {
                "model": f"{job}.helper",
                "messages": [{"role": "user", "content": "7,7,1>49"}],
                "max_tokens": 256,
                "temperature": 0,
                "ignore_eos": True,
            }

            def chat() -> str:
                answer = httpx.post(
                    f"{box.url}/v1/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {box.token}"},
                    timeout=200,
                )
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["message"]["content"])

            def is_generated() -> bool:
                return bool(box.get(f"/v1/jobs/{job}.helper/audit")["tokens_generated"] > generated)

            generated = 0
            undisturbed = chat()
            with ThreadPoolExecutor(1) as pool:
                generated = box.get(f"/v1/jobs/{job}.helper/audit")["tokens_generated"]
                disturbed = pool.submit(chat)
                box.until(lambda: is_generated() or disturbed.done(), "the answer is generated")
                box.kill("preemptible")
                assert disturbed.result() == undisturbed
            box.until_completed(job)
            check(box, job, observer, spec)
        audit = box.get(f"/v1/jobs/{job}.helper/audit")
        assert audit["serving"]["delivered"] == audit["serving"]["requested"] == 2
        costs = box.get(f"/v1/jobs/{job}/cost")["models"]
        assert [(cost["job_id"], cost["tokens"] >= 512, cost["hours"] > 0) for cost in costs] == [
            (f"{job}.helper", True, True)
        ]


def test_reserved_worker_judges_before_the_trainer_takes_the_device(tmp_path: Path) -> None:
    with judged(tmp_path, 4, reserved=1, workers=0) as (box, spec, job, observers):
        box.until_step(job, 1)
        busy(box, f"{job}.judge")
        box.kill("trainer")
        box.until_completed(job)
        check_judged(box, job, observers, spec)
        costs = {one: box.get(f"/v1/jobs/{one}/cost")["workers"] for one in (job, f"{job}.judge")}
        assert all(time["hours"] > 0 for times in costs.values() for time in times)
        assert {time["role"] for times in costs.values() for time in times} == {"reserved"}
