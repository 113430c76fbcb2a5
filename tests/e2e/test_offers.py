"""Three kinds of real workers of different speed and price: the manager moves to the one with the cheapest tokens."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.black_box import ROOT, BlackBox, Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

POOLS = [
    # Its few slots make it slower than planned.
    {"kind": "small", "max_workers": 1, "tokens_per_s": 100_000},
    {"kind": "big-a", "gpu": "big", "place": "zone a", "max_workers": 1, "tokens_per_s": 20_000},
    {"kind": "big-b", "gpu": "big", "place": "zone b", "max_workers": 1, "tokens_per_s": 20_000},
]
SLOTS = {"small": 2, "big-a": 64, "big-b": 64}
ONE_WORKER = "0.62"
"""Dollars per hour that pay for any one of them, and for no two."""

PROVIDER = """
cd {folder}
lives() {{ grep -qs '^State:[[:space:]]*[^Z]' /proc/$(cat $RLBOOST_KIND.pid 2> /dev/null || echo none)/status; }}
if [ $RLBOOST_WORKERS -gt 0 ] && ! lives; then
    . ./$RLBOOST_KIND.env
    cd {root}
    setsid {rlboost} worker join --name $RLBOOST_KIND > {folder}/$RLBOOST_KIND.log 2>&1 &
    echo $! > {folder}/$RLBOOST_KIND.pid
elif [ $RLBOOST_WORKERS -eq 0 ] && lives; then
    kill $(cat $RLBOOST_KIND.pid)
fi
"""


def write_prices(folder: Path, **workers: float) -> None:
    draft = folder / "draft.yaml"
    draft.write_text(json.dumps({"workers": workers}))
    draft.replace(folder / "prices.yaml")


@contextmanager
def system_of_three_kinds(tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[BlackBox]:
    folder = shlex.quote(str(tmp_path))
    rlboost = f"{shlex.quote(sys.executable)} -m rlboost"
    write_prices(tmp_path, **{"small": 0.45, "big-a": 0.5, "big-b": 0.6})
    for name, value in {
        "POOLS": json.dumps(POOLS),
        "PROVIDER": "command",
        "PROVIDER_COMMAND": PROVIDER.format(folder=folder, root=shlex.quote(str(ROOT)), rlboost=rlboost),
        "PRICE_FILE": str(tmp_path / "prices.yaml"),
        "MAX_DOLLARS_PER_HOUR": ONE_WORKER,
        "SCALE_IN_DELAY_S": "5",
    }.items():
        patch.setenv(f"RLBOOST_MANAGER_{name}", value)
    try:
        with black_box(tmp_path / "state", workers=0) as box:
            for kind, slots in SLOTS.items():
                given = {"URL": box.url, "TOKEN": box.token}
                own = {"WORKER_KIND": kind, "WORKER_SLOTS": slots, "WORKER_CACHE_DIR": tmp_path / "cache"}
                lines = [f"export RLBOOST_{name}={shlex.quote(str(value))}" for name, value in (given | own).items()]
                (tmp_path / f"{kind}.env").write_text("\n".join(lines))
            yield box
    finally:
        for file in tmp_path.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def test_manager_moves_to_the_kind_with_the_cheapest_tokens_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small workers turn out to be slower than planned; then the price in zone b falls."""
    spec = small_job(steps=80)
    with system_of_three_kinds(tmp_path, monkeypatch) as box:
        job_id = box.submit(spec)

        def scaling() -> dict[str, Any]:
            found: dict[str, Any] = box.get("/v1/fleet")["autoscaling"]
            return found

        def has(kind: str) -> bool:
            assert box.get(f"/v1/jobs/{job_id}")["state"] not in {"completed", "failed", "cancelled"}
            ready = [one["kind"] for one in box.get("/v1/workers") if one["role"] == "preemptible" and one["running"]]
            return ready == [kind]

        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until(lambda: has("small"), "the kind whose tokens are planned to be the cheapest generates", 300)
            box.until(lambda: has("big-a"), "the next kind replaced the slow one", 300)
            assert "1 x big in zone a" in (reason := scaling()["reason"])
            assert "cheaper per token than small" in reason
            write_prices(tmp_path, **{"small": 0.45, "big-a": 0.5, "big-b": 0.2})
            box.until(lambda: has("big-b"), "the cheaper zone replaced the other one", 300)
            assert scaling()["reason"] == "1 x big in zone b: 60 % cheaper per token than big in zone a"
            box.until_completed(job_id, within_s=800)
            check(box, job_id, observer, spec)
        makers = {worker.rpartition("-")[0] for _, worker in list(observer.flushed)}
        assert makers >= set(SLOTS)
