"""The demo's headrace.toml: the same settings a real run would have, for a model of 0.9 M parameters on two cores."""

import json
from pathlib import Path
from string import Template

import msgspec

from infra.cli.demo.chat_model import CACHED_MODEL
from infra.cli.demo.tasks import ADD, GUESS, INSTRUCTIONS, SHAPES, TRAFFIC, DemoTask
from schemas.errors import ConfigError

TASKS = {task.name: task for task in (INSTRUCTIONS, ADD, GUESS, SHAPES, TRAFFIC)}
ENGINES = {
    "vllm": 'use = "actors.engines.vllm.engine:VllmEngine"\n'
    'options = {{ dtype = "{dtype}", max_model_len = {max_model_len}, max_num_seqs = {max_sequences} }}',
    "torch": 'use = "actors.engines.torch:TorchEngine"\noptions = {{ dtype = "{dtype}", max_sequences = {max_sequences} }}',
}
SETTLE_S = 20.0  # after the users have gone: the last feedback windows close
BEGIN = """\
# Written by `headrace demo`. Edit it and run `headrace up`, or remove the folder to begin anew.
app = "demo"

[kafka]                          # no bootstrap_servers: an embedded broker, its data in ./kafka
partitions = 2

[store]
url = "store"

[policy]
model = $model

"""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace demo`.

    directory: of the run. task: by its name. model: folder of the chat model, None for the usual one. minutes: of issuing
    tasks. seed: of a toy's model, the tasks and the draws. engine: vllm or torch. quiet: no picture on the terminal. sets:
    `--set` arguments of every role.
    """

    directory: Path
    task: str = INSTRUCTIONS.name
    model: Path | None = None
    minutes: float = 4.0
    seed: int = 0
    engine: str = "vllm"
    quiet: bool = False
    sets: tuple[str, ...] = ()

    @property
    def traffic(self) -> bool:
        """Whether users of a gateway ask, and not explorers."""
        return self.task == TRAFFIC.name


def task_of(name: str) -> DemoTask:
    """The task of that name. Raises ConfigError where there is none."""
    if name not in TASKS:
        raise ConfigError(f"--task: got {name!r}, expected one of {', '.join(TASKS)}")
    return TASKS[name]


def demo_toml(options: DemoOptions) -> str:
    """The text of the settings file. Raises ConfigError for an unknown task or engine."""
    task = task_of(options.task)
    if options.engine not in task.engines:
        raise ConfigError(f"--engine: got {options.engine!r}, expected one of {', '.join(task.engines)}")
    toy = task.vocabulary is not None
    dtype = "float32" if toy else "auto"
    return Template(BEGIN + task.settings).substitute(
        model=json.dumps("model" if toy else str(options.model or CACHED_MODEL)),
        engine=ENGINES[options.engine].format(
            dtype=dtype, max_model_len=task.max_model_len, max_sequences=256 if toy else 128
        ),
        dtype=dtype,
        seed=options.seed,
        minutes=f"{options.minutes:g}",
        after_users=f"{60 * options.minutes + SETTLE_S:g}",
    )
