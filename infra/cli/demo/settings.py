"""The demo's headrace.toml: the settings of a real run, sized for two cores."""

import json
from pathlib import Path
from string import Template
from typing import Annotated

import msgspec
import typer

from infra.cli.demo.chat_model import CACHED_MODEL
from infra.cli.demo.tasks import ADD, GUESS, INSTRUCTIONS, SHAPES, TRAFFIC, DemoTask
from infra.cli.demo.users import EDITS
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
    """Options of `headrace demo`."""

    directory: Annotated[Path, typer.Option("--dir", help="Folder of the run; an existing run continues.")] = Path(
        "runs/demo"
    )
    task: Annotated[
        str,
        typer.Option(help="Task: instructions, or a toy: add, guess (turns with an environment) or shapes (images)."),
    ] = "instructions"
    model: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Chat model to train.", show_default="SmolLM2-135M-Instruct"),
    ] = ""
    minutes: Annotated[
        float,
        typer.Option(help="Time after which no more tasks are issued.", show_default="10; add and shapes 4"),
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the draws.")] = 0
    engine: Annotated[str, typer.Option(help="Engine: vllm or torch. Default: vllm; torch for shapes.")] = ""
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Learn from simulated users' feedback on a gateway's answers.")
    ] = False
    edits: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of --traffic users who edit an answer that they do not like.")
    ] = EDITS
    services: Annotated[
        list[str], typer.Option("--service", metavar="COMMAND", help="Command to run with the roles, such as a judge.")
    ] = []
    sets: Annotated[list[str], typer.Option("--set", help="Override one setting, as a.b=c.", metavar="A.B=C")] = []
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report.")] = False

    @property
    def chosen(self) -> DemoTask:
        """The task. Raises ConfigError where there is none of that name."""
        return TRAFFIC if self.traffic else task_of(self.task)


def task_of(name: str) -> DemoTask:
    """The task of that name. Raises ConfigError where there is none."""
    if name not in TASKS:
        raise ConfigError(f"--task: got {name!r}, expected one of {', '.join(TASKS)}")
    return TASKS[name]


def demo_toml(options: DemoOptions) -> str:
    """The text of the settings file. Raises ConfigError for an unknown task or engine."""
    task = options.chosen
    engine, minutes = options.engine or task.engines[0], options.minutes or task.minutes
    if engine not in task.engines:
        raise ConfigError(f"--engine: got {options.engine!r}, expected one of {', '.join(task.engines)}")
    toy = task.vocabulary is not None
    dtype = "float32" if toy else "auto"
    return Template(BEGIN + task.settings).substitute(
        model=json.dumps("model" if toy else str(Path(options.model).resolve() if options.model else CACHED_MODEL)),
        engine=ENGINES[engine].format(dtype=dtype, max_model_len=task.max_model_len, max_sequences=256 if toy else 128),
        dtype=dtype,
        seed=options.seed,
        minutes=f"{minutes:g}",
        after_users=f"{60 * minutes + SETTLE_S:g}",
    )
