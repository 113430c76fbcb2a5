"""Whoever is told to install an extra finds it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rlboost.commands.system import require_packages
from rlboost.shared.errors import ConfigError

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"(?:(?:rlboost|'\.)\[|pip_install\(['\"])([\w,.-]+)")
"""How a text names extras: rlboost[trainer,logs], '.[trainer,logs]', pip_install("logs")."""
TOPS = ("services", "shared", "rlboost", "examples", "recipes", "benchmarks", "deploy", "docs")


def test_every_extra_that_a_text_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [path for top in TOPS for kind in ("*.py", "*.md") for path in (ROOT / top).rglob(kind)]
    files += [ROOT / "README.md", ROOT / "pyproject.toml"]
    named = {
        (extra, str(file.relative_to(ROOT)))
        for file in files
        for extras in NAMED.findall(file.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert ("data", "rlboost/jobs/model_check.py") in named, "the texts name extras in another way"
    assert {one for one in named if one[0] not in project["optional-dependencies"]} == set()


@pytest.mark.parametrize("module", ["rlboost.shared.no_such_module", "no_such_package.module"])
def test_missing_module_is_named_with_its_extra(module: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install -c constraints.txt -e '\.\[local\]'"):
        require_packages("rlboost.shared", module)
