"""What a metric is called where Prometheus reads it: its short name, as reports have it, with units and labels spelled out.

<name>_s, <name>_per_s        <name>_seconds, <name>_per_second
<name>_ms_p95                 recent_<name>_seconds{percentile="95"}, in seconds
<lane>/<name>                 step_<name>{lane="<lane>"}: a value of the newest optimizer step, of one lane
"""

import re
from typing import NamedTuple

from schemas.fields import LANES

PREFIX = "headrace_"
_PERCENTILE = re.compile(r"(.+)_ms_p(\d+)")


class Exposed(NamedTuple):
    """name: with the prefix, without the suffix of its kind. labels: besides its own. scale: times the value."""

    name: str
    labels: dict[str, str]
    scale: float = 1.0


def exposed(name: str) -> Exposed:
    """How Prometheus reads a metric.

    >>> exposed("usual/ess")
    Exposed(name='headrace_step_ess', labels={'lane': 'usual'}, scale=1.0)
    """
    lane, _, value = name.rpartition("/")
    if lane in LANES:
        return Exposed(f"{PREFIX}step_{value}", {"lane": lane})
    if (found := _PERCENTILE.fullmatch(name)) is not None:
        return Exposed(f"{PREFIX}recent_{found[1]}_seconds", {"percentile": found[2]}, 0.001)
    for unit, spelled in (("_per_s", "_per_second"), ("_s", "_seconds")):
        if name.endswith(unit):
            return Exposed(PREFIX + name.removesuffix(unit) + spelled, {})
    return Exposed(PREFIX + name.replace("/", "_"), {})
