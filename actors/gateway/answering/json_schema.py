"""The JSON schemas that answers can be held to: a plain subset of the language, rewritten with nothing left to guess. Pure.

Guarantees: whatever matches the rewritten schema matches the one that was sent; a keyword that would not be kept is
refused, naming its place; what compiles slowly (long schemas, bounds of strings, many ranges, long values, many
optional properties where others are allowed too) is refused before that.
"""

import json
from collections.abc import Mapping
from typing import Any

from actors.gateway.errors import bad

Schema = dict[str, Any]

ANYTHING: Schema = {}
ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}
FIELD = "response_format.json_schema.schema"
MAX_BYTES = 16_384
MAX_DEPTH = 32
MAX_PARTS = 256  # schemas within the schema
MAX_NARROW = 16  # ranges and formats: each compiles for as long as dozens of other parts
MAX_ITEMS = 1000
MAX_OPEN = 32  # objects that may have more than is named, and what of these is optional: nothing compiles more slowly
MAX_ENUM_BYTES = 4096  # of all values of enum and const
PART = "x-part"  # its number in the schema
SAYING_NOTHING = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
FORMATS = ("date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6")
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("format",),
    "integer": RANGE,
    "number": RANGE,
    "boolean": (),
    "null": (),
}
OF_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def rewritten(schema: Any) -> str:
    """The schema as text, for an engine. Raises ApiError."""
    try:
        size = len(json.dumps(schema))
    except RecursionError:
        size = MAX_BYTES + 1
    if size > MAX_BYTES:
        raise _wrong(FIELD, f"got {size} bytes, expected at most {MAX_BYTES}")
    reading = _Reading(schema)
    found = reading.schema(schema, FIELD, 0)
    if reading.definitions:
        found["$defs"] = reading.definitions
    return json.dumps(found, ensure_ascii=False)


class _Reading:
    """One schema while it is read: what it defines, and how much of it there is."""

    def __init__(self, root: Any) -> None:
        self._root = root if isinstance(root, dict) else {}
        self._parts = 0
        self._narrow = 0
        self._open = 0
        self._enum_bytes = 0
        self.definitions: Schema = {}
        self._names: dict[str, str] = {}

    def schema(self, given: Any, where: str, depth: int) -> Schema:
        """A schema rewritten. where: its place, for messages."""
        self._parts += 1
        if self._parts > MAX_PARTS or depth > MAX_DEPTH:
            raise _wrong(where, f"expected at most {MAX_PARTS} schemas within the schema, and {MAX_DEPTH} levels")
        if given is True:
            return dict(ANYTHING)
        if not isinstance(given, dict):
            raise _wrong(where, f"got {_shown(given)}, expected a JSON schema: an object")
        own = {name: value for name, value in given.items() if name not in SAYING_NOTHING}
        if depth == 0:
            own = {name: value for name, value in own.items() if name not in ("$defs", "definitions")}
        for name in ("$ref", "anyOf", "const", "enum"):
            if name in own:
                return self._special(name, own, where, depth)
        if not own:
            return dict(ANYTHING)
        kinds = own.pop("type", None)
        if kinds is None:
            _refuse(own, {name for names in KEYWORDS.values() for name in names}, where)
        if isinstance(kinds, list) and kinds:
            return {"anyOf": [self._typed(kind, own, where, depth, of=kinds) for kind in kinds]}
        return self._typed(kinds, own, where, depth, of=[kinds])

    def _special(self, name: str, own: Schema, where: str, depth: int) -> Schema:
        value, place = own[name], f"{where}.{name}"
        _refuse(own, {name, "type"} if name in ("const", "enum") else {name}, where)
        if name == "$ref":
            return self._reference(value, place, depth)
        if name == "const":
            return {"enum": [self._value(value, own.get("type"), place)]}
        if not isinstance(value, list) or not value:
            raise _wrong(place, f"got {_shown(value)}, expected a list with something in it")
        if name == "enum":
            return {"enum": [self._value(one, own.get("type"), f"{place}[{at}]") for at, one in enumerate(value)]}
        return {"anyOf": [self.schema(one, f"{place}[{at}]", depth + 1) for at, one in enumerate(value)]}

    def _value(self, value: Any, kind: Any, place: str) -> Any:
        """A value of enum or const."""
        fitting = _fitting(value, kind, place)
        self._enum_bytes += len(str(value).encode("utf-8", "replace"))
        if self._enum_bytes > MAX_ENUM_BYTES:
            raise _wrong(place, f"expected at most {MAX_ENUM_BYTES} bytes in all values of enum and const")
        return fitting

    def _reference(self, value: Any, place: str, depth: int) -> Schema:
        """A reference to a definition, which is read where it is first named."""
        _, _, rest = value.partition("#/") if isinstance(value, str) else ("", "", "")
        folder, _, name = rest.partition("/")
        defined = self._root.get(folder) if folder in ("$defs", "definitions") else None
        if not isinstance(defined, dict) or name not in defined:
            raise _wrong(place, f"got {_shown(value)}, expected the name of a definition, such as '#/$defs/Name'")
        if rest not in self._names:
            self._names[rest] = f"d{len(self._names)}"
            target = f"{FIELD}.{folder}.{name[:64]}"
            if isinstance(defined[name], dict) and not {"$ref", "anyOf"}.isdisjoint(defined[name]):
                raise _wrong(target, "expected a definition with a type, not of other definitions")  # may never end
            self.definitions[self._names[rest]] = self.schema(defined[name], target, depth + 1)
        return {"$ref": f"#/$defs/{self._names[rest]}"}

    def _typed(self, kind: Any, own: Schema, where: str, depth: int, *, of: list[Any]) -> Schema:
        """One type's own keywords; those of the other types in `of` say nothing about it."""
        for one in of:
            if not isinstance(one, str) or one not in KEYWORDS:
                raise _wrong(f"{where}.type", f"got {_shown(one)}, expected one of {', '.join(KEYWORDS)}")
        _refuse(own, {name for one in of for name in KEYWORDS[one]}, where)
        mine = {name: own[name] for name in KEYWORDS[kind] if name in own}
        if kind == "object":
            return self._object(mine, where, depth)
        if kind == "array":
            return self._array(mine, where, depth)
        for name, value in mine.items():
            self._narrow += 1
            if self._narrow > MAX_NARROW:
                raise _wrong(f"{where}.{name}", f"expected at most {MAX_NARROW} ranges and formats in a schema")
            if name == "format" and value not in FORMATS:
                raise _wrong(f"{where}.format", f"got {_shown(value)}, expected one of {', '.join(FORMATS)}")
            if name != "format" and not (_is_number(value) and (kind == "number" or isinstance(value, int))):
                raise _wrong(f"{where}.{name}", f"got {_shown(value)}, expected one of type {kind}, below 2**53")
        return {"type": kind, **mine}

    def _object(self, own: Schema, where: str, depth: int) -> Schema:
        given, required, part = own.get("properties", {}), own.get("required", []), self._parts
        if not isinstance(given, dict):
            raise _wrong(f"{where}.properties", f"got {_shown(given)}, expected an object")
        if not isinstance(required, list) or any(not isinstance(name, str) or name not in given for name in required):
            raise _wrong(f"{where}.required", f"got {_shown(required)}, expected names that are in properties")
        properties = {
            name: self.schema(one, f"{where}.properties.{name[:64]}", depth + 1) for name, one in given.items()
        }
        # Others than those named are allowed only where the schema asks for them: an answer without them fits too.
        more = own.get("additionalProperties", not given)
        if isinstance(more, dict):
            more = self.schema(more, f"{where}.additionalProperties", depth + 1)
        elif not isinstance(more, bool):
            raise _wrong(f"{where}.additionalProperties", f"got {_shown(more)}, expected true, false or a schema")
        if more is not False:
            self._open += 1 + len(given.keys() - set(required))
            if self._open > MAX_OPEN:
                expected = f"expected at most {MAX_OPEN} such objects and optional properties of theirs; say required, or false"
                raise _wrong(f"{where}.additionalProperties", expected)
        found = {"type": "object", "properties": properties, "required": required, "additionalProperties": more}
        # xgrammar takes objects for one that differ in properties of these names alone: a further keyword tells them apart.
        return found | ({} if SAYING_NOTHING.isdisjoint(given) else {PART: part})

    def _array(self, own: Schema, where: str, depth: int) -> Schema:
        low, high = own.get("minItems", 0), own.get("maxItems", MAX_ITEMS)
        for name, value in (("minItems", low), ("maxItems", high)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ITEMS:
                raise _wrong(f"{where}.{name}", f"got {_shown(value)}, expected an integer of 0 to {MAX_ITEMS}")
        if low > high:
            raise _wrong(f"{where}.minItems", f"got {low}, expected at most maxItems, {high}")
        bounds: Schema = {"minItems": low} | ({"maxItems": high} if "maxItems" in own else {})
        return {"type": "array", "items": self.schema(own.get("items", True), f"{where}.items", depth + 1), **bounds}


def _fitting(value: Any, kind: Any, where: str) -> Any:
    """A value of enum or const: a string, number, boolean or null of the type given beside it."""
    own = OF_PYTHON.get(type(value))
    kinds = [own, "number"] if own == "integer" else [own]
    if (
        own is None
        or (kind is not None and kind not in kinds)
        or (own in ("integer", "number") and not _is_number(value))
    ):
        expected = (
            "text, a number below 2**53, true, false or null" if kind is None else f"a value of type {_shown(kind)}"
        )
        raise _wrong(where, f"got {_shown(value)}, expected {expected}")
    return value


def _refuse(own: Schema, known: set[str], where: str) -> None:
    """Keywords that would not be kept."""
    for name in own:
        if name not in known:
            allowed = ", ".join(sorted(known)) or "nothing more"
            raise _wrong(f"{where}.{name[:64]}", f"cannot be kept here, expected {allowed}")


def _is_number(value: Any) -> bool:
    """A number that every reader of JSON takes for the same one."""
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 2**53


def _shown(value: Any) -> str:
    return repr(value)[:64]


def _wrong(where: str, message: str) -> Exception:
    return bad(f"{where}: {message}", where, "unsupported_value")
