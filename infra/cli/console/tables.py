"""Charts as tables, for people who read or listen instead of looking."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
from markupsafe import Markup

from infra.cli.console.charts import Bins, Line, safe, thin


class Table(msgspec.Struct, frozen=True):
    """A table below a figure. columns: the first one names the row. rows: a cell for each column.

    Example: Table(("version", "value"), [("v3", "0.25")])
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def line_table(lines: Sequence[Line], x_name: str) -> Table:
    """The table of a `line_chart`: each point with its value and interval."""
    is_many, is_timed = len(lines) > 1, x_name == "time"
    has_interval = any(one.low is not None for line in lines for one in line.points)
    rows = []
    for line in lines:
        for one in thin(line.points):
            row = [f"v{one.version}", *([f"{one.x:.1f}"] if is_timed else []), *([line.name] if is_many else [])]
            row.append(f"{one.y:.4g}")
            if has_interval:
                is_known = one.low is not None and one.high is not None
                row.append(f"{one.low:.4g} to {one.high:.4g}" if is_known else "")
            rows.append(row)
    columns = [
        "version", *(["minute"] if is_timed else []), *(["of"] if is_many else []), "value",
        *(["95 % interval"] if has_interval else []),
    ]  # fmt: skip
    return Table(columns, rows)


def area_table(bins: Bins, layers: Mapping[str, Sequence[float]], x_name: str, origin: int = 0) -> Table:
    """The table of an `area_chart`: a row for each bin that holds anything."""
    edges = [bins.first - origin + index * bins.width for index in range(bins.count + 1)]
    mark = "v" if x_name == "version" else ""
    rows = []
    for index, (left, right) in enumerate(pairwise(edges)):
        counts = [values[index] for values in layers.values()]
        if any(counts):
            where = f"{mark}{left}" + (f" to {mark}{right - 1}" if bins.width > 1 else "")
            rows.append([where, *(f"{count:,.0f}" for count in counts)])
    return Table(["version" if x_name == "version" else "minute", *layers], rows)


def shown(title: str, table: Table) -> Markup:
    """The table, closed until its summary is clicked or opened by the keyboard; nothing for an empty one."""
    if not table.rows:
        return Markup("")
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>{"".join(f"<td>{safe(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    name = safe(title)
    return Markup(
        f'<details class="figures"><summary>{name} as a table</summary><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{name} as a table"><table class="compact"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )
