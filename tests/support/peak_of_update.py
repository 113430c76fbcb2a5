"""`python -m tests.support.peak_of_update MODEL DTYPE CHECKPOINTING TOKENS...`: prints the peak memory of an update.

In bytes, with a row of each number of tokens, of a process on a CPU, without mapped files and without what it had
before the model was loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import peft  # noqa: F401 - imported by the optimizer's first step otherwise, which would count
from transformers import AutoModelForCausalLM  # noqa: F401 - likewise

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from tests.support.losses import clipped_loss
from tests.support.training_rows import training_row

LOSS = clipped_loss(0.2, 0.28)


def row(n_tokens: int) -> TrainingRow:
    """Return a row whose tokens are all trained but the first."""
    n = n_tokens - 1
    return training_row([1], [2] * n, [-9.0] * n)


def main(model: str, dtype: str, checkpointing: str, *lengths: str) -> None:
    """Measure the second update: moments exist from the first step."""
    before = _status("VmRSS") - _status("RssFile")
    policy = TorchPolicy(PolicySettings(dtype=dtype, activation_checkpointing=checkpointing == "True"), device="cpu")
    policy.load_hf(Path(model))
    policy.accumulate([[row(16)]], LOSS)
    policy.step(1e-5)
    policy.accumulate([[row(16)]], LOSS)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    mapped = _status("RssFile")
    policy.accumulate([[row(int(n)) for n in lengths]], LOSS)
    sys.stdout.write(f"{_status('VmHWM') - mapped - before}\n")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
