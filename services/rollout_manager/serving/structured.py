"""Structured outputs: what an answer must be, as a structural tag of xgrammar, which both engines compile.

Only keywords of JSON Schema that xgrammar enforces are accepted: it ignores others, and an answer would not match.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlboost.shared.model.tool_calls import HERMES, CallStyle

# --- JSON schemas -----------------------------------------------------------------------------------------------------


MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_DEPTH = 32
MAX_COUNT = 1024
"""Limit of `minLength`, `maxItems` and the like: a grammar has a state for each, which takes time to compile."""
MAX_PATTERN_CHARACTERS = 1024
"""Of all patterns of a schema. A worker compiles one grammar after the other, and nothing interrupts it: 2,000 times
`(a|aa|aaa|b*)*` take 14 s with a vocabulary of 20,000."""
MAX_PATTERN_REPEATS = 256
"""Sum of the bounds of `{m,n}` in all patterns of a schema, for the same reason: 8 times `.{0,60}` take over 3 s."""
MAX_QUANTIFIERS = 32
"""Number of `*`, `+`, `?` and `{m,n}` in all patterns of a schema: 512 times `.*` take over 18 s, 32 times 0.1 s."""
MAX_OPTIONAL_PROPERTIES = 256
"""Of one object: a grammar has a rule for each pair of them."""

_TYPES = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Type -> the keywords that constrain it."""
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""A schema has one of these keywords instead of those of a type."""
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "discriminator"),
}
_FORMATS = {
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
}
_QUANTIFIER = re.compile(r"[*+?]|\{\d")
_REPEAT = re.compile(r"\{([\d,]+)\}")
_UNSUPPORTED_PATTERN = re.compile(r"\(\?(?!:)|\\[bB1-9]|[*+?}]\+")
"""Of a pattern: groups other than (?:...), word boundaries, references, possessive repeats."""


def checked_schema(schema: object) -> dict[str, Any]:
    """Return a JSON schema that answers can be held to.

    Raises:
        ValueError: they cannot; the text names the place and what is wrong.

    """
    if not isinstance(schema, dict):
        raise ValueError(f"{reprlib.repr(schema)} should be a JSON schema: an object")  # noqa: TRY004 - pydantic's contract
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"the JSON schema has more than {MAX_SCHEMA_CHARACTERS} characters: shorten it")
    _check(schema, schema, "schema", MAX_DEPTH)
    every = list(_every(schema, schema))
    known = {id(one) for one in every}
    for reference in (one["$ref"] for one in every if "$ref" in one):
        found = _referred(reference, schema)
        if isinstance(found, dict) and id(found) not in known:
            raise ValueError(f"$ref is {reprlib.repr(reference)}: this is no schema of this one: move it into $defs")
    _check_patterns(_patterns(every))
    return schema


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check the parameters of functions whose calls a grammar requires, as `checked_schema` does.

    Raises:
        ValueError: calls cannot be held to them; the text names the function.

    """
    n_characters, patterns = 0, list[str]()
    for function in (tool["function"] for tool in tools):
        try:
            schema = checked_schema(function["parameters"])
        except ValueError as error:
            raise ValueError(f"the parameters of {function['name']!r} cannot be required: {error}") from error
        n_characters += len(json.dumps(schema))
        patterns += _patterns(_every(schema, schema))
    if n_characters > MAX_SCHEMA_CHARACTERS:
        detail = f"the parameters have more than {MAX_SCHEMA_CHARACTERS} characters in all"
        raise ValueError(f"{detail}: give fewer, or name one in tool_choice")
    _check_patterns(patterns)


def _patterns(schemas: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(one["pattern"]) for one in schemas if "pattern" in one]


def _every(schema: Any, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a checked schema and all within it."""
    if isinstance(schema, dict):
        yield schema
        for _, inner in _inner(schema, root, ""):
            yield from _every(inner, root)


def _check_patterns(patterns: Sequence[str]) -> None:
    """Refuse patterns that take too long to compile."""
    if (n := sum(map(len, patterns))) > MAX_PATTERN_CHARACTERS:
        raise ValueError(f"the patterns have {n} characters: at most {MAX_PATTERN_CHARACTERS} are possible")
    if (n := sum(len(_QUANTIFIER.findall(pattern)) for pattern in patterns)) > MAX_QUANTIFIERS:
        raise ValueError(f"the patterns have {n} of *, +, ? and {{m,n}}: at most {MAX_QUANTIFIERS} are possible")
    repeats = ",".join(found for pattern in patterns for found in _REPEAT.findall(pattern))
    if (n := sum(int(bound) for bound in repeats.split(",") if bound)) > MAX_PATTERN_REPEATS:
        raise ValueError(
            f"the repeats {{m,n}} of the patterns add up to {n}: at most {MAX_PATTERN_REPEATS} are possible"
        )


def _check(schema: Any, root: Mapping[str, Any], place: str, depth: int) -> None:
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{place} is {reprlib.repr(schema)}: should be a JSON schema")  # noqa: TRY004 - as above
    if depth == 0:
        raise ValueError(f"{place} is nested more than {MAX_DEPTH} deep: use $ref")
    given = schema.keys() - _ANNOTATIONS
    kinds = _kinds(schema, place)
    alternatives = [key for key in _ALTERNATIVES if key in given]
    if len(alternatives) > 1:
        raise ValueError(f"{place} has {' and '.join(alternatives)}: give one of them")
    allowed = {"type"}.union(*(_TYPES[kind] for kind in kinds)) if not alternatives else {*alternatives}
    if alternatives and alternatives[0] in ("enum", "const"):
        allowed.add("type")
    if unknown := sorted(given - allowed):
        known = any(unknown[0] in keywords for keywords in _TYPES.values())
        advice = f"not supported next to {alternatives[0]}" if alternatives else "only supported with its type"
        raise ValueError(f"{place}: {unknown[0]} is {advice if known else 'not supported'}: remove it")
    for at, inner in _inner(schema, root, place):
        _check(inner, root, at, depth - 1)
    _check_values(schema, kinds, place)


def _kinds(schema: Mapping[str, Any], place: str) -> list[str]:
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ValueError(f"{place}: type is {reprlib.repr(kind)}: should be one of {', '.join(_TYPES)}")
    # As xgrammar infers it.
    return kinds or [kind for kind in ("object", "array") if schema.keys() & _TYPES[kind]]


def _inner(schema: Mapping[str, Any], root: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yield the place of each schema within another, and the schema."""
    for key in ("properties", "$defs", "definitions"):
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{place}: {key} is {reprlib.repr(inner)}: should be an object")  # noqa: TRY004 - as above
        yield from ((f"{place}.{key}.{name}", one) for name, one in inner.items())
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key, [])
        if key in schema and (not isinstance(inner, list) or not inner):
            raise ValueError(f"{place}: {key} is {reprlib.repr(inner)}: should be a list of schemas")
        yield from ((f"{place}.{key}[{i}]", one) for i, one in enumerate(inner))
    for key in ("items", "additionalProperties"):
        if schema.get(key, False) is not False:
            yield f"{place}.{key}", schema[key]
    if len(schema.get("allOf", [])) > 1:
        raise ValueError(f"{place}: allOf with several schemas is not supported: merge them")
    if "oneOf" in schema and "discriminator" not in schema:
        raise ValueError(f"{place}: oneOf is not supported without a discriminator: use anyOf")
    if "$ref" in schema and not isinstance(_referred(schema["$ref"], root), dict | bool):
        raise ValueError(
            f"{place}: $ref is {reprlib.repr(schema['$ref'])}: should name a schema of this one, as '#/$defs/a'"
        )


def _referred(reference: Any, root: Any) -> Any:
    found = root
    for name in reference.split("/")[1:] if isinstance(reference, str) and reference.startswith("#") else [None]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if name and isinstance(found, dict) else None
    return found


def _check_values(schema: Mapping[str, Any], kinds: Sequence[str], place: str) -> None:
    for key in sorted(_COUNTS & schema.keys()):
        if type(schema[key]) is not int or not 0 <= schema[key] <= MAX_COUNT:
            raise ValueError(f"{place}: {key} is {reprlib.repr(schema[key])}: should be from 0 to {MAX_COUNT}")
    for key in sorted(_BOUNDS & schema.keys()):
        if type(schema[key]) not in (int, float):
            raise ValueError(f"{place}: {key} is {reprlib.repr(schema[key])}: should be a number")
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum")):
        if low in schema and high in schema and schema[low] > schema[high]:
            raise ValueError(f"{place}: {low} is above {high}")
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise ValueError(f"{place}: enum is {reprlib.repr(schema['enum'])}: should be a list of values")
    _check_required(schema, place)
    if "string" in kinds:
        _check_text(schema, place)


def _check_required(schema: Mapping[str, Any], place: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{place}: required is {reprlib.repr(required)}: should be a list of names")
    if (n := len(schema.get("properties", {}).keys() - set(required))) > MAX_OPTIONAL_PROPERTIES:
        detail = f"{n} properties are not required: at most {MAX_OPTIONAL_PROPERTIES} are possible"
        raise ValueError(f"{place}: {detail}")


def _check_text(schema: Mapping[str, Any], place: str) -> None:
    form, pattern = schema.get("format"), schema.get("pattern")
    if form is not None and form not in _FORMATS:
        raise ValueError(f"{place}: format is {reprlib.repr(form)}: should be one of {', '.join(sorted(_FORMATS))}")
    if (form is not None) + (pattern is not None) + bool({"minLength", "maxLength"} & schema.keys()) > 1:
        raise ValueError(f"{place}: give one of pattern, format and a length, not several")
    if pattern is not None:
        _check_pattern(pattern, f"{place}: pattern")


def _check_pattern(pattern: Any, place: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{place} is {reprlib.repr(pattern)}: {error}") from error
    if found := _UNSUPPORTED_PATTERN.search(pattern):
        raise ValueError(f"{place} is {reprlib.repr(pattern)}: {found[0]} is not supported")


# --- grammars ---------------------------------------------------------------------------------------------------------


ANY_OBJECT: dict[str, Any] = {"type": "object"}
_MAX_WHITESPACE = 16
"""Between two parts of an answer: without a limit, a small model may write nothing else."""
_ARGUMENTS = re.compile(r'\{\s*"KEY"\s*:\s*"VALUE"\s*\}')


def form_of_response_format(given: object) -> dict[str, Any] | None:
    """Return the form of answers that a `response_format` requires, of xgrammar; None for text.

    Raises:
        ValueError: it is invalid.

    """
    form = given if isinstance(given, dict) else {}
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return json_form(ANY_OBJECT)
        case "json_schema":
            inner = form.get("json_schema")
            if not isinstance(inner, dict) or inner.get("schema") is None:
                raise ValueError("json_schema should be an object with name and schema")
            return json_form(checked_schema(inner["schema"]))
    raise ValueError(f"{reprlib.repr(given)}: the type should be 'text', 'json_object' or 'json_schema'")


def form_of_vllm(given: object) -> dict[str, Any]:
    """Return the form of answers that vLLM's `structured_outputs` requires, of xgrammar.

    Raises:
        ValueError: it is invalid.

    """
    form = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    match form:
        case {"json_object": True, **rest} if not rest:
            return json_form(ANY_OBJECT)
        case {"json": str(text), **rest} if not rest:
            try:
                return json_form(checked_schema(json.loads(text)))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"json is no JSON: {error}") from error
        case {"json": schema, **rest} if not rest:
            return json_form(checked_schema(schema))
        case {"regex": str(pattern), **rest} if not rest and pattern:
            _check_patterns([pattern])  # first, since a long one takes long to check
            _check_pattern(pattern, "regex")
            return {"type": "regex", "pattern": pattern}
        case {"choice": [*texts], **rest} if (
            not rest and texts and all(isinstance(text, str) and text for text in texts)
        ):
            if (n := sum(map(len, texts))) > MAX_SCHEMA_CHARACTERS:
                raise ValueError(f"choice has {n} characters: at most {MAX_SCHEMA_CHARACTERS} are possible")
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    only = "json, a JSON schema, json_object, regex, and choice, a list of texts"
    raise ValueError(f"{reprlib.repr(given)}: give one of {only}; others are not supported")


def has_json_arguments(style: CallStyle) -> bool:
    """Return True if a model writes tool calls in a form that a grammar can require."""
    return not style.problem and style.example.count("NAME") == 1 and len(_ARGUMENTS.findall(style.example)) == 1


def grammar(form: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]], style: CallStyle = HERMES) -> str:
    """Return what an answer must be: of the form, or one call of one of the tools in the model's style."""
    forms: list[Mapping[str, Any]] = [] if form is None else [form]
    begin, end = _ARGUMENTS.split(style.example.strip())
    for function in (tool["function"] for tool in tools):
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        forms.append(
            {
                "type": "tag",
                "begin": begin.replace("NAME", name),
                "content": json_form(function["parameters"]),
                "end": end.replace("NAME", name),
            }
        )
    whole = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    return json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)


def json_form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of JSON of a checked schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}
