"""Model folders: tokenizer, chat template, stop tokens and limits. The only module that imports `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.services.rollout_manager.adapters.chat_template import JinjaChatTemplate
from rlboost.services.rollout_manager.ports import ModelFiles, TokenizationError
from rlboost.shared.model.stop_tokens import merge_eos_ids

if TYPE_CHECKING:
    import tokenizers


class FastTokenizer:
    """`ports.Tokenizer` by the library tokenizers."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Wrap a tokenizer, which must neither truncate nor pad."""
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text


def load_model_files(name: str) -> ModelFiles:
    """Read a model folder; see `ports.LoadModelFiles`."""
    folder = Path(name)
    if not (folder / "tokenizer.json").is_file():
        return ModelFiles(name)
    from tokenizers import Tokenizer  # noqa: PLC0415 - only a manager that serves text needs it

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings, config = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        template = _read_template(folder, settings)
    except Exception as error:  # the library raises a bare Exception
        raise TokenizationError(f"the tokenizer of model {name} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**config, **(config.get("text_config") or {})}
    special_tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    eos_id = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return ModelFiles(
        name=name,
        tokenizer=FastTokenizer(tokenizer),
        chat_template=None if template is None else JinjaChatTemplate(template, special_tokens),
        stop_token_ids=merge_eos_ids(eos_id, config.get("eos_token_id"), generation.get("eos_token_id")),
        max_len=config.get("max_position_embeddings"),
        vocab_size=config.get("vocab_size"),
    )


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default template, from its own file or from the tokenizer's settings, which may hold several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        return next((str(each["template"]) for each in given if each["name"] == "default"), None)
    return None if given is None else str(given)
