"""What each cloud's documents mean, and when a source that fails is asked again and spoken of."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.domain.preemption import (
    Notice,
    RebalanceRecommendation,
    SourceBackoff,
    aws_notice,
    aws_rebalance_recommendation,
    aws_region,
    aws_token,
    azure_machine,
    azure_notice,
    azure_region,
    file_notice,
    gcp_notice,
    gcp_region,
)
from rlboost.shared.errors import Retryable

NOW_S = 1772353200.0  # 2026-03-01T08:20:00Z


def azure_document(**changes: Any) -> str:
    """Return a document as in Azure's guide."""
    event = {
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["spot_7"],
        "NotBefore": "Sun, 01 Mar 2026 08:20:30 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [event | changes]})


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_document_gives_action_and_lead_time(action: str) -> None:
    body = json.dumps({"action": action, "time": "2026-03-01T08:22:00Z"})
    assert aws_notice(body, NOW_S) == Notice(f"aws: {action}", 120.0)


def test_a_moment_that_has_passed_is_a_lead_of_nothing() -> None:
    assert aws_notice('{"action": "terminate", "time": "2026-03-01T08:19:00Z"}', NOW_S).lead_s == 0.0


@pytest.mark.parametrize("time", ['"soon"', '""', '"2026-03-01T08:22:00"'])
def test_an_unreadable_time_does_not_make_a_notice_less_of_one(time: str) -> None:
    notice = aws_notice(f'{{"action": "terminate", "time": {time}}}', NOW_S)
    assert notice.lead_s == (120.0 if "T" in time else None)


def test_rebalance_recommendation_is_not_a_notice() -> None:
    advice = aws_rebalance_recommendation('{"noticeTime": "2026-03-01T08:22:00Z"}')
    assert advice == RebalanceRecommendation("aws: rebalance recommendation of 2026-03-01T08:22:00Z")


def test_a_token_is_a_token() -> None:
    assert aws_token("AQAEAKx_NB8==\n") == "AQAEAKx_NB8=="


@pytest.mark.parametrize("page", ["<html>", "<!doctype", "{}"])
def test_short_page_of_another_service_is_no_aws_token(page: str) -> None:
    """Or a machine of another cloud, whose metadata service fails, would be taken for one of Amazon."""
    with pytest.raises(Retryable):
        aws_token(page)


@pytest.mark.parametrize(("body", "notice"), [("TRUE", Notice("gcp: preempted")), ("FALSE\n", None)])
def test_google_document_is_true_or_false(body: str, notice: Notice | None) -> None:
    assert gcp_notice(body) == notice


def test_azure_document_gives_lead_time_and_event_id() -> None:
    event_id = "A123BC45-1234-5678-AB90-ABCDEF123456"
    assert azure_notice(azure_document(), "SPOT_7", NOW_S) == Notice("azure: Preempt", 30.0, event_id)


@pytest.mark.parametrize(
    "changes",
    [{"Resources": ["spot_8"]}, {"EventType": "Freeze"}, {"EventType": "Reboot"}, {"Resources": []}],
    ids=["another machine", "a pause", "a reboot", "nobody"],
)
def test_azure_event_that_keeps_this_machine_is_ignored(changes: dict[str, Any]) -> None:
    assert azure_notice(azure_document(**changes), "spot_7", NOW_S) is None


def test_an_azure_event_that_has_started_leaves_no_time() -> None:
    notice = azure_notice(azure_document(EventStatus="Started", NotBefore=""), "spot_7", NOW_S)
    assert notice is not None
    assert notice.lead_s == 0.0


@pytest.mark.parametrize("not_before", ["", None, "tomorrow"])
def test_an_azure_event_without_a_moment_is_a_notice_without_one(not_before: str | None) -> None:
    notice = azure_notice(azure_document(NotBefore=not_before), "spot_7", NOW_S)
    assert notice is not None
    assert notice.lead_s is None


def test_azure_metadata_gives_the_machine_name() -> None:
    assert azure_machine('{"azEnvironment": "AzurePublicCloud", "name": "spot_7", "vmId": "x"}') == "spot_7"


def test_each_cloud_names_the_region() -> None:
    assert aws_region("eu-west-1\n") == "eu-west-1"
    assert gcp_region("projects/12/zones/us-central1-a") == "us-central1"
    assert azure_region('{"azEnvironment": "AzurePublicCloud", "name": "a", "location": "westeurope"}') == "westeurope"


@pytest.mark.parametrize(
    ("content", "lead_s"), [("", None), ("30\n", 30.0), ("0", 0.0), ("-1", None), ("nan", None), ("bye", None)]
)
def test_notice_file_counts_with_any_content(content: str, lead_s: float | None) -> None:
    assert file_notice("/run/spot", content) == Notice("file: /run/spot", lead_s)


readers = st.sampled_from(
    [
        lambda body: aws_notice(body, NOW_S),
        aws_rebalance_recommendation,
        aws_token,
        gcp_notice,
        azure_machine,
        aws_region,
        azure_region,
        gcp_region,
        lambda body: azure_notice(body, "spot_7", NOW_S),
    ]
)
json_texts = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["action", "time", "noticeTime", "Events", "name"]), inner, max_size=3)
    ),
    max_leaves=4,
).map(json.dumps)


@given(reader=readers, body=st.text(max_size=30) | json_texts | st.just("[" * 5000))
def test_any_document_is_parsed_or_retryable(reader: Any, body: str) -> None:
    with contextlib.suppress(Retryable):
        reader(body)


@pytest.mark.parametrize("body", ["<html>sign in to this network</html>", "", "{}"])
def test_unrelated_web_page_is_not_a_notice(body: str) -> None:
    for read in (lambda: aws_notice(body, NOW_S), lambda: gcp_notice(body), lambda: azure_machine(body)):
        with pytest.raises(Retryable, match="not "):
            read()


def test_failing_source_is_polled_less_often_within_seconds() -> None:
    backoff = SourceBackoff()
    waits = []
    for n in range(2000):
        waits.append(backoff.wait_s(1.0))
        backoff.on_failure(float(n))
    assert waits[:4] == [1.0, 2.0, 4.0, 4.0]
    assert waits[-1] == 4.0
    backoff.on_answer()
    assert backoff.wait_s(1.0) == 1.0


def test_failure_and_recovery_are_logged_once() -> None:
    backoff = SourceBackoff()
    assert [backoff.on_failure(float(n)) for n in range(500)].count(True) == 1
    assert [backoff.on_answer() for _ in range(5)] == [True, False, False, False, False]


def test_flapping_source_is_logged_once_a_minute() -> None:
    backoff, said, over = SourceBackoff(), 0, 0
    for n in range(600):
        said += backoff.on_failure(float(n))
        over += backoff.on_answer()
    assert said == over == 10
