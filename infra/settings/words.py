"""Words for the value of a setting and for the expected type."""

import types
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec


def words_of(expected: Any) -> str:
    """A type as a person says it."""
    if get_origin(expected) is Annotated:
        for note in get_args(expected)[1:]:
            if isinstance(note, msgspec.Meta) and note.description:
                return note.description
        return words_of(get_args(expected)[0])
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(words_of(option) for option in get_args(expected) if option is not type(None))
    if origin is not None and getattr(origin, "__name__", "") == "Literal":
        return "one of " + ", ".join(f'"{option}"' for option in get_args(expected))
    if origin in (tuple, list):
        return f"a list of {words_of(get_args(expected)[0])}"
    if origin is dict or (isinstance(expected, type) and issubclass(expected, msgspec.Struct)):
        return "a table"
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(expected, getattr(expected, "__name__", str(expected)))


def mismatch(value: object, expected: str, path: str, where: str) -> str:
    """Message with the value and what was expected, at a place of a file. expected: in words."""
    kinds = {str: "string", int: "whole number", float: "number", bool: "boolean", list: "list", dict: "table"}
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    kind = kinds.get(type(value), type(value).__name__)
    return f"{where}: {path + ': ' if path else ''}got {shown} ({kind}), expected {expected}"


def join(path: str, key: str) -> str:
    """The name of a setting below another; "" is the top."""
    return f"{path}.{key}" if path else key
