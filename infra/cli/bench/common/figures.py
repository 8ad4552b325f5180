"""Figures and ranges as a person reads them. Pure."""


def words(low: float, high: float) -> str:
    """A range as a person says it.

    >>> words(90.0, float("inf"))
    'at least 90'
    """
    if low == high:
        return number(low)
    if high == float("inf"):
        return f"at least {number(low)}"
    return f"{number(low)} to {number(high)}" if low > 0 else f"at most {number(high)}"


def number(value: float) -> str:
    """Whole from 100 on, else three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
