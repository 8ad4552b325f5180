"""The chain of each stage, assembled from settings: built-ins, scores, and inserted processors in their places.

Guarantee: what cannot be assembled (an unknown name, two steps of one name, a group processor in verify) is one
ConfigError that names the table; nothing is skipped silently.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from infra.chain import Step, make_step
from infra.plugin import load, option_defaults
from infra.processor import mark_of
from schemas.errors import ConfigError
from streams.config import ProcessorConfig, ScoreConfig, Stage, StreamsConfig

SLOW_BUILT_IN_TIMEOUT_S = 10.0


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
    off = {
        name
        for name, on in (
            ("validate", verify.validate.on),
            ("redact", verify.redact.on),
            ("dedupe", verify.dedupe.on),
            ("filter", verify.filter.on),
        )
        if not on
    }
    return _with_processors(steps, config.processor, "verify", default_place, off)


def build_collect(config: StreamsConfig) -> tuple[Step, ...]:
    """reward, synthesize, advantage, difficulty, prioritize, [[processor]] without a place.

    synthesize comes before difficulty: a group that is all right teaches nothing by comparison, but shows how.
    """
    collect, reward = config.collect, config.reward
    blend: dict[str, Any] = {"blend": reward.blend or None, "require": list(reward.require)}
    steps: list[Step] = []
    if reward.use:
        function = _loaded(reward.use, reward.options, "reward", kind="score")
        # It may read feedback, so it is asked again at every revision.
        steps.append(make_step("custom_reward", function, timeout_s=reward.timeout_s, reuse=False))
        blend["blend"] = {"custom_reward": 1.0}
    advantage = {"kind": collect.advantage.kind, "epsilon": collect.advantage.epsilon}
    synthesize = {"min_reward": collect.synthesize.min_reward}
    steps += [
        _built_in("reward", "streams.processors.reward:reward", blend, "collect"),
        _built_in("synthesize", "streams.processors.synthesize:synthesize", synthesize, "collect"),
        _built_in("advantage", "streams.processors.advantage:advantage", advantage, "collect"),
        _built_in("difficulty", "streams.processors.difficulty:difficulty", {}, "collect"),
        _built_in("prioritize", "streams.processors.prioritize:prioritize", {}, "collect"),
    ]
    off = {
        name
        for name, on in (
            ("synthesize", collect.synthesize.on),
            ("advantage", collect.advantage.on),
            ("difficulty", collect.difficulty.on),
            ("prioritize", collect.prioritize.on),
        )
        if not on
    }
    return _with_processors(steps, config.processor, "collect", len(steps), off)


def build_stage(config: StreamsConfig, stage: Stage) -> tuple[Step, ...]:
    """The chain of `stage`; raises ConfigError."""
    return build_verify(config) if stage == "verify" else build_collect(config)


def describe_chain(steps: Sequence[Step]) -> list[str]:
    """One line per step: name@version, kind and options, as `headrace check` prints them."""
    lines = []
    for step in steps:
        options = ", ".join(f"{name}={value!r}" for name, value in option_defaults(step.function).items())
        where = "" if step.inline else f", timeout {step.timeout_s:g} s"
        lines.append(f"{step.stamp} ({step.kind}{where}){' ' + options if options else ''}")
    return lines


def _with_processors(
    steps: list[Step], configs: Sequence[ProcessorConfig], stage: Stage, default_place: int, off: set[str]
) -> tuple[Step, ...]:
    """Insert this stage's [[processor]] tables, in the file's order, and take out what is switched off."""
    default_anchor = steps[default_place].name if default_place < len(steps) else ""
    last_after: dict[str, str] = {}  # anchor to the step inserted last behind it: file order is kept
    for index, config in enumerate(configs):
        if config.stage != stage:
            continue
        step = _processor_step(config, f"processor[{index}]")
        names = [known.name for known in steps]
        if config.after:
            anchor = last_after.get(config.after, config.after)
            place = _place(names, anchor, f"processor[{index}].after") + 1
            last_after[config.after] = step.name
        elif config.before or default_anchor:
            place = _place(names, config.before or default_anchor, f"processor[{index}].before")
        else:
            place = len(steps)
        steps.insert(place, step)
        _check_unique(steps, f"processor[{index}]")
    _check_unique(steps, "score")
    return tuple(step for step in steps if step.name not in off)


def _place(names: Sequence[str], anchor: str, where: str) -> int:
    if anchor in names:
        return names.index(anchor)
    near = difflib.get_close_matches(anchor, names, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else f"expected one of {', '.join(names)}"
    raise ConfigError(f'{where}: no step "{anchor}" in this stage, {hint}')


def _check_unique(steps: Sequence[Step], where: str) -> None:
    names = [step.name for step in steps]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'{where}: a step "{name}" is there already; give this one another name')


def _processor_step(config: ProcessorConfig, where: str) -> Step:
    function = _loaded(config.use, config.options, where, kind="processor")
    step = make_step(config.name or config.use.rpartition(":")[2], function, timeout_s=config.timeout_s)
    if step.kind == "group" and config.stage == "verify":
        raise ConfigError(f'{where}: {config.use} takes a group: expected stage = "collect", where groups are whole')
    return step


def _score_step(config: ScoreConfig, where: str) -> Step:
    return make_step(config.name, _loaded(config.use, config.options, where, kind="score"), timeout_s=config.timeout_s)


def _built_in(name: str, use: str, options: dict[str, Any], stage: Stage) -> Step:
    function = _loaded(use, options, f"{stage}.{name}", kind="processor")
    return make_step(name, function, timeout_s=SLOW_BUILT_IN_TIMEOUT_S)


def _loaded(use: str, options: dict[str, Any], where: str, *, kind: str) -> Callable[..., Any]:
    function: Any = load(use, options, where)
    try:
        mark = mark_of(function)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if mark.kind != kind:
        raise ConfigError(f"{where}: {use} is marked @{mark.kind}, expected @{kind}")
    loaded: Callable[..., Any] = function
    return loaded
