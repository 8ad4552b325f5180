"""The benchmark of overlap: the product's loop in virtual time, and where the time of each side goes."""

import asyncio
import itertools

import numpy as np
import pytest

from actors.engines.engine import Sampling
from infra.cli.bench.overlap.overlap import Played, figures_of, lengths, played, run
from infra.cli.bench.overlap.plan import OverlapCase, OverlapPlan
from infra.cli.bench.overlap.sides import EOS, SidesAccount, TimedEngine
from infra.cli.bench.overlap.virtual_time import OneThreadTime, VirtualTime
from infra.cli.bench.targets import TARGETS
from infra.policies.policy import Policy
from tests.simulator.virtual_loop import run_virtual

SMALL = OverlapPlan(groups=2, size=2, sigmas=(0.5,), waves=(2,), mean=8, first=2, steps=4, seeds=(0,))


def test_the_loop_is_measured_beside_its_synchronous_mode() -> None:
    said: list[str] = []
    figures = run(SMALL, said.append)
    assert said == ["overlap: sigma 0.5, waves 2, seed 0"]
    assert 0 < figures["sigma_0.5_waves_2_synchronous_learner_busy"] < figures["sigma_0.5_waves_2_learner_busy"] <= 1
    assert figures["sigma_0.5_waves_2_faster"] > 1
    assert figures == run(SMALL, said.append), "virtual time is exact"


def test_every_target_is_of_a_figure() -> None:
    one = Played(10.0, {"engine_busy": 0.9, "learner_busy": 0.8}, 0)
    cases = itertools.product(OverlapPlan().sigmas, OverlapPlan().waves, figures_of([[one, one]]))
    names = {f"sigma_{sigma:g}_waves_{waves}_{name}" for sigma, waves, name in cases}
    assert set(TARGETS["overlap"]) <= names


@pytest.mark.parametrize("staleness", [0, 2])
def test_all_of_the_time_of_each_side_is_accounted_for(staleness: int) -> None:
    shares = played(SMALL, OverlapCase(1.0, 1, staleness, 0)).shares
    for side in ("engine", "learner"):
        assert sum(share for name, share in shares.items() if name.startswith(side)) == pytest.approx(1.0)


def test_a_synchronous_loop_never_samples_and_learns_at_once() -> None:
    """A step and its publication, then the longest of its answers."""
    shares = played(SMALL, OverlapCase(0.5, 1, 0, 0)).shares
    assert shares["engine_busy"] + shares["learner_busy"] < 1
    assert shares["engine_waits_for_a_version"] > shares["learner_busy"]


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_lengths_are_log_normal_with_the_mean_asked_for(sigma: float) -> None:
    plan = OverlapPlan(mean=1000, longest=1000)
    drawn = np.log(list(itertools.islice(lengths(plan, OverlapCase(sigma, 1, 2, 0)), 20_000)))
    assert np.std(drawn) == pytest.approx(sigma, rel=0.03) and np.exp(drawn).mean() == pytest.approx(1000, rel=0.05)


def test_what_a_side_waits_for_is_named() -> None:
    now = [0.0]
    account = SidesAccount(lambda: now[0], places=4, most=3, step=2, size=2)

    def passed(seconds: float, **changes: int) -> None:
        now[0] += seconds
        account.add(**changes)

    passed(0.0, issued=2, begun=4, running=2)
    passed(10.0, loading=1)
    passed(1.0, loading=-1, issued=1)
    passed(4.0, begun=2, buffered=2)
    passed(2.0, learning=1)
    passed(1.0, learning=-1, drawn=2)
    assert dict(account.settle()) == {
        "engine_busy": 5.0 + 2.0 + 1.0 + 0.5,
        "engine_waits_for_the_log": 5.0,
        "engine_loads": 1.0,
        "engine_waits_for_a_version": 2.0,
        "engine_waits_for_the_bound": 1.0 + 0.5,
        "learner_waits_for_groups": 15.0,
        "learner_waits_for_an_older_group": 2.0,
        "learner_busy": 1.0,
    }


def test_an_answer_takes_its_time_and_says_who_sampled_each_token() -> None:
    async def run() -> tuple[float, list[tuple[int, int, int]]]:
        clock = asyncio.get_running_loop().time
        account = SidesAccount(clock, places=1, most=1, step=1, size=1)
        engine = TimedEngine(iter([10, 4]), account, places=1, token_s=1.0, load_s=0.5)
        await engine.start()
        begin_s, sampling = clock(), Sampling(max_tokens=8, stop=(EOS,))
        asked = [asyncio.create_task(engine.generate([5], sampling)) for _ in range(2)]
        await asyncio.sleep(3.25)
        await engine.load(Policy(version=1, tensors=engine.tensors, touched=frozenset(), probe=None))
        first, second = await asyncio.gather(*asked)
        assert len(first.tokens) == 8 and len(second.tokens) == 4, "cut to what is asked for; one after the other"
        return clock() - begin_s, [(one.start, one.stop, one.version) for one in (*first.spans, *second.spans)]

    assert run_virtual(run()) == (pytest.approx(12.5), [(0, 3, 0), (3, 8, 1), (0, 4, 1)])


def test_work_for_a_thread_takes_as_long_as_it_says() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTime)
        begin_s = loop.time()
        await asyncio.gather(asyncio.to_thread(loop.spend, 3.0), asyncio.to_thread(loop.spend, 5.0))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return loop.time() - begin_s

    with asyncio.Runner(loop_factory=OneThreadTime) as runner:
        assert runner.run(main()) == pytest.approx(5.0)
