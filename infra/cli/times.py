"""Times as the commands and the console show them: when something was, and how long it still takes."""

import time


def clock(time_ms: float | None) -> str:
    """Local time of a log-append time in milliseconds, "" for none.

    >>> clock(0), clock(None), len(clock(1_763_715_600_000))
    ('', '', 14)
    """
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time_ms / 1000)) if time_ms else ""


def span(seconds: float) -> str:
    """How long something still takes.

    >>> span(84_000), span(90), span(0.4)
    ('23 h', '2 min', '0 s')
    """
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
