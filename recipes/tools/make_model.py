"""Write the recipe's model, with a chat template that has tools: `python make_model.py --out DIR`.

`model/` was made from it with the job warmup.yaml:

    python make_model.py --out untrained
    rlboost up --workers 0 --detach
    rlboost run warmup.yaml --follow
    python make_model.py --rounded .rlboost/runs/JOB/model --out model
"""

from __future__ import annotations

from rlboost.examples.countdown import model
from rlboost.examples.countdown.task import BOS, EOS, PAD, VOCABULARY_SIZE

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
_PIECES = (
    *("<tools>", "</tools>", "<system>", "<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>"),
    *('{"name": "', "multiply", '", "arguments": {"a": ', ', "b": ', "}}"),
    *('", "description": "', "Multiply two numbers.", '", "parameters": {', '"additionalProperties": false, '),
    *('"properties": ', '{"title": "', '", "type": "integer"', "The first number.", "The second number."),
    *('"required": ["', '"type": "object"', '"a": ', '"b": ', '"}, '),
)
"""Texts that are one token each: those of the template, of calls, and of the tool's schema."""
_USED = (PAD, BOS, EOS, "\n", *map(chr, range(ord(" "), ord("~") + 1)), *_PIECES)
VOCABULARY = (*_USED, *(f"<unused{i}>" for i in range(VOCABULARY_SIZE - len(_USED))))
"""The text of each token, by token id: what ASCII can print, and the pieces."""


if __name__ == "__main__":
    model.main(VOCABULARY, CHAT_TEMPLATE)
