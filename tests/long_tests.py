"""Tests that take 0.15 s or more, by name in `long.txt` beside this file: `make test-fast` leaves them out.

`make long-tests` measures them anew: it reads what pytest prints with `--durations=0`.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).with_name("long.txt")
LEAST_S = 0.15  # of set-up, call and tear-down together, beside two other processes on two cores
_DURATION = re.compile(r"\s*([\d.]+)s (?:setup|call|teardown)\s+(\S.*)")


def known() -> frozenset[str]:
    """Their names, as pytest has them."""
    return frozenset(FILE.read_text(encoding="utf-8").splitlines())


def measured(lines: Iterable[str]) -> list[str]:
    """The names in what pytest printed, in order.

    >>> measured(["0.15s call     a.py::b[1 2]", "0.10s setup    a.py::b[1 2]", "0.10s call     a.py::c", "3 passed"])
    ['a.py::b[1 2]']
    """
    took_s = Counter[str]()
    for line in lines:
        if found := _DURATION.fullmatch(line.rstrip()):
            took_s[found[2]] += float(found[1])
    return sorted(name for name, seconds in took_s.items() if seconds >= LEAST_S)


def main() -> None:
    """Write the file."""
    names = measured(sys.stdin)
    FILE.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{FILE.name}: {len(names)} tests of {LEAST_S:g} s or more")


if __name__ == "__main__":
    main()
