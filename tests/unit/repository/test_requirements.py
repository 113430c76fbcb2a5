"""The images' pinned packages: complete for their roles, with hashes, and from no particular index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROLES = {
    "manager": ["manager"],
    "trainer": ["megatron", "data", "logs", "math"],
    "weight-store": ["weight-store"],
    "worker": ["worker"],
}
NAME = re.compile(r"[A-Za-z0-9._-]+")
PINNED = re.compile(r"([a-z0-9.-]+)==\S+( ; [^\\]+)? \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def requirements(role: str) -> str:
    text = (ROOT / "deploy/requirements" / f"{role}.txt").read_text(encoding="utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def pinned(role: str) -> set[str]:
    return {found[1] for found in PINNED.finditer(requirements(role))}


def named(extras: list[str]) -> set[str]:
    """Return the packages that the project and these extras depend on directly, by normalized name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: set[str] = set()
    for requirement in [*project["dependencies"], *(r for e in extras for r in project["optional-dependencies"][e])]:
        if own := re.match(r"rlboost\[(\w+)\]", requirement):
            found |= named([own[1]])
        elif name := NAME.match(requirement):
            found.add(re.sub(r"[-_.]+", "-", name[0]).lower())
    return found


@pytest.mark.parametrize("role", ROLES)
def test_every_package_is_pinned_with_a_hash(role: str) -> None:
    assert PINNED.sub("", requirements(role)) == ""


@pytest.mark.parametrize("role", ROLES)
def test_requirements_contain_what_the_roles_extras_name(role: str) -> None:
    """Torch is installed from the index that the image's build chooses."""
    assert named(ROLES[role]) - {"torch"} <= pinned(role)
    assert "torch" not in pinned(role)


@pytest.mark.parametrize("role", ROLES)
def test_image_installs_its_requirements_with_hashes(role: str) -> None:
    stage = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8").partition(f"AS {role}\n")[2]
    stage = stage.partition("\nFROM ")[0]
    assert f"pip install --require-hashes --no-deps -r requirements/{role}.txt" in stage
    assert f'.whl)[{",".join(ROLES[role])}]"' in stage
