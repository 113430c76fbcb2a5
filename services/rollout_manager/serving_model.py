"""What serving needs of a job's model folder: tokenizer, chat template, end tokens, the longest input. No weights.

The only place that imports `tokenizers` and `jinja2`, and only when a model is asked for the first time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.chat import STAND_IN, behind_answer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Untranslatable(Exception):
    """Text cannot become tokens, or a conversation no text; says why and what to do."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model folder as it was read; all but the name is empty where there is none."""

    name: str
    tokenizer: Tokenizer | None = None
    template: str | None = None
    special: Mapping[str, str] | None = None
    """Texts of the special tokens that a template may use: `bos_token`, `eos_token` and others."""
    stop_token_ids: tuple[int, ...] = ()
    max_len: int | None = None
    """Prompt and completion together."""
    vocabulary: int | None = None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around it where `special`.

        Raises:
            Untranslatable: there is no tokenizer.

        """
        ids: list[int] = self._tokenizer().encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out; empty where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def piece(self, token: int) -> str:
        """Return one token as text by itself, special or not; its id where there is no tokenizer."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's next answer begins.

        Raises:
            Untranslatable: there is no template, or it refuses the messages.

        """
        return self.encode(self._render(messages), special=False)

    def chat_after(self, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]], answer: int) -> list[int]:
        """Return the tokens of a conversation that goes on behind an answer, whose own tokens are left as they are.

        Args:
            tokens: all up to the answer's end, as they were given and made.
            messages: the whole conversation.
            answer: which of them the answer is; the template never sees its text.

        Raises:
            Untranslatable: the template refuses the messages, or does not simply show an answer where it stands.

        """
        stand_in = {"role": "assistant", "content": STAND_IN}
        rendered = self._render([*messages[:answer], stand_in, *messages[answer + 1 :]])
        rest = behind_answer(rendered, self.piece(tokens[-1]) if tokens[-1] in self.stop_token_ids else "")
        if rest is None:
            raise Untranslatable("the chat template does not show each answer once: leave out X-Session-ID")
        return [*tokens, *self.encode(rest, special=False)]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        self._tokenizer()
        if self.template is None:
            raise Untranslatable(
                f"model {self.name} has no chat template: use /v1/completions, or add chat_template.jinja to its folder"
            )
        try:
            return _render(self.template, messages=list(messages), add_generation_prompt=True, **(self.special or {}))
        except Exception as error:  # a template is a program of its own, which raises anything
            raise Untranslatable(f"the chat template refuses the messages: {error}") from error

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise Untranslatable(
                f"the manager finds no tokenizer.json in {self.name}: send the prompt as token ids, or put the model's "
                "folder where the manager can read it"
            )
        return self.tokenizer


def load(name: str) -> ServedModel:
    """Read a model folder; what is not there is left empty.

    Raises:
        Untranslatable: a file is there and cannot be used.

    """
    folder = Path(name)
    if not (folder / "tokenizer.json").is_file():
        return ServedModel(name)
    from tokenizers import Tokenizer  # noqa: PLC0415 - only a manager that serves text needs it

    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings, config = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
        generation = _json(folder / "generation_config.json")
        template = _template(folder, settings)
    except Exception as error:  # the library raises a bare Exception
        raise Untranslatable(f"the tokenizer of model {name} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**config, **(config.get("text_config") or {})}
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    stops = {tokenizer.token_to_id(special["eos_token"])} if "eos_token" in special else set()
    for ids in (config.get("eos_token_id"), generation.get("eos_token_id")):
        stops |= {ids} if isinstance(ids, int) else set(ids or ())
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        template=template,
        special=special,
        stop_token_ids=tuple(sorted(stops - {None})),
        max_len=config.get("max_position_embeddings"),
        vocabulary=config.get("vocab_size"),
    )


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default template: a file of its own, or in the tokenizer's settings by itself or among named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        return next((str(each["template"]) for each in given if each["name"] == "default"), None)
    return None if given is None else str(given)


def _render(template: str, **context: Any) -> str:
    """Render a chat template as Hugging Face writes them."""
    from jinja2.exceptions import TemplateError  # noqa: PLC0415 - likewise
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - likewise

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(template).render(**context)
