"""What pydantic found wrong, in words for people."""

from __future__ import annotations

from pydantic import ValidationError


def describe(error: ValidationError) -> list[str]:
    """Return one line a wrong field: `data.train: Field required`."""
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "job"
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = "unknown key: remove it or mend its spelling"
        elif item["type"] == "literal_error":
            text += "; nothing else is supported"
        lines.append(f"{place}: {text}")
    return lines
