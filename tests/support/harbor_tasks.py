"""Small tasks in Harbor's format."""

from __future__ import annotations

from pathlib import Path

TEST = 'if [ "$(cat /answer)" = 4 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


def write_task(
    folder: Path,
    *,
    instruction: str = "Write 4.",
    environment: str = "memory_mb = 256",
    agent: str = "timeout_sec = 30.0",
    verifier: str = "timeout_sec = 30.0",
    test: str = TEST,
    top: str = 'version = "1.0"',
) -> Path:
    """Write a task whose model is to write 4 into `/answer`; return its folder.

    Args:
        folder: a new folder.
        instruction: the prompt.
        environment: lines of this section of task.toml; so for `agent` and `verifier`.
        test: tests/test.sh.
        top: lines before the first section.

    """
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text(instruction)
    (folder / "environment/Dockerfile").write_text("FROM python:3.11-slim\nWORKDIR /app\n")
    (folder / "tests/test.sh").write_text(test + "\n")
    sections = {"environment": environment, "agent": agent, "verifier": verifier, "metadata": 'author_name = "a"'}
    lines = [top, *(f"[{name}]\n{section}" for name, section in sections.items())]
    (folder / "task.toml").write_text("\n".join(lines) + "\n")
    return folder
