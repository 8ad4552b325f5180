"""Runs seeds: `python -m tests.simulator.run --seeds 0:1000`, or one with its trace: `--seed 17 --trace`.

Exit code 1 at a violation, which is printed with its seed, the promise, the last events and the command that repeats it.
"""

import argparse
import functools
import gc
import json
import logging
import multiprocessing
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tests.simulator.faults import Mixture, draw_mixture
from tests.simulator.scenario import Scenario, draw_scenario
from tests.simulator.settlement import settle
from tests.simulator.watch import Violation
from tests.simulator.world import World

SHARED_MEMORY = Path("/dev/shm")


class SeedOutcome(msgspec.Struct, frozen=True):
    seed: int
    trace: str
    violations: tuple[Violation, ...]
    last: tuple[str, ...]
    num_trained: int
    seen: dict[str, int]

    def words(self) -> str:
        lines = [f"seed {self.seed}: {len(self.violations)} violations", "", *self.last, ""]
        lines += [f"{violation.at_s:10.4f} {violation.promise}: {violation.what}" for violation in self.violations[:5]]
        return "\n".join([*lines, "", f"again: python -m tests.simulator.run --seed {self.seed} --trace"])


def run_seed(
    seed: int, *, mixture: Mixture | None = None, scenario: Scenario | None = None, verbose: bool = False
) -> SeedOutcome:
    """Simulate one seed. mixture, scenario: instead of those the seed draws."""
    folder = Path(tempfile.mkdtemp(prefix="simulator-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    logging.disable(logging.CRITICAL)
    gc.disable()  # collections would come at moments that no seed decides
    try:
        world = World(scenario or draw_scenario(seed), mixture or mixture_of(seed), folder)
        if verbose:
            world.watch.verbose = lambda line: print(line, flush=True)
        world.run()
        if not world.watch.violations:
            settle(world)
        return SeedOutcome(
            seed=seed,
            trace=world.watch.hash.hexdigest()[:16],
            violations=tuple(world.watch.violations),
            last=tuple(world.watch.last),
            num_trained=world.account.trained if world.account else 0,
            seen=dict(world.watch.seen),
        )
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)


def mixture_of(seed: int) -> Mixture:
    return draw_mixture(Random(f"mixture/{seed}"))


def changed(seed: int, mixture: Mapping[str, Any], scenario: Mapping[str, Any]) -> SeedOutcome:
    """Simulate one seed with other values of some fields."""
    return run_seed(
        seed,
        mixture=msgspec.structs.replace(mixture_of(seed), **mixture),
        scenario=msgspec.structs.replace(draw_scenario(seed), **scenario),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:100", help="from:to")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="with --seed: every event")
    parser.add_argument("--go-on", action="store_true", help="after a violation")
    parser.add_argument("--mixture", type=json.loads, default={}, help="JSON: fields that every seed has instead")
    parser.add_argument("--scenario", type=json.loads, default={}, help="JSON: fields that every seed has instead")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = run_seed(arguments.seed, verbose=arguments.trace)
        print(outcome.words() if outcome.violations else f"seed {outcome.seed} is clean, trace {outcome.trace}")
        return 1 if outcome.violations else 0
    begin, end = map(int, arguments.seeds.split(":"))
    failed: list[int] = []
    seen: Counter[str] = Counter()
    simulate = functools.partial(changed, mixture=arguments.mixture, scenario=arguments.scenario)
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for outcome in pool.imap(simulate, range(begin, end), chunksize=5 if arguments.go_on else 1):
            seen.update(outcome.seen)
            if outcome.violations:
                failed.append(outcome.seed)
                print(
                    outcome.words() if not arguments.go_on else f"{outcome.seed}: {outcome.violations[0]}", flush=True
                )
                if not arguments.go_on:
                    break
    print(json.dumps({"seeds": end - begin, "failed": failed, "seen": dict(sorted(seen.items()))}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
