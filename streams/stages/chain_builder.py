"""The chain of each stage, assembled from settings: built-ins, scores, and inserted processors in their places.

A built-in is a table of the same form as a user's [[processor]].

Guarantee: a chain that cannot be assembled (an unknown name, two steps of one name, a group processor in verify) raises one
ConfigError that names the table; nothing is skipped silently.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from infra.chain.chain import Step, make_step
from infra.chain.insert import ProcessorConfig, Stage, loaded, processor_step, with_processors
from infra.settings.config import Section
from schemas.errors import ConfigError
from streams.config import ScoreConfig, StreamsConfig, Switch
from streams.processors.task_filter import Verifiable


class BuiltIn(NamedTuple):
    """A step that ships, as a user would write it.

    table: its [[processor]] table. memory: number of entries, 0 for the number that its processor declares. on: whether
    it runs; other steps can name its place in either case.
    """

    table: ProcessorConfig
    memory: int
    on: bool


def built_in(stage: Stage, name: str, section: Section, *, use: str = "", **options: Any) -> BuiltIn:
    """Make the step of a section of the settings: its fields are the options of the processor of that name.

    options: further options, and replacements for fields.
    """
    fields = {**msgspec.to_builtins(msgspec.structs.asdict(section)), **options}
    on, memory = fields.pop("on", True), fields.pop("memory", 0)
    module = {"tasks": "task_filter", "verify": "filter"}.get(stage, name)
    table = ProcessorConfig(use=use or f"streams.processors.{module}:{name}", stage=stage, name=name, options=fields)
    return BuiltIn(table, memory, on)


def tasks_chain(config: StreamsConfig) -> list[BuiltIn]:
    """clean, dedupe, filter, difficulty."""
    tasks = config.tasks
    needs: dict[str, Any] = {
        "require": list(tasks.filter.require),
        "workflows": tasks.filter.workflows,
        "max_chars": tasks.filter.max_chars,
    }
    return [
        built_in("tasks", "clean", tasks.clean),
        built_in("tasks", "dedupe", tasks.dedupe),
        built_in("tasks", "filter", Switch(on=tasks.filter.on), **needs),
        built_in("tasks", "difficulty", tasks.difficulty),
    ]


def verify_chain(config: StreamsConfig) -> list[BuiltIn]:
    """validate, redact, dedupe, filter."""
    verify = config.verify
    return [
        built_in("verify", "validate", verify.validate),
        built_in("verify", "redact", verify.redact),
        built_in("verify", "dedupe", verify.dedupe),
        built_in("verify", "filter", verify.filter),
    ]


def teacher_chain(config: StreamsConfig, model: str = "") -> list[BuiltIn]:
    """The teacher of [verify.teacher], if there is one. model: folder or name of the policy's."""
    teacher = config.verify.teacher
    if teacher is None:
        return []
    built = built_in("verify", "teacher", teacher, use="streams.processors.teacher:Teacher", policy=model)
    return [built._replace(table=msgspec.structs.replace(built.table, timeout_s=teacher.deadline_s + 5.0))]


def collect_chain(config: StreamsConfig, model: str = "") -> list[BuiltIn]:
    """correct, reward, synthesize, advantage, difficulty, prioritize.

    correct comes first, since an edited answer needs no reward to teach. synthesize comes before difficulty, which drops
    groups with equal rewards. model: folder or name of the policy's.
    """
    collect, reward, redact = config.collect, config.reward, config.verify.redact
    masked = {"kinds": list(redact.kinds), "patterns": redact.patterns} if redact.on else {}
    correct = built_in(
        "collect", "correct", collect.correct, use="streams.processors.correct:Correct", model=model, **masked
    )
    blend = {"custom_reward": 1.0} if reward.use else reward.blend or None
    return [
        *([correct] if correct.on else []),
        built_in("collect", "reward", Switch(), blend=blend, require=list(reward.require), discount=reward.discount),
        built_in("collect", "synthesize", collect.synthesize),
        built_in("collect", "advantage", collect.advantage),
        built_in("collect", "difficulty", collect.difficulty),
        built_in("collect", "prioritize", collect.prioritize),
    ]


def build_tasks(config: StreamsConfig) -> tuple[Step, ...]:
    """`tasks_chain` with the scores of [tasks.filter] behind filter, [[processor]] without a place."""
    chain = tasks_chain(config)
    steps = _steps(chain)
    if config.tasks.filter.scores:
        check = verifiable(config, config.tasks.filter.scores)
        timeout_s = 1.0 + sum(step.timeout_s for step in check.steps)
        place = [step.name for step in steps].index("filter") + 1
        steps.insert(place, make_step("verifiable", check, timeout_s=timeout_s))
    off = _off(chain)
    return with_processors(
        steps, config.processor, "tasks", len(steps), off | ({"verifiable"} if "filter" in off else set())
    )


def build_verify(config: StreamsConfig, model: str = "") -> tuple[Step, ...]:
    """`verify_chain`, [[processor]] without a place, [[score]], `teacher_chain`. model: folder or name of the policy's."""
    chain = verify_chain(config)
    scores = [_score_step(score, f"score[{index}]") for index, score in enumerate(config.score)]
    steps = [*_steps(chain), *scores, *_steps(teacher_chain(config, model))]
    return with_processors(steps, config.processor, "verify", len(chain), _off(chain))


def build_collect(config: StreamsConfig, model: str = "") -> tuple[Step, ...]:
    """`collect_chain` with the user's reward before `reward`, [[processor]] without a place. model: folder or name of the
    policy's.
    """
    chain, reward = collect_chain(config, model), config.reward
    steps = _steps(chain)
    if reward.use:
        function = loaded(reward.use, reward.options, "reward", kind="score")
        own = make_step("custom_reward", function, timeout_s=reward.timeout_s)
        steps.insert([step.name for step in steps].index("reward"), own)
    return with_processors(steps, config.processor, "collect", len(steps), _off(chain))


def verifiable(config: StreamsConfig, names: Sequence[str]) -> Verifiable:
    """A check of tasks by the named scores. Raises ConfigError for an unknown name."""
    known = {score.name: (index, score) for index, score in enumerate(config.score)}
    for name in names:
        if name not in known:
            names = ", ".join(known) or "none, there is no [[score]]"
            raise ConfigError(f'tasks.filter.scores: got "{name}", expected one of {names}')
    return Verifiable([_score_step(known[name][1], f"score[{known[name][0]}]") for name in names])


def _score_step(config: ScoreConfig, where: str) -> Step:
    function = loaded(config.use, config.options, where, kind="score")
    return make_step(config.name, function, timeout_s=config.timeout_s, options=config.options)


def _steps(chain: Sequence[BuiltIn]) -> list[Step]:
    steps = [processor_step(built.table, f"{built.table.stage}.{built.table.name}") for built in chain]
    for step, built in zip(steps, chain, strict=True):
        step.memory = built.memory or step.memory
    return steps


def _off(chain: Sequence[BuiltIn]) -> set[str]:
    return {built.table.name for built in chain if not built.on}
