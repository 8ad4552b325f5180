"""`headrace bench …`: runs one benchmark and prints its figures beside what was aimed at."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from infra.cli.terminal import Screen
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.cli.bench.families import Family
    from infra.cli.bench.fan_out import FanOutPlan
    from infra.cli.bench.gate import Figures as GateFigures
    from infra.cli.bench.learner import Compared, LearnerPlan
    from infra.cli.bench.memory_held import MemoryPlan

# Benchmarks with one figure to a name: figure → (at least, at most); those of benches_beside.py have their own targets.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    "audit": {"audit_peak_mb": (0.0, 1_000.0), "trace_peak_mb": (0.0, 1_000.0)},
    "delta": {"full_over_delta": (90.0, float("inf")), "bit_exact": (1.0, 1.0)},
    "draw": {
        f"{groups}_{draw}_ms_p50": (0.0, 10.0)
        for groups in ("groups_of_16", "alone")
        for draw in ("priority", "spread")
    },
    "episodes": {"failed": (0.0, 0.0), "not_their_own": (0.0, 0.0)},
    "fan-out": {
        "get_over_one_connection": (8.0, float("inf")),
        "put_over_one_connection": (8.0, float("inf")),
        "cached_version_bytes_per_host": (0.0, 1.05),
    },
    "reprocess": {"verify_different": (0.0, 0.0), "collect_different": (0.0, 0.0)},
    "feedback": {"joins_per_s": (2_000.0, float("inf")), "rebuild_s": (0.0, 30.0)},
    "gateway": {
        "overhead_ms_p50": (float("-inf"), 3.0),
        "overhead_ms_p99": (float("-inf"), 15.0),
        "answers_per_s": (500.0, float("inf")),
    },
    "held": {
        f"{name}_held_ms": (0.0, 50.0) for name in ("prompt", "control_tokens", "redact_letters", "redact_digits")
    },
    "lora": {"share": (0.0, 0.01)},
    "reload": {
        "rebuild_pause_ms_p50": (0.0, 60.0),
        "keep_pause_ms_p50": (0.0, 30.0),
        **{
            f"{mode}_{figure}": target
            for mode in ("rebuild", "keep")
            for figure, target in (
                ("pause_ms_p95", (0.0, 200.0)),
                ("requests_failed", (0.0, 0.0)),
                ("front_mb_per_version", (float("-inf"), 0.1)),
                ("core_mb_per_version", (float("-inf"), 0.1)),
            )
        },
    },
    "offpolicy": {
        "dppo_lag_8_points_lost": (float("-inf"), 3.0),
        "decoupled_lag_8_points_lost": (float("-inf"), 3.0),
    },
    "mix": {
        **{f"sft_seed_{seed}_best": (0.0, 10.0) for seed in range(3)},
        **{f"grpo_seed_{seed}_best": (0.0, 0.0) for seed in range(3)},
        **{f"mix_seed_{seed}_last": (80.0, float("inf")) for seed in range(3)},
    },
    "life": {
        "steps": (10.0, 10.0),
        "steps_in_order": (1.0, 1.0),
        "each_experience_trained_once": (1.0, 1.0),
        "resumed_with_equal_hash": (1.0, 1.0),
        "served_version": (5.0, 5.0),
    },
    "memory": {"step_said_over_held": (0.9, 1.1), "with_versions_said_over_held": (0.9, 1.1)},
    "outage": {
        "p99_away_over_before": (0.0, 1.1),
        "p99_back_over_before": (0.0, 1.1),
        "failed": (0.0, 0.0),
        "lost": (0.0, 0.0),
        "stored_twice": (0.0, 0.0),
    },
    "state": {
        **{f"ranks_{num_ranks}_equal_hash": (1.0, 1.0) for num_ranks in (1, 2, 3)},
        "save_peak_gib_above_shards": (float("-inf"), 1.0),
        **{f"ranks_{num_ranks}_load_peak_gib": (float("-inf"), 1.0) for num_ranks in (1, 2, 3)},
        "publish_peak_gib_above_parts": (float("-inf"), 1.0),
    },
    "weights": {
        **{f"trainer_v{version}_cpu_s_per_gb": (0.0, 1.0) for version in (0, 1, 5, 20, 50)},
        **{f"explorer_v{version}_cpu_s_per_gb": (0.0, 1.5) for version in (1, 5, 20, 50)},
        **{f"explorer_behind_{behind}_cpu_s_per_gb": (0.0, 1.5) for behind in (5, 15, 30)},
        "cached_anchor_cpu_s_per_gb": (0.0, 1.5),
        "trainer_wall_over_cpu": (0.0, 0.6),
        "explorer_wall_over_cpu": (0.0, 0.6),
        "trainer_stall_ms": (0.0, 50.0),
        "explorer_stall_ms": (0.0, 50.0),
        "engine_peak_over_weights": (0.0, 2.2),
        "second_engine_peak_over_weights": (0.0, 1.2),
    },
    "takeover": {"taken_over_s": (0.0, 60.0), "taken_over_peak_mb": (0.0, 2_500.0)},
    "stream": {"events_per_s": (20_000.0, float("inf")), "gap_ms_p99": (0.0, 100.0)},
    "turn": {"explorer_held_ms": (0.0, 5.0), "gateway_held_ms": (0.0, 5.0)},
    "console": {"first_page_s": (0.0, 1.0), "search_ms_p95": (0.0, 300.0), "memory_mb": (0.0, 300.0)},
    # Within two standard errors of nothing, and these small enough to say so.
    "console-load": {
        "slower_in_errors": (float("-inf"), 2.0),
        "slower_share_error": (0.0, 0.03),
        "pages_failed": (0.0, 0.0),
    },
    "trace": {"after_1000_more_s": (0.0, 1.0), "answer_ms_p99": (0.0, 1000.0), "policy_ms": (0.0, 1000.0)},
    "sandbox": {"overhead_ms_p50": (0.0, 60.0), "orphans": (0.0, 0.0), "zombies": (0.0, 0.0)},
}


def run_bench(name: str, as_json: bool, **asked: object) -> int:
    """Run `infra/cli/bench/<name>.py` as asked and print its figures; targets are shown, never asserted."""
    module = importlib.import_module(f"{__package__}.bench.{name}")
    figures = module.run(**asked)
    return show(name, figures, as_json)


def show(name: str, figures: dict[str, float], as_json: bool) -> int:
    """Print figures; the exit code."""
    if as_json:
        print(json.dumps(figures))
    else:
        Screen().print(figures_table(name, figures))
    return 0


def run_offpolicy(out: Path, steps: int, seeds: int, lags: str, losses: str, as_json: bool) -> int:
    """Run `infra/cli/bench/offpolicy.py` as asked. Raises ConfigError for lags that are no numbers."""
    from infra.cli.bench.offpolicy import OffPolicyPlan, run

    try:
        wanted = tuple(int(lag) for lag in lags.split(","))
    except ValueError as error:
        raise ConfigError(f"--lags: got {lags!r}, expected whole numbers by commas, as in 0,2,8") from error
    plan = OffPolicyPlan(losses=tuple(losses.split(",")), lags=wanted, seeds=tuple(range(seeds)), steps=steps)
    console = Screen(stderr=True)
    figures = run(plan, out=out, say=console.print)
    return show("offpolicy", figures, as_json)


def run_reload(versions: int, lora_rank: int, kv: str, as_json: bool) -> int:
    """Run `infra/cli/bench/reload.py` as asked. Raises ConfigError for a mode that it does not know."""
    from infra.cli.bench.reload import MODES, run

    modes = kv.split(",")
    if unknown := sorted(set(modes) - set(MODES)):
        raise ConfigError(f"--kv: got {unknown[0]!r}, expected {' or '.join(MODES)}")
    return show("reload", run(versions, lora_rank=lora_rank, modes=modes), as_json)


def run_outage(minutes: float, per_s: float, as_json: bool) -> int:
    """Run `infra/cli/bench/outage.py` as asked."""
    from infra.cli.bench.outage import run

    figures = run(minutes, per_s=per_s)
    return show("outage", figures, as_json)


def run_takeover(waiting: int, closed: int, rebuild: bool, as_json: bool) -> int:
    """Run `infra/cli/bench/takeover.py` as asked."""
    from infra.cli.bench.takeover import TakeoverPlan, run

    plan = TakeoverPlan(waiting=waiting, closed=closed, rebuild=rebuild)
    return show("takeover", run(plan, Screen(stderr=True).print), as_json)


def run_console_load(pairs: int, seconds: float, people: int, as_json: bool) -> int:
    """Run `infra/cli/bench/console_load.py` as asked."""
    from infra.cli.bench.console_load import LoadPlan, run

    plan = LoadPlan(pairs=pairs, piece_s=seconds, people=people)
    return show("console-load", run(plan, Screen(stderr=True).print), as_json)


def run_weights(gb: float, share: float, sizes: str, out: Path, as_json: bool) -> int:
    """Run `infra/cli/bench/weights.py` as asked, or at several sizes. Raises ConfigError for sizes that are no numbers."""
    from infra.cli.bench.weights import WeightsPlan, run
    from infra.cli.bench.weights_sweep import sweep

    say = Screen(stderr=True).print
    if not sizes:
        return show("weights", run(WeightsPlan(gb=gb, share=share), say), as_json)
    try:
        wanted = [float(size) for size in sizes.split(",")]
    except ValueError as error:
        raise ConfigError(f"--sweep: got {sizes!r}, expected numbers of GB by commas, as in 0.1,0.5,2") from error
    for figures in sweep(wanted, share, out, say).values():
        show("weights", figures, as_json)
    return 0


def run_fan_out(plan: "FanOutPlan", as_json: bool) -> int:
    """Run `infra/cli/bench/fan_out.py` as asked. Raises ConfigError where there is no MinIO."""
    from infra.cli.bench.fan_out import run

    return show("fan-out", run(plan, Screen(stderr=True).print), as_json)


def run_state(hidden: int, layers: int, stage: int, silence_s: float, timeout_s: float, *, as_json: bool) -> int:
    """Run `infra/cli/bench/state.py` as asked."""
    from infra.cli.bench.state import StatePlan, run

    console = Screen(stderr=True)
    plan = StatePlan(hidden=hidden, layers=layers, stage=stage, silence_s=silence_s, timeout_s=timeout_s)
    figures = run(plan, say=console.print)
    return show("state", figures, as_json)


def run_learner(plan: "LearnerPlan", as_json: bool) -> int:
    """Run `infra/cli/bench/learner.py` as asked."""
    from infra.cli.bench.learner import run

    machine, found = run(plan, Screen(stderr=True).print)
    if as_json:
        print(json.dumps({"machine": msgspec.to_builtins(machine), "shapes": msgspec.to_builtins(found)}))
        return 0
    peak = f"{machine.peak_tflops:,.0f} TFLOP/s" if machine.peak_tflops else "a peak that is not known: --peak"
    Screen().print(
        f"{machine.parameters_m:,.0f} M parameters, {machine.dtype}, microbatches of {plan.max_tokens:,} tokens, on "
        f"{machine.device} of {peak}"
    )
    Screen(width=150).print(learner_table(found))
    return 0


def learner_table(found: "Sequence[Compared]") -> Table:
    """Two rows a shape, headrace's step and the plain one; seconds are the least and the median."""
    table = Table("batch", "step", title="bench learner")
    for name in ("CPU s", "wall s", "tokens/s", "TFLOP/s", "MFU", "peak MiB", "times as fast"):
        table.add_column(name, justify="right")
    for one in found:
        for name, timed in (("headrace", one.headrace), ("plain", one.plain)):
            is_ours = timed is one.headrace
            table.add_row(
                one.shape if is_ours else "",
                name,
                f"{number(timed.cpu_s_min)}, {number(timed.cpu_s_median)}",
                f"{number(timed.wall_s_min)}, {number(timed.wall_s_median)}",
                number(round(timed.tokens_per_s, 1)),
                number(timed.tflops),
                "" if timed.mfu is None else f"{timed.mfu:.1%}",
                number(round(timed.peak_mib)),
                Text(f"{one.faster:.2f}", style="green" if one.faster >= 1 else "red") if is_ours else "",
            )
    return table


def run_life(hidden: int, layers: int, stage: int, dtype: str, engine: str, *, as_json: bool) -> int:
    """Run `infra/cli/bench/life.py` as asked. Raises ConfigError for an engine or a dtype that it does not know."""
    from infra.cli.bench.life import LifePlan, run
    from infra.cli.bench.reload import ENGINES

    for option, got, known in (("--engine", engine, ENGINES), ("--dtype", dtype, ("float32", "bfloat16"))):
        if got not in known:
            raise ConfigError(f"{option}: got {got!r}, expected {' or '.join(known)}")
    plan = LifePlan(hidden=hidden, layers=layers, stage=stage, dtype=dtype, engine=engine)  # type: ignore[arg-type]
    figures = run(plan, say=Screen(stderr=True).print)
    return show("life", figures, as_json)


def run_memory(plan: "MemoryPlan", as_json: bool) -> int:
    """Run `infra/cli/bench/memory.py` as asked. Raises ConfigError for a dtype that it does not know."""
    from infra.cli.bench.memory import run

    if plan.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype: got {plan.dtype!r}, expected float32 or bfloat16")
    figures = run(plan)
    if as_json:
        print(json.dumps(figures))
    else:
        Screen().print(figures_table("memory", figures))
    return 0


def run_families(names: str, as_json: bool) -> int:
    """Run `infra/cli/bench/families.py` over some families, by commas, or all. Raises ConfigError for one it does not know."""
    from infra.cli.bench.families import run
    from infra.cli.bench.tiny_models import FAMILIES

    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in FAMILIES]:
        raise ConfigError(f"--only: got {unknown[0]!r}, expected some of {', '.join(FAMILIES)}")
    found: list[Family] = []
    with Screen(stderr=True).status("opening families") as status:
        for one in run(wanted):
            status.update(f"{one.name} done")
            found.append(one)
    if as_json:
        print(json.dumps([msgspec.structs.asdict(one) for one in found]))
    else:
        Screen(width=150).print(families_table(found))
    return 0


def families_table(found: "Sequence[Family]") -> Table:
    """One row a family: how the learner reads it, and by how much gradients and logprobs are off; or why it is refused."""
    table = Table("family", "learner reads rows", title="bench families")
    table.add_column("gradients off by", justify="right")
    table.add_column("engine off by, nats", justify="right")
    table.add_column("refused")
    for one in found:
        style = "red" if one.refused else "green" if one.works else "yellow"
        figures = ("", "") if one.refused else (number(one.gradient), number(one.engine))
        table.add_row(one.name, one.reading, *figures, Text(one.refused), style=style)
    return table


def run_mix(out: Path, seeds: int, steps: int, as_json: bool) -> int:
    """Run `infra/cli/bench/mix.py` as asked."""
    from infra.cli.bench.mix import MixPlan, run

    console = Screen(stderr=True)
    figures = run(MixPlan(seeds=tuple(range(seeds)), steps=steps), out=out, say=console.print)
    return show("mix", figures, as_json)


def run_gate(paths: int, as_json: bool) -> int:
    """Run `infra/cli/bench/gate.py` on so many paths a row."""
    from infra.cli.bench.gate import run

    found = run(paths)
    if as_json:
        print(json.dumps([msgspec.to_builtins(one) for one in found]))
    else:
        Screen(width=150).print(gate_table(found))
    return 0


def gate_table(found: "Sequence[GateFigures]") -> Table:
    """One row a line, green where its promise is kept and red where it is not."""
    table = Table("test", "what differs", title="bench gate: turned away, taken back or held")
    for name in ("paths", "found", "", "let through", "restless", "ratings"):
        table.add_column(name, justify="right")
    for one in found:
        style = {True: "green", False: "red", None: None}[one.kept]
        wanted = "" if one.kept is None else "at least 80 %" if one.worse else "at most 1 %"
        share = Text(f"{one.failed:.1%} ± {one.error:.1%}", style=style or "")
        cells = (f"{one.passed:.0%}", f"{one.restless:.0%}", number(round(one.ratings)) if one.ratings else "")
        table.add_row(one.test, one.name, str(one.paths), share, wanted, *cells)
    return table


def shapes_table(name: str, rows: list[tuple[str, ...]]) -> Table:
    """Figures of several cases side by side, the first row their names; figures with a target stand out."""
    (_, *cases), *others = rows
    table = Table(title=f"bench {name}")
    table.add_column("figure")
    for case in cases:
        table.add_column(case, justify="right")
    for row in others:
        table.add_row(*row, style="bold" if "target" in row[0] else None)
    return table


def figures_table(name: str, figures: dict[str, float]) -> Table:
    """One figure a line, with its target if it has one."""
    table = Table("figure", title=f"bench {name}")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    targets = TARGETS.get(name, {})
    for figure, value in figures.items():
        if figure not in targets:
            table.add_row(figure, number(value), "")
            continue
        low, high = targets[figure]
        met = low <= value <= high
        table.add_row(figure, number(value), Text(words(low, high), style="green" if met else "red"), style="bold")
    return table


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
