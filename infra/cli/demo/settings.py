"""The demo's tasks and their settings: a real run's, sized for two cores.

instructions.toml   a chat model follows instructions that can be checked: each kind shown alone, then learned from the score
traffic.toml        users of a gateway teach the same model their preferences, by ratings
add.toml            a toy, which the tests use: a character model of 0.9 M parameters learns two-digit addition (MIX loss)

Each file is a headrace.toml with $model, $engine, $dtype, $seed and $minutes (traffic: $after_users) to be filled in.
"""

import json
from pathlib import Path
from string import Template
from typing import Annotated

import msgspec
import typer

from infra.cli.demo.chat_model import CACHED_MODEL
from infra.cli.demo.users import EDITS
from infra.settings.config import apply_set
from schemas.errors import ConfigError

ENGINES = {
    "vllm": 'use = "actors.engines.vllm.engine:VllmEngine"\n'
    'options = {{ dtype = "{dtype}", max_model_len = {max_model_len}, max_num_seqs = {max_sequences} }}',
    "torch": 'use = "actors.engines.torch:TorchEngine"\noptions = {{ dtype = "{dtype}", max_sequences = {max_sequences} }}',
}
SETTLE_S = 20.0  # after the users have gone: the last feedback windows close


class DemoTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task of `headrace demo`; its settings are the file of its name.

    write: function (folder, seed=) that writes tasks.jsonl and experts.jsonl. suite: evals that are reported. measure: name of
    their accuracy for people. engines: those it runs on, the usual one first. minutes: default duration.
    """

    name: str
    write: str
    measure: str
    suite: str = "held-out"
    engines: tuple[str, ...] = ("vllm", "torch")
    minutes: float = 10.0
    max_model_len: int = 256
    is_toy: bool = False


INSTRUCTIONS = DemoTask(
    name="instructions",
    write="actors.tasksets.instructions:write_instructions",
    measure="held-out prompts with every instruction followed",
    minutes=25.0,
)
TRAFFIC = DemoTask(
    name="traffic",
    write="actors.tasksets.instructions:write_questions",
    measure="held-out questions answered as readers like it",
    engines=("vllm",),
)
ADD = DemoTask(
    name="add",
    write="actors.tasksets.arithmetic:write_arithmetic",
    measure="held-out accuracy",
    minutes=4.0,
    max_model_len=64,
    is_toy=True,
)
TASKS = {task.name: task for task in (INSTRUCTIONS, ADD, TRAFFIC)}


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `headrace demo`."""

    directory: Annotated[Path, typer.Option("--dir", help="Folder of the run; an existing run continues.")] = Path(
        "runs/demo"
    )
    task: Annotated[str, typer.Option(help="Task: instructions, or the toy add.")] = "instructions"
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="Chat model to train.", show_default="SmolLM2-135M-Instruct")
    ] = ""
    minutes: Annotated[
        float, typer.Option(help="Longest time from the first task to the last.", show_default="25; traffic 10; add 4")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the draws.")] = 0
    engine: Annotated[str, typer.Option(help="Engine: vllm or torch.", show_default="vllm")] = ""
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
    """The text of the settings file, with --set in it. Raises ConfigError for an unknown task or engine."""
    task = options.chosen
    engine, minutes = options.engine or task.engines[0], options.minutes or task.minutes
    if engine not in task.engines:
        raise ConfigError(f"--engine: got {options.engine!r}, expected one of {', '.join(task.engines)}")
    dtype, max_sequences = ("float32", 256) if task.is_toy else ("auto", 128)
    chat_model = str(Path(options.model).resolve()) if options.model else str(CACHED_MODEL)
    template = Path(__file__).with_name(f"{task.name}.toml").read_text(encoding="utf-8")
    text = Template(template).substitute(
        model=json.dumps("model" if task.is_toy else chat_model),
        engine=ENGINES[engine].format(dtype=dtype, max_model_len=task.max_model_len, max_sequences=max_sequences),
        dtype=dtype,
        seed=options.seed,
        minutes=f"{minutes:g}",
        after_users=f"{60 * minutes + SETTLE_S:g}",
    )
    if not options.sets:
        return text
    import tomlkit

    document = tomlkit.parse(text)  # keeps the comments
    for setting in options.sets:
        apply_set(document, setting)
    return tomlkit.dumps(document)
