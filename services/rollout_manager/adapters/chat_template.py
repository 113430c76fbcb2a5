"""Chat templates by jinja2, with the extensions of Hugging Face. The only module that imports `jinja2`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rlboost.services.rollout_manager.ports import TokenizationError


class JinjaChatTemplate:
    """`ports.ChatTemplate` of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Take the template's source, and the special tokens that it may use, such as `bos_token`."""
        self._source = source
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """See `ChatTemplate.render`."""
        try:
            return _render(self._source, messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # a template is a program, which may raise anything
            raise TokenizationError(f"the chat template rejects the messages: {error}") from error


def _render(source: str, **context: Any) -> str:
    from jinja2.exceptions import TemplateError  # noqa: PLC0415 - only a manager that serves chats needs it
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
    return environment.from_string(source).render(**context)
