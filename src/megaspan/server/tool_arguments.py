"""A tool call's arguments as JSON that grows while the model writes them."""

import json
from typing import Any

TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null", int: "integer"}


class ToolArguments:
    """GLM writes each argument as a key and a raw value; this writes them as one JSON object.

    A value is a string where the tool's schema says so, and then it streams. Any other is held to its end,
    and taken as JSON where it is JSON of a type that the schema allows, else as a string. `BEGINNING` and
    what the methods return, joined, is a JSON object once `finish` has been called, and none before.

    schema: the tool's parameters, a JSON schema; {} where nothing is known.
    """

    BEGINNING = "{"

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._names: set[str] = set()
        self._types: set[str] | None = None
        self._value: list[str] | None = None  # the open value's text, as far as it is held
        self._repeated = False

    def open(self, name: str) -> str:
        """Begin the value of an argument. Of one that comes twice, the first stays."""
        closing = self.close()
        self._value, self._repeated = [], name in self._names
        if self._repeated:
            return closing
        self._types = allowed_types(_property(self._schema, name), self._schema)
        comma = ", " if self._names else ""
        self._names.add(name)
        quote = '"' if self._streams else ""
        return f"{closing}{comma}{json.dumps(name, ensure_ascii=False)}: {quote}"

    def push(self, text: str) -> str:
        """More text of the open value; nothing where no value is open."""
        if self._value is None or self._repeated:
            return ""
        if self._streams:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._value.append(text)
        return ""

    def close(self) -> str:
        """End the open value, if there is one."""
        value, self._value = self._value, None
        if value is None or self._repeated:
            return ""
        return '"' if self._streams else typed_value("".join(value), self._types)

    def finish(self) -> str:
        """End the open value and the object."""
        return self.close() + "}"

    @property
    def _streams(self) -> bool:
        return self._types == {"string"}


def typed_value(text: str, types: set[str] | None) -> str:
    """JSON of a raw value: the text itself where it is JSON of an allowed type, else the text as a string.

    Where no type fits, JSON goes through as it is: the tool's own check says more than a guess would.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
        # neither 1e999 nor half a surrogate pair
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        kind = _kind(value)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    allowed = types is None or kind in types or (kind == "integer" and "number" in types)
    if types and "string" in types and (kind == "string" or not allowed):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def allowed_types(
    schema: Any, root: dict[str, Any], references: dict[str, set[str] | None] | None = None
) -> set[str] | None:
    """Names of the JSON types that a schema lets through; None where it says nothing of them.

    references: the answers for the references met so far, so that each is followed once.
    """
    references = {} if references is None else references
    if not isinstance(schema, dict):
        return None
    target = schema.get("$ref")
    if isinstance(target, str):
        if target not in references:
            references[target] = None  # what a circle says of itself
            references[target] = allowed_types(_resolve(target, root), root, references)
        return references[target]
    types = schema.get("type")
    if isinstance(types, str | list):
        return {types} if isinstance(types, str) else set(map(str, types))
    if isinstance(schema.get("enum"), list):
        return set(map(_kind, schema["enum"]))
    if "const" in schema:
        return {_kind(schema["const"])}
    return _combined_types(schema, root, references)


def _combined_types(schema: dict[str, Any], root: dict[str, Any], references: dict) -> set[str] | None:
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            branches = [allowed_types(branch, root, references) for branch in schema[word]]
            known = [branch for branch in branches if branch is not None]
            if word == "allOf":
                return set.intersection(*known) if known else None
            return set().union(*known) if known and len(known) == len(branches) else None
    return None


def _kind(value: Any) -> str:
    """The name that JSON schema has for a value's type."""
    return "number" if isinstance(value, float) else TYPES[type(value)]


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """What a local reference such as `#/$defs/Name` points to; None where it points nowhere."""
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
