"""The chain of each stage, assembled from settings: built-ins, scores, and inserted processors in their places.

Guarantee: what cannot be assembled (an unknown name, two steps of one name, a group processor in verify) is one
ConfigError that names the table; nothing is skipped silently.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from infra.chain.chain import Step, make_step
from infra.chain.insert import Stage, loaded, with_processors
from infra.settings.plugin import option_defaults
from schemas.errors import ConfigError
from streams.config import ScoreConfig, StreamsConfig
from streams.processors.task_filter import Verifiable

SLOW_BUILT_IN_TIMEOUT_S = 10.0


def build_tasks(config: StreamsConfig) -> tuple[Step, ...]:
    """clean, dedupe, vary, filter, verifiable, difficulty, [[processor]] without a place."""
    tasks = config.tasks
    folder = "streams.processors.task_"
    vary = msgspec.structs.asdict(tasks.vary)
    limits = {name: getattr(tasks.difficulty, name) for name in ("field", "easiest", "hardest")}
    needs = {
        "require": list(tasks.filter.require),
        "workflows": {name: list(fields) for name, fields in tasks.filter.workflows.items()},
        "max_chars": tasks.filter.max_chars,
    }
    sameness = {"by": tasks.dedupe.by, "near": tasks.dedupe.near}
    steps = [
        _built_in("clean", f"{folder}clean:clean", {}, "tasks"),
        _built_in("dedupe", f"{folder}dedupe:dedupe", sameness, "tasks"),
        _built_in("filter", f"{folder}filter:filter", needs, "tasks"),
        _built_in("difficulty", f"{folder}difficulty:difficulty", limits, "tasks"),
    ]
    steps[1].memory = tasks.dedupe.memory
    if tasks.filter.scores:
        steps.insert(3, _verifiable(config))
    if vary.pop("on"):
        function = loaded(f"{folder}vary:Vary", vary, "tasks.vary", kind="processor")
        steps.insert(2, make_step("vary", function, timeout_s=tasks.vary.timeout_s + 1.0))
    off = _off(tasks, "clean", "dedupe", "filter", "difficulty")
    if "filter" in off:
        off.add("verifiable")
    return with_processors(steps, config.processor, "tasks", len(steps), off)


def _verifiable(config: StreamsConfig) -> Step:
    """The step that asks the scores of [tasks.filter]."""
    known = {score.name: (index, score) for index, score in enumerate(config.score)}
    for name in config.tasks.filter.scores:
        if name not in known:
            names = ", ".join(known) or "none, there is no [[score]]"
            raise ConfigError(f'tasks.filter.scores: got "{name}", expected one of {names}')
    asked = [known[name] for name in config.tasks.filter.scores]
    scores = [_score_step(score, f"score[{index}]") for index, score in asked]
    timeout_s = 1.0 + sum(score.timeout_s for _, score in asked)
    return make_step("verifiable", Verifiable(scores), timeout_s=timeout_s)


def build_verify(config: StreamsConfig) -> tuple[Step, ...]:
    """validate, redact, dedupe, filter, [[processor]] without a place, [[score]]."""
    verify = config.verify
    redact = {"kinds": list(verify.redact.kinds), "patterns": verify.redact.patterns, "action": verify.redact.action}
    bounds = msgspec.structs.asdict(verify.filter)
    bounds.pop("on")
    steps = [
        _built_in("validate", "streams.processors.validate:validate", {}, "verify"),
        _built_in("redact", "streams.processors.redact:redact", redact, "verify"),
        _built_in("dedupe", "streams.processors.dedupe:dedupe", {}, "verify"),
        _built_in("filter", "streams.processors.filter:filter", bounds, "verify"),
    ]
    steps[2].memory = verify.dedupe.memory
    default_place = len(steps)
    steps += [_score_step(score, f"score[{index}]") for index, score in enumerate(config.score)]
    off = _off(verify, "validate", "redact", "dedupe", "filter")
    return with_processors(steps, config.processor, "verify", default_place, off)


def build_collect(config: StreamsConfig, model: str = "") -> tuple[Step, ...]:
    """correct, reward, synthesize, advantage, difficulty, prioritize, [[processor]] without a place.

    correct comes first: an edited answer shows how, though it was given no value. synthesize comes before difficulty: a
    group that is all right teaches nothing by comparison, but shows how. model: folder or name of the policy's.
    """
    collect, reward = config.collect, config.reward
    blend: dict[str, Any] = {
        "blend": reward.blend or None,
        "require": list(reward.require),
        "discount": reward.discount,
    }
    steps: list[Step] = []
    if collect.correct.on:
        redact = config.verify.redact
        masked = {"kinds": list(redact.kinds), "patterns": redact.patterns} if redact.on else {}
        steps.append(_built_in("correct", "streams.processors.correct:Correct", {"model": model, **masked}, "collect"))
    if reward.use:
        function = loaded(reward.use, reward.options, "reward", kind="score")
        # It may read feedback, so it is asked again at every revision.
        steps.append(make_step("custom_reward", function, timeout_s=reward.timeout_s, reuse=False))
        blend["blend"] = {"custom_reward": 1.0}
    advantage = {name: getattr(collect.advantage, name) for name in ("kind", "epsilon", "turns")}
    synthesize = {"min_reward": collect.synthesize.min_reward}
    steps += [
        _built_in("reward", "streams.processors.reward:reward", blend, "collect"),
        _built_in("synthesize", "streams.processors.synthesize:synthesize", synthesize, "collect"),
        _built_in("advantage", "streams.processors.advantage:advantage", advantage, "collect"),
        _built_in("difficulty", "streams.processors.difficulty:difficulty", {}, "collect"),
        _built_in("prioritize", "streams.processors.prioritize:prioritize", {}, "collect"),
    ]
    off = _off(collect, "synthesize", "advantage", "difficulty", "prioritize")
    return with_processors(steps, config.processor, "collect", len(steps), off)


def build_stage(config: StreamsConfig, stage: Stage) -> tuple[Step, ...]:
    """The chain of `stage`; raises ConfigError."""
    return {"tasks": build_tasks, "verify": build_verify, "collect": build_collect}[stage](config)


def describe_chain(steps: Sequence[Step]) -> list[str]:
    """One line per step: name@version, kind and options, as `headrace check` prints them."""
    lines = []
    for step in steps:
        options = ", ".join(f"{name}={value!r}" for name, value in option_defaults(step.function).items())
        where = "" if step.inline else f", timeout {step.timeout_s:g} s"
        lines.append(f"{step.stamp} ({step.kind}{where}){' ' + options if options else ''}")
    return lines


def _score_step(config: ScoreConfig, where: str) -> Step:
    function = loaded(config.use, config.options, where, kind="score")
    return make_step(config.name, function, timeout_s=config.timeout_s, options=config.options)


def _built_in(name: str, use: str, options: dict[str, Any], stage: Stage) -> Step:
    function = loaded(use, options, f"{stage}.{name}", kind="processor")
    return make_step(name, function, timeout_s=SLOW_BUILT_IN_TIMEOUT_S)


def _off(table: object, *steps: str) -> set[str]:
    """Those of a table's steps that are switched off."""
    return {step for step in steps if not getattr(table, step).on}
