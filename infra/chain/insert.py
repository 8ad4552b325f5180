"""Turns each [[processor]] table into a step and inserts it into the chain of its stage.

Guarantee: an unknown step name, or two steps of the same name, is a ConfigError that names the table; nothing is skipped
silently.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from infra.chain.chain import Step, StepKind, make_step
from infra.chain.processor import declared_mark
from infra.settings.config import Seconds, Section, UsePath, nearest
from infra.settings.plugin import load
from schemas.errors import ConfigError

Stage = Literal["tasks", "verify", "collect", "batch"]
STAGES: dict[StepKind, tuple[Stage, ...]] = {
    "task": ("tasks",), "experience": ("verify", "collect", "batch"), "group": ("collect",), "batch": ("batch",),
}  # fmt: skip
Options = dict[str, Any]
MAX_STEP_S = 110  # where a record has 120 s in all, so that a step that hangs is named


class ProcessorConfig(Section, frozen=True):
    """[[processor]]: processor that is added to the built-in chain of a stage.

    use: A @processor function, as `module:name`. stage: Stage of the chain. Stream workers run tasks, verify and collect; the
    trainer runs batch before it journals a batch. name: Name of the step in records and metrics. Default "": the function's.
    after: Step after which the processor runs. Default "": before the scores in verify, at the end of other stages. before:
    Step before which the processor runs, in place of `after`. timeout_s: Seconds of a call, at most 110 in tasks and verify.

    Example: ProcessorConfig(use="support:not_trivial", stage="verify", after="validate")
    """

    use: UsePath
    stage: Stage = "verify"
    name: str = ""
    options: Options = msgspec.field(default_factory=dict)
    after: str = ""
    before: str = ""
    timeout_s: Seconds = 10.0

    def __post_init__(self) -> None:
        if self.after and self.before:
            raise ValueError(f'got after = "{self.after}" and before = "{self.before}", expected one of them')


def with_processors(
    steps: Sequence[Step], configs: Sequence[ProcessorConfig], stage: Stage, default_place: int, off: set[str]
) -> tuple[Step, ...]:
    """Insert this stage's [[processor]] tables, in the file's order, and remove the steps named in `off`."""
    chain = list(steps)
    default_anchor = chain[default_place].name if default_place < len(chain) else ""
    last_after: dict[str, str] = {}  # anchor to the step inserted last behind it: file order is kept
    for index, config in enumerate(configs):
        if config.stage != stage:
            continue
        if stage in ("tasks", "verify") and config.timeout_s > MAX_STEP_S:
            raise ConfigError(f"processor[{index}].timeout_s: got {config.timeout_s:g}, expected at most {MAX_STEP_S}")
        step = processor_step(config, f"processor[{index}]")
        names = [known.name for known in chain]
        if config.after:
            anchor = last_after.get(config.after, config.after)
            place = _place(names, anchor, f"processor[{index}].after") + 1
            last_after[config.after] = step.name
        elif config.before or default_anchor:
            place = _place(names, config.before or default_anchor, f"processor[{index}].before")
        else:
            place = len(chain)
        chain.insert(place, step)
        _check_unique(chain, f"processor[{index}]")
    _check_unique(chain, "score")
    return tuple(step for step in chain if step.name not in off)


def processor_step(config: ProcessorConfig, where: str) -> Step:
    """The step of one table. Raises ConfigError for one that its stage cannot run."""
    function = loaded(config.use, config.options, where, kind="processor")
    step = make_step(config.name or config.use.rpartition(":")[2], function, timeout_s=config.timeout_s)
    if config.stage not in STAGES[step.kind]:
        expected = " or ".join(f'"{stage}"' for stage in STAGES[step.kind])
        raise ConfigError(f"{where}: {config.use} takes a {step.kind}: expected stage = {expected}")
    if step.memory and config.stage == "batch":
        raise ConfigError(f"{where}: {config.use} remembers: expected a processor without memory in stage batch")
    return step


def loaded(use: str, options: dict[str, Any], where: str, *, kind: str) -> Callable[..., Any]:
    """The function with its options, marked as `kind`. Raises ConfigError."""
    function: Callable[..., Any] = load(use, options, where)
    try:
        mark = declared_mark(function)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if mark.kind != kind:
        raise ConfigError(f"{where}: {use} is marked @{mark.kind}, expected @{kind}")
    return function


def _place(names: Sequence[str], anchor: str, where: str) -> int:
    if anchor in names:
        return names.index(anchor)
    hint = nearest(anchor, names) or f", expected one of {', '.join(names)}"
    raise ConfigError(f'{where}: no step "{anchor}" in this stage{hint}')


def _check_unique(steps: Sequence[Step], where: str) -> None:
    names = [step.name for step in steps]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'{where}: a step "{name}" exists already; set another name')
