"""`headrace plan`: the capacity that a model and rates need, before anything runs."""

import json

import msgspec
from rich.table import Table

from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.plan.model import MachineFlags, model_table, plan_model
from infra.cli.plan.rates import RateFlags, gb, plan_rates, rate_tables, read_costs
from infra.cli.terminal import Screen
from schemas.errors import ConfigError


@command
def plan(chosen: SettingsFile, asked: RateFlags, machine: MachineFlags, as_json: JsonOption = False) -> int:
    """Plan capacity: memory and disk of the model, and brokers and processes for given rates.

    From the model's config.json it computes the memory of a learner's rank and of an engine, and the bytes of a version.
    From rates it computes bytes and disk by topic, stream workers, gateways, explorers, partitions, and the first bottleneck.
    Group size, partitions, copies, retention and processes come from the settings. The unit costs are measured and printed.
    Exit code 1: something does not fit or keep up; the output names the setting to change.

    Example: [cyan]headrace plan --gpu-gb 80 --requests-per-s 50 --engine-tokens-per-s 4000[/]
    """
    settings = chosen.load()
    has_rates = asked.groups_per_s > 0 or asked.requests_per_s > 0
    if not settings.policy.model and not has_rates:
        raise ConfigError(
            "got neither policy.model nor --groups-per-s or --requests-per-s, expected at least one of them"
        )
    problems: list[str] = []
    figures: dict[str, object] = {"computed": True}
    shown: list[Table | str] = []
    if settings.policy.model:
        there = machine.machine()
        figures["model"] = found = plan_model(settings, there)
        problems += [f"will not fit: {problem}" for problem in found.problems]
        hosts = f"hosts of {gb(there.host)} with {gb(there.shm)} free in /dev/shm"
        shown.append(f"for GPUs of {gb(there.gpu)}, {hosts}; a step each {there.step_s:g} s")
        shown.append(model_table(settings, there, found))
    if has_rates:
        costs = read_costs()
        figures |= {"rates": (planned := plan_rates(asked, settings, costs)), "costs": costs}
        problems += [f"will not keep up: {part.problem}" for part in planned.parts if part.problem]
        shown += rate_tables(asked, settings, planned, costs)
    if as_json:
        print(json.dumps(msgspec.to_builtins(figures | {"problems": problems})))
    else:
        for piece in shown:
            Screen().print(piece)
        for problem in problems:
            Screen().print(problem, style="red")
    return 1 if problems else 0
