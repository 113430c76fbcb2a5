from __future__ import annotations

from rlboost.services.trainer.domain.warnings import FaultWarnings


def test_on_group_dropped_warns_of_the_first_fault_of_each_reason() -> None:
    faults = FaultWarnings()
    texts = [
        faults.on_group_dropped(step, reason, "boom") for step, reason in enumerate(["raised", "raised", "timeout"])
    ]
    assert [bool(text) for text in texts] == [True, False, True]
    assert "step 1" in texts[0]
    assert "(raised)" in texts[0]
    assert texts[0].endswith(": boom")


def test_on_group_dropped_ignores_drops_that_user_code_did_not_cause() -> None:
    assert not FaultWarnings().on_group_dropped(0, "stale", "")


def test_on_note_reports_each_first_line_once_and_five_at_most() -> None:
    faults = FaultWarnings()
    assert faults.on_note("a (x.py:1)\nrow 1") == "a (x.py:1)\nrow 1"
    assert faults.on_note("a (x.py:1)\nrow 2") == ""
    assert faults.on_note("") == ""
    assert [bool(faults.on_note(str(n))) for n in range(6)] == [True] * 4 + [False] * 2
