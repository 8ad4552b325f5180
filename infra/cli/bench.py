"""`headrace bench …`: runs one benchmark and prints its figures."""

import importlib
import json

from rich.console import Console
from rich.table import Table

BENCHES = {"codec": "infra.bench.codec", "delta": "infra.bench.delta", "reload": "infra.bench.reload"}


def run_bench(name: str, as_json: bool) -> int:
    """Run `infra/bench/<name>.py` and print its dictionary of figures."""
    figures: dict[str, object] = importlib.import_module(BENCHES[name]).run()
    if as_json:
        print(json.dumps(figures))
        return 0
    table = Table(title=f"bench {name}", show_header=False)
    for figure, value in figures.items():
        table.add_row(figure, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return 0
