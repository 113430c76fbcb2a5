"""The Grafana board and the alert rules of `deploy/grafana`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

GRAFANA = Path(__file__).parents[2] / "deploy/grafana"


BOARD: dict[str, Any] = json.loads((GRAFANA / "board.json").read_text(encoding="utf-8"))


ALERTS: dict[str, Any] = yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))
