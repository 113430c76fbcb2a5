"""What part of its devices' arithmetic a step has used: model FLOPs utilization (PaLM, arXiv 2204.02311, B)."""

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
"""Dense bfloat16 on tensor cores, from NVIDIA's data sheets; the first that a device's name has in it."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return floating point operations a second that a device can do at most, None where that is not known.

    Args:
        device_name: as the driver tells it, such as `NVIDIA H100 80GB HBM3`.
        dtype: in which matrices are multiplied; only `bfloat16` is known.

    """
    if dtype != "bfloat16":
        return None
    words = device_name.replace("-", " ").split()
    for name, tflops in _PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return tflops * 1e12
    return None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model is trained on."""

    n_devices: int = 1
    flops_per_token: float = 0.0
    """Of one forward and backward pass; 0 where that is not known."""
    peak_flops: float | None = None
    """Of one device, a second."""

    def metrics(self, n_tokens: float, step_s: float, train_s: float) -> dict[str, float]:
        """Return what is said of a step that trained on so many tokens, prompts included."""
        row: dict[str, float] = {}
        if step_s:
            row["perf/throughput"] = n_tokens / step_s / self.n_devices
        if self.peak_flops and self.flops_per_token and train_s:
            row["perf/mfu"] = n_tokens * self.flops_per_token / (train_s * self.peak_flops * self.n_devices)
        return row


UNKNOWN_MACHINE = Machine()
"""One device, of which nothing more is known."""


def flops_per_token(n_parameters: int, *, frozen: bool) -> float:
    """Return 6 operations a parameter: 2 forward, 2 for the gradient of activations, 2 for that of the weights.

    The last 2 are not needed where the weights are `frozen` below an adapter. Attention to earlier tokens comes on top
    and is not counted, so that long sequences use more than is said.
    """
    return (4.0 if frozen else 6.0) * n_parameters
