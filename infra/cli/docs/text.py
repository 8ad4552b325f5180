"""Pieces of the reference pages: what a docstring says of each name, values in TOML, cells and headings in Markdown. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec


def labelled(docstring: str, fields: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and the text behind each label `name:` or `first, second:` of `fields`, as
    {name: name to show}.

    >>> labelled("Count. low, high: the range.", {"low": "low", "high": "high"})
    ('Count.', {'low': 'the range.', 'high': 'the range.'})
    """
    about, meanings = list[str](), dict[str, str]()
    named = "|".join(map(re.escape, sorted({*fields, *fields.values()}, key=len, reverse=True))) or "(?!)"
    label = rf"(?:{named})(?: \([^)]*\))?"
    for paragraph in re.split(r"\nExamples?:", docstring)[0].split("\n\n"):
        text = re.sub(r"^\[+[\w.<>]+\]+[.:]?\s*", "", re.sub(r"\s+", " ", paragraph)).strip()
        begin, *parts = re.split(rf"(?:^|(?<=[.;:] ))((?:{label}, )*{label}): ", text)
        about.append(begin.strip())
        for labels, meaning in zip(parts[::2], parts[1::2], strict=True):
            for name in labels.split(", "):
                bare, _, note = name.partition(" (")
                meanings[fields.get(bare, bare)] = (f"{note.rstrip(')')}; " if note else "") + meaning.strip(" ;")
    shown = " ".join(filter(None, about))
    return f"{shown[:1].upper()}{shown[1:]}", meanings


def toml(value: Any) -> str:
    """A value in TOML.

    >>> toml({"on": True, "of": ("a", 1)})
    '{ on = true, of = ["a", 1] }'
    """
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        value = {
            field.encode_name: getattr(value, field.name)
            for field in fields
            if getattr(value, field.name) != field.default
        }
        return toml({key: item for key, item in value.items() if item})
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return f"'{value}'" if re.search(r'[\\"]', value) else f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def cell(text: str) -> str:
    """Text that fits into a cell of a Markdown table."""
    return re.sub(r"(?<!\\)\|", r"\\|", text.replace("\n", " ")).strip()
