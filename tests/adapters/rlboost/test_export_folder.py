"""The folder that `rlboost export` makes: what it replaces, and what is told of what cannot be read or written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlboost.export import NewFolder, copy_files, new_folder, write_adapter, write_model
from rlboost.shared.errors import ConfigError

TENSORS = {"weight": torch.zeros(64, 64)}


@contextmanager
def no_file_longer_than(n_bytes: int) -> Iterator[None]:
    """Stand in for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(to: NewFolder, *, adapter: bool, base: Path) -> None:
    if adapter:
        write_adapter('{"r": 2}', TENSORS.items(), to)
    else:
        write_model(base, "{}", TENSORS.items(), to)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.json").write_text("{}")
    return tmp_path / "base"


@pytest.mark.parametrize("adapter", [False, True])
def test_full_disk_is_a_config_error_and_leaves_no_folder(tmp_path: Path, base: Path, adapter: bool) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(ConfigError, match=rf"{out} cannot be written: .*: make room, or name another"),
        new_folder(out, force=False, adapter=adapter) as to,
        no_file_longer_than(1000),
    ):
        write(to, adapter=adapter, base=base)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_file_that_cannot_be_read_is_not_one_that_cannot_be_written(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not hold root back.
    opened = Path.open

    def refuse(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if self.name == "tokenizer.json" and mode == "rb":
            raise PermissionError(13, "Permission denied")
        return opened(self, mode, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    for copy in (copy_files, lambda folder, to: write_model(folder, "{}", [], to)):
        with (
            pytest.raises(ConfigError, match=rf"{base}/tokenizer\.json cannot be read: Permission denied"),
            new_folder(tmp_path / "out", force=False, adapter=False) as to,
        ):
            copy(base, to)
    with (
        pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file"),
        new_folder(tmp_path / "out", force=False, adapter=False) as to,
    ):
        copy_files(tmp_path / "nowhere", to)


def test_other_errors_are_not_reported_as_disk_errors(tmp_path: Path) -> None:
    with (
        pytest.raises(ConnectionResetError),
        new_folder(tmp_path / "out", force=False, adapter=False),
    ):
        raise ConnectionResetError


def test_copy_files_skips_subfolders(tmp_path: Path, base: Path) -> None:
    (base / "original").mkdir()
    with new_folder(tmp_path / "out", force=False, adapter=False) as to:
        copy_files(base, to)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("adapter", [False, True])
def test_with_force_an_adapter_replaces_an_adapter_and_a_model_all_weights(
    tmp_path: Path, base: Path, adapter: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("adapter_config.json", "adapter_model-00001-of-00002.safetensors", "notes.txt"):
        (out / name).write_text("old")
    if not adapter:
        (out / "config.json").write_text("old")
        (out / "model-00001-of-00002.safetensors").write_text("old")
    with new_folder(out, force=True, adapter=adapter) as to:
        write(to, adapter=adapter, base=base)
    names = {path.name for path in out.iterdir()}
    if adapter:
        assert names == {"adapter_config.json", "adapter_model.safetensors", "notes.txt"}
    else:
        assert names == {"config.json", "model.safetensors", "tokenizer.json", "notes.txt"}
        with (
            pytest.raises(ConfigError, match="out has a model, to which transformers would add the adapter: choose"),
            new_folder(out, force=True, adapter=True),
        ):
            pass


@pytest.mark.parametrize("adapter", [False, True])
def test_half_replaced_folder_has_no_config(
    tmp_path: Path, base: Path, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, stem = tmp_path / "out", "adapter_" if adapter else ""
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / f"{stem}{name}").write_text("old")

    def killed(self: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt), new_folder(out, force=True, adapter=adapter) as to:
        write(to, adapter=adapter, base=base)
    assert [path.name for path in out.iterdir()] == [f"{stem}model.safetensors"]
