"""The data in a report page."""

from __future__ import annotations

import json
import re
from typing import Any

DATA = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)


def data_of(html: str) -> Any:
    (text,) = DATA.findall(html)
    return json.loads(text)
