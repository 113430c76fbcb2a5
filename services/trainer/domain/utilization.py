"""Model FLOPs utilization of a step (PaLM, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

_PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""Dense bfloat16 on tensor cores, from NVIDIA's data sheets; the first entry that a device's name contains applies."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak floating point operations per second of a device, None if unknown.

    Args:
        device_name: as reported by the driver, such as `NVIDIA H100 80GB HBM3`.
        dtype: dtype of matrix multiplications; only `bfloat16` is known.

    """
    if dtype != "bfloat16":
        return None
    words = device_name.replace("-", " ").split()
    for name, tflops in _PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return tflops * 1e12
    return None


@dataclass(frozen=True, slots=True)
class TrainingHardware:
    """The devices that a model is trained on."""

    n_devices: int = 1
    flops_per_token: float = 0.0
    """Floating-point operations of a forward and backward pass per token; 0 if unknown."""
    peak_flops: float | None = None
    """Peak floating-point operations of one device per second; None if unknown."""

    def metrics(self, n_tokens: float, step_s: float, train_s: float) -> dict[str, float]:
        """Return the metrics of a step that trained on `n_tokens` tokens, prompts included."""
        row: dict[str, float] = {}
        if step_s:
            row["perf/throughput"] = n_tokens / step_s / self.n_devices
        if self.peak_flops and self.flops_per_token and train_s:
            row["perf/mfu"] = n_tokens * self.flops_per_token / (train_s * self.peak_flops * self.n_devices)
        return row


UNKNOWN_HARDWARE = TrainingHardware()
"""One device of unknown kind."""


def flops_per_token(n_parameters: int, *, frozen: bool) -> float:
    """Return 6 operations per parameter: 2 forward, 2 for activation gradients, 2 for weight gradients.

    The last 2 are not needed if the weights are `frozen` below an adapter. Attention is not counted, so the
    result is too low for long sequences.
    """
    return (4.0 if frozen else 6.0) * n_parameters
