"""The objective benches run end to end on a few steps: every batch has the age it should, and files come out."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from infra.cli.bench.learning import mix, offpolicy
from infra.cli.bench.learning.adding import Problem, deck, demonstration, item_of, problems
from infra.cli.demo.char_model import build_char_model

pytestmark = pytest.mark.full


def test_every_batch_is_as_old_as_forced(tmp_path: Path) -> None:
    plan = offpolicy.OffPolicyPlan(losses=("grpo",), lags=(2,), seeds=(0,), steps=6, groups=24, size=8, warm_steps=60)
    start = offpolicy.WarmStart.made(tmp_path / "model", plan, 0)
    seen: list[tuple[int, set[int]]] = []

    def noting(learner, items, *, version, plan):
        seen.append((version, {span.version for one in items for span in one.experience.spans}))
        return real(learner, items, version=version, plan=plan)

    real, ages = offpolicy.step_on, []
    asyncio.run(offpolicy.reinforce_at(start, plan, "grpo", 2, 0, step_with=noting))
    for version, sampled in seen:
        ages += [version - one for one in sampled]
    assert max(ages) <= 2 and {version - min(sampled) for version, sampled in seen[2:] if sampled} <= {2}


def test_both_benches_leave_their_figures_and_a_picture(tmp_path: Path) -> None:
    said: list[str] = []
    short = offpolicy.OffPolicyPlan(losses=("dppo",), lags=(0, 1), seeds=(0,), steps=10, groups=2, size=4, warm_steps=5)
    figures = offpolicy.run(short, out=tmp_path, say=said.append)
    assert set(figures) == {"dppo_lag_0", "dppo_lag_1", "dppo_lag_1_points_lost"}
    of_mix = mix.run(mix.MixPlan(seeds=(0,), steps=20, warm_steps=10, groups=2, size=2), out=tmp_path, say=said.append)
    assert {name.partition("_")[0] for name in of_mix} == {"sft", "grpo", "mix"}
    assert len(json.loads((tmp_path / "mix.json").read_text())["runs"]) == 3 and len(said) == 6
    assert offpolicy.run(short, out=tmp_path, say=said.append) == figures and len(said) == 6  # nothing is run twice
    assert (tmp_path / "mix.png").stat().st_size > 1000 and (tmp_path / "offpolicy.png").stat().st_size > 1000


def test_own_right_answers_become_demonstrations_once(tmp_path: Path) -> None:
    found = problems(build_char_model(tmp_path / "model", 0), 0)
    assert not {one.name for one in found.train} & {one.name for one in found.held_out}
    first, second, third = found.train[:3]
    teacher = mix.Teacher({one.name: one for one in found.train}, (first,), 0)
    right = answer(second, 1.0)
    teacher.learn([right, right, answer(third, 0.0), answer(first, 1.0)])
    assert teacher.num_known == 2
    shown = Counter(one.item.id for one in teacher.show(8))
    assert shown == {demonstration(first).item.id: 4, demonstration(second).item.id: 4}
    assert mix.Teacher({}, (), 0).show(3) == []
    assert sorted(one.name for one in deck([first, second, third], 1).deal(3)) == sorted(
        one.name for one in (first, second, third)
    )


def answer(problem: Problem, reward: float):
    return item_of(problem, problem.answer, [-1.0] * len(problem.answer), version=0, reward=reward)
