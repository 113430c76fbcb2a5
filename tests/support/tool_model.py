"""A chat template with tools as Qwen has it, and tools."""

from __future__ import annotations

from typing import Any

from rlboost.services.rollout_manager.adapters.text import JinjaChatTemplate
from rlboost.services.rollout_manager.ports import ModelFiles
from tests.support.manager_fakes import CharacterTokenizer

END = "<|im_end|>"
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>tool
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
WITHOUT_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def call_text(arguments: str = '{"a": 3, "b": 4}', name: str = "add") -> str:
    """Return a call as the template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tool_files(template: str = TEMPLATE, special: tuple[str, ...] = ()) -> ModelFiles:
    """Return a model with a token per character, the first of whose special tokens ends a turn."""
    tokenizer = CharacterTokenizer([END, "<|im_start|>", *special])
    return ModelFiles("m", tokenizer, JinjaChatTemplate(template, {}), stop_token_ids=(0,))
