"""Fields of OpenAI's and vLLM's requests that the fleet does not support, and those that change no completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlboost.services.rollout_manager.openai.errors import openai_problem
from rlboost.shared.http.problem import Problem

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that are accepted because they do not change the completion."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "top_k": (-1, 0),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Unsupported field -> its values that mean the default behavior and are therefore accepted."""


def supported_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without null, ignored and default fields; unknown fields stay in it.

    Raises:
        Problem: 400, naming the first unsupported field.

    """
    given = {name: value for name, value in raw.items() if value is not None}  # null means the default
    for name, defaults in UNSUPPORTED.items():
        if name in given and given[name] not in defaults:
            raise _unsupported(name, defaults)
    return {name: value for name, value in given.items() if name not in IGNORED and name not in UNSUPPORTED}


def _unsupported(name: str, defaults: tuple[Any, ...]) -> Problem:
    if not defaults:
        return openai_problem(400, "Unsupported parameter", f"{name}: not supported: remove it", param=name)
    accepted = " or ".join(map(json.dumps, defaults))
    detail = f"{name}: not supported, except for the default {accepted}: remove it"
    return openai_problem(400, "Unsupported value", detail, param=name)
