"""Grids of parameters: `make test-fast` runs the first values, `make test` all of them (the marker `long`)."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_long(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """The values, those after the first `fast` marked `long`."""
    return [value if at < fast else _long(value) for at, value in enumerate(values)]


def _long(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)
