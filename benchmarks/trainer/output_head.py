"""Log-probabilities from the last hidden states: with all logits at once, in the trainer's chunks, and by Liger-Kernel.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer.output_head [--tokens 16384] [--vocabulary 32768] [--hidden 256]

One JSON line per contender: processor seconds of forward and backward pass, and the peak of a process's memory beyond
weights, hidden states and their gradients. Liger-Kernel 0.8 is measured if it is installed
(`pip install --no-deps liger-kernel`): by its chunked function of log-probabilities, which is plain torch. Its fused
linear cross-entropy needs Triton, and so a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch.passes import in_chunks, selected_logprobs
from rlboost.shared.job.training import MAX_LOGITS

CONTENDERS = ("full", "ours", "liger")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--only", choices=CONTENDERS, help="measure one, in this process")
    args = parser.parse_args()
    if args.only:
        print(json.dumps({"benchmark": "trainer.output_head", **vars(args), **measured(args)}), flush=True)
        return
    for name in CONTENDERS:
        if name != "liger" or importlib.util.find_spec("liger_kernel") is not None:
            # Of a process of its own: what one has freed may stay in its memory.
            command = [sys.executable, "-m", "benchmarks.trainer.output_head", *sys.argv[1:], "--only", name]
            subprocess.run(command, check=True)


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Return the measurements, and the gradients' norm to compare."""
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(args.vocabulary, args.hidden) * args.hidden**-0.5)
    targets = torch.randint(args.vocabulary, (args.tokens,))
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    began = time.process_time()
    logprobs = _logprobs(args.only, hidden, weight, targets)
    (logprobs * torch.linspace(-1, 1, args.tokens)).sum().backward()
    seconds = time.process_time() - began
    peak = _status("VmHWM") - before
    norm = float(torch.cat([hidden.grad.flatten(), weight.grad.flatten()]).norm())
    return {"cpu_s": round(seconds, 2), "peak_mib": round(peak / 1024), "gradient_norm": round(norm, 3)}


def _logprobs(name: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    if name == "full":
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    if name == "ours":

        def of_hidden(hidden: Tensor, targets: Tensor) -> Tensor:
            return selected_logprobs(hidden @ weight.T, targets, 1.0)

        return in_chunks(of_hidden, hidden, targets, MAX_LOGITS // len(weight))
    losses: Any = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    function = losses._ChunkedSelectiveLogProbFunction  # noqa: SLF001 - only its losses are public
    result: Tensor = function.apply(hidden, weight, targets, None, 1.0, 4096)
    return result


def _status(name: str) -> int:
    """Return a size of this process in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
