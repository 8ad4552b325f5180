"""Numbers with units: reading them, and whether two are the same.

Guarantees: units convert where they measure the same (1 km is 1000 m, never 1000 s); a number without a unit is not one
with; a text with two numbers, or with words that are no unit, is no quantity.
"""

import math
import re
from fractions import Fraction

import msgspec

from streams.scores.units import Dimensions, read_unit
from streams.scores.words import number_of

MAX_CHARS = 400
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?)\s*(?P<money>[$€]?)\s*(?:(?P<whole>\d+)\s+(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    r"|(?P<top>\d+)\s*/\s*(?P<bottom>\d+)|(?P<plain>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:(?:\s*[x×*·]\s*10\s*\^?\s*\{?|[eE])(?P<power>[-+−]?\d{1,2})\}?)?)(?![\d.,]*\d)"
)
_ABOUT = re.compile(r"^(?:about|approximately|approx\.?|around|roughly|≈|~|=|[a-zA-Z]\s*=)\s*", re.IGNORECASE)
_TEMPERATURES = (
    (re.compile(r"(?:°\s*|℃|deg(?:ree)?s?\s*)?(?:C|celsius)|℃", re.IGNORECASE), 1.0, 273.15),
    (re.compile(r"(?:°\s*|deg(?:ree)?s?\s*)?(?:F|fahrenheit)|℉", re.IGNORECASE), 5 / 9, 459.67 * 5 / 9),
)
_KELVIN: Dimensions = (("K", 1),)


class Quantity(msgspec.Struct, frozen=True):
    """A number in SI units.

    value: in the base units. dimensions: exponent of each base unit, () for a number alone. exact: it was a whole number
    without a unit.

    Example: Quantity(value=1500.0, dimensions=(("m", 1),))
    """

    value: float
    dimensions: Dimensions = ()
    exact: bool = False


def read_quantity(text: str) -> Quantity | None:
    """The one quantity that a text holds; None where it holds no quantity or several, or is longer than MAX_CHARS.

    >>> read_quantity("about 1.5 km")
    Quantity(value=1500.0, dimensions=(('m', 1),), exact=False)
    >>> read_quantity("3 or 4") is None
    True
    """
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    text = _ABOUT.sub("", text.rstrip(".")).strip()
    match = _NUMBER.match(text)
    if match is None:
        return _spoken(text)
    value, whole = _value(match)
    unit = text[match.end() :].strip()
    return _with_unit(value, f"{match['money']} {unit}".strip() if match["money"] else unit, whole)


def same_quantity(expected: Quantity, got: Quantity, tolerance: float) -> bool:
    """Whether both measure the same and are equal: to the digit for whole numbers, else within the relative tolerance."""
    if expected.dimensions != got.dimensions:
        return False
    if expected.exact:
        return expected.value == got.value
    return math.isclose(expected.value, got.value, rel_tol=tolerance, abs_tol=0.0 if expected.value else 1e-12)


def _spoken(text: str) -> Quantity | None:
    """Number words, then perhaps a unit: the longest run of words that is a number."""
    words = text.casefold().replace("-", " ").split()
    for length in range(len(words), 0, -1):
        number = number_of(" ".join(words[:length]))
        if number is not None:
            return _with_unit(float(number), " ".join(words[length:]), True)
    return None


def _value(match: re.Match[str]) -> tuple[float, bool]:
    """The number, and whether it is a plain whole one."""
    sign = -1 if match["sign"] in ("-", "−") else 1
    if match["under"] or match["bottom"]:
        over, under = int(match["over"] or match["top"]), int(match["under"] or match["bottom"])
        if under == 0:
            return math.nan, False
        return float(sign * (int(match["whole"] or 0) + Fraction(over, under))), False
    plain = match["plain"].replace(",", "")
    if match["power"]:
        return sign * float(f"{plain}e{match['power'].replace('−', '-')}"), False
    return sign * float(plain), "." not in plain


def _with_unit(value: float, unit: str, whole: bool) -> Quantity | None:
    if not math.isfinite(value):
        return None
    if not unit:
        return Quantity(value, exact=whole)
    for pattern, factor, offset in _TEMPERATURES:
        if pattern.fullmatch(unit):
            return Quantity(value * factor + offset, _KELVIN)
    found = read_unit(unit)
    return None if found is None else Quantity(value * found[0], found[1])
