"""Limits on the logits of an update: with a large vocabulary they need more memory than everything else."""

from __future__ import annotations

MAX_LOGITS = 1 << 27
"""Logits that exist at a time: 512 MiB in float32. Their gradient has the same size."""
CHUNK_LOGITS = 1 << 26
"""Logits that are converted to float32 at a time: 256 MiB."""
