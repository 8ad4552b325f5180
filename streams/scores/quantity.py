"""Numbers with units: reading them, and whether two are the same.

Guarantees: units convert where they measure the same (1 km is 1000 m, never 1000 s); a number without a unit is not one
with; a text with two numbers, or with words that are no unit, is no quantity.
"""

import math
import re
import unicodedata
from fractions import Fraction

import msgspec

from streams.scores.words import read_number

Dimensions = tuple[tuple[str, int], ...]  # sorted, no exponent 0
Unit = tuple[float, Dimensions]
_MAX_POWER = 6

_PREFIXES = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "c": 1e-2, "d": 1e-1, "k": 1e3, "M": 1e6, "G": 1e9}
_LONG_PREFIXES = {
    "nano": 1e-9, "micro": 1e-6, "milli": 1e-3, "centi": 1e-2, "deci": 1e-1, "kilo": 1e3, "mega": 1e6, "giga": 1e9,
}  # fmt: skip
# Symbol, names, factor, dimensions: those of the first table take prefixes.
_WITH_PREFIX = (
    ("m", "meter metre", 1.0, "m"), ("g", "gram", 1e-3, "kg"), ("s", "second", 1.0, "s"), ("A", "ampere amp", 1.0, "A"),
    ("mol", "mole", 1.0, "mol"), ("L", "liter litre", 1e-3, "m^3"), ("l", "", 1e-3, "m^3"), ("N", "newton", 1.0, "kg m s^-2"),
    ("J", "joule", 1.0, "kg m^2 s^-2"), ("W", "watt", 1.0, "kg m^2 s^-3"), ("Pa", "pascal", 1.0, "kg m^-1 s^-2"),
    ("Hz", "hertz", 1.0, "s^-1"), ("V", "volt", 1.0, "kg m^2 s^-3 A^-1"), ("Ω", "ohm", 1.0, "kg m^2 s^-3 A^-2"),
    ("C", "coulomb", 1.0, "A s"), ("Wh", "", 3600.0, "kg m^2 s^-2"), ("cal", "calorie", 4.184, "kg m^2 s^-2"),
    ("eV", "electronvolt", 1.602176634e-19, "kg m^2 s^-2"), ("bar", "", 1e5, "kg m^-1 s^-2"),
)  # fmt: skip
_ALONE = (
    ("in", "inch", 0.0254, "m"), ("ft", "foot", 0.3048, "m"), ("yd", "yard", 0.9144, "m"), ("mi", "mile", 1609.344, "m"),
    ("ly", "light-year lightyear", 9.4607304725808e15, "m"), ("t", "tonne", 1e3, "kg"), ("lb", "pound", 0.45359237, "kg"),
    ("oz", "ounce", 0.028349523125, "kg"), ("min", "minute", 60.0, "s"), ("h", "hour", 3600.0, "s"), ("hr", "", 3600.0, "s"),
    ("sec", "", 1.0, "s"), ("d", "day", 86400.0, "s"), ("wk", "week", 604800.0, "s"), ("ha", "hectare", 1e4, "m^2"),
    ("gal", "gallon", 3.785411784e-3, "m^3"), ("mph", "", 0.44704, "m s^-1"), ("kph", "", 1 / 3.6, "m s^-1"),
    ("atm", "atmosphere", 101325.0, "kg m^-1 s^-2"), ("mmHg", "", 133.322387415, "kg m^-1 s^-2"), ("K", "kelvin", 1.0, "K"),
    ("M", "molar", 1e3, "mol m^-3"), ("%", "percent", 0.01, "share"), ("°", "degree deg", 1.0, "angle"),
    ("rad", "radian", 180 / math.pi, "angle"), ("$", "dollar usd", 1.0, "usd"), ("¢", "cent", 0.01, "usd"),
    ("€", "euro eur", 1.0, "eur"),
)  # fmt: skip
_PLURALS = {"feet": "foot", "inches": "inch", "percent": "percent", "hertz": "hertz"}
_FACTOR = re.compile(r"([^\d\s^/*·]+)\s*\^?\s*\{?([-−]?\d)?\}?")
_SUPERSCRIPTS = str.maketrans({"²": "^2", "³": "^3", "⁻": "-", "¹": "1", "μ": "µ", "Ω": "Ω"})


def read_unit(text: str) -> Unit | None:
    """Factor and dimensions of a unit, None for a text that names no unit.

    >>> read_unit("km/h")
    (0.2777777777777778, (('m', 1), ('s', -1)))
    >>> read_unit("apples") is None
    True
    """
    text = unicodedata.normalize("NFC", text).translate(_SUPERSCRIPTS)
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text).replace("\\%", "%")
    text = re.sub(r"\bper\b", "/", text.strip())
    text = re.sub(r"\b(?:square|sq\.?)\s+([a-zA-Z]+)", r"\1^2", re.sub(r"\bcubic\s+([a-zA-Z]+)", r"\1^3", text))
    text = re.sub(r"\s+squared\b", "^2", re.sub(r"\s+cubed\b", "^3", text))
    factor, dimensions = 1.0, dict[str, int]()
    for index, part in enumerate(text.split("/")):
        factors = re.split(r"[\s*·]+", part.strip().strip("()"))
        for written in factors:
            match = _FACTOR.fullmatch(written)
            named = None if match is None else _named(match[1])
            if match is None or named is None:
                return None
            power = int((match[2] or "1").replace("−", "-")) * (-1 if index else 1)
            factor *= named[0] ** power
            for name, exponent in named[1]:
                dimensions[name] = dimensions.get(name, 0) + exponent * power
    if any(abs(exponent) > _MAX_POWER for exponent in dimensions.values()):
        return None
    return factor, tuple(sorted((name, exponent) for name, exponent in dimensions.items() if exponent))


def _named(name: str) -> Unit | None:
    lower = name.casefold()
    word = _PLURALS.get(lower, lower.removesuffix("s") if len(lower) > 3 else lower)
    for table, has_prefix in ((_ALONE, False), (_WITH_PREFIX, True)):
        for symbol, names, factor, dimensions in table:
            if name == symbol or word in names.split():
                return factor, _dimensions(dimensions)
            if not has_prefix:
                continue
            if name[1:] == symbol and name[0] in _PREFIXES:
                return factor * _PREFIXES[name[0]], _dimensions(dimensions)
            if name[1:] == symbol and name[0] == "u":
                return factor * 1e-6, _dimensions(dimensions)
            for prefix, size in _LONG_PREFIXES.items():
                if word.startswith(prefix) and word.removeprefix(prefix) in names.split():
                    return factor * size, _dimensions(dimensions)
    return None


def _dimensions(written: str) -> Dimensions:
    pairs = [part.partition("^") for part in written.split()]
    return tuple((name, int(exponent or "1")) for name, _, exponent in pairs)


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
    """Compare two quantities: to the digit for whole numbers, else within the relative tolerance."""
    if expected.dimensions != got.dimensions:
        return False
    if expected.exact:
        return expected.value == got.value
    return math.isclose(expected.value, got.value, rel_tol=tolerance, abs_tol=0.0 if expected.value else 1e-12)


def _spoken(text: str) -> Quantity | None:
    words = text.casefold().replace("-", " ").split()
    for length in range(len(words), 0, -1):
        number = read_number(" ".join(words[:length]))
        if number is not None:
            return _with_unit(float(number), " ".join(words[length:]), True)
    return None


def _value(match: re.Match[str]) -> tuple[float, bool]:
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
