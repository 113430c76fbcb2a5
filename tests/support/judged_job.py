"""A Countdown job whose completions a judge scores: the example's own model, which writes numbers after a problem."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.support.black_box import ROOT
from tests.support.model_folder import with_chat_template
from tests.support.small_job import small_job

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
