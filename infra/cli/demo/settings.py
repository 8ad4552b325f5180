"""The demo's headrace.toml: the same settings a real run would have, for a model of 0.9 M parameters on two cores."""

import json
from pathlib import Path

import msgspec

from infra.cli.demo.chat_model import CACHED_MODEL
from infra.cli.demo.tasks import ADD, GUESS, INSTRUCTIONS, SHAPES, DemoTask
from infra.cli.demo.traffic import TRAFFIC
from schemas.errors import ConfigError

TASKS = {task.name: task for task in (INSTRUCTIONS, ADD, GUESS, SHAPES, TRAFFIC)}
ENGINES = {
    "vllm": 'use = "actors.engines.vllm.engine:VllmEngine"\n'
    'options = {{ dtype = "{dtype}", max_model_len = {max_model_len}, max_num_seqs = {max_sequences} }}',
    "torch": 'use = "actors.engines.torch:TorchEngine"\noptions = {{ dtype = "{dtype}", max_sequences = {max_sequences} }}',
}
SETTLE_S = 20.0  # after the users have gone: the last feedback windows close
SHUFFLE = """
[[processor]]                    # the control: advantages permuted within each group
use = "streams.processors.control:shuffle_advantages"
stage = "collect"
after = "advantage"
"""
# An agent's framework works for milliseconds on each turn: more games at once would only wait for each other.
AGENT_IN_FLIGHT, AGENT_DEADLINE_S = 128, 300.0
AGENT = """\
workflow = "actors.program.workflow:Program"
options = {{ url = {url} }}
"""
TEMPLATE = """\
# Written by `headrace demo`. Edit it and run `headrace up`, or remove the folder to begin anew.
app = "demo"

[kafka]                          # no bootstrap_servers: an embedded broker, its data in ./kafka
partitions = 2

[store]
url = "store"

[policy]
model = {model}

"""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace demo`.

    directory: of the run. task: by its name. model: folder of the chat model, None for the usual one. minutes: of issuing
    tasks. seed: of a toy's model, the tasks and the draws.
    engine: vllm or torch. control: see `DemoTask.lanes`. quiet: no picture on the terminal. agent: URL of a service
    that plays, "" for the built-in workflow. sets: `--set` arguments of every role.
    """

    directory: Path
    task: str = INSTRUCTIONS.name
    model: Path | None = None
    minutes: float = 4.0
    seed: int = 0
    engine: str = "vllm"
    control: str = "none"
    quiet: bool = False
    agent: str = ""
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
    """The text of the settings file. Raises ConfigError for an unknown task, engine or control."""
    task = task_of(options.task)
    if options.engine not in task.engines:
        raise ConfigError(f"--engine: got {options.engine!r}, expected one of {', '.join(task.engines)}")
    if options.control not in task.lanes:
        raise ConfigError(f"--control: got {options.control!r}, expected one of {', '.join(task.lanes)}")
    if options.agent and not task.workflow:
        playable = ", ".join(name for name, one in TASKS.items() if one.workflow)
        raise ConfigError(f"--agent: got one with --task {options.task}, expected --task {playable}")
    usual, expert = task.lanes[options.control]
    toy = task.vocabulary is not None
    dtype = "float32" if toy else "auto"
    engine = ENGINES[options.engine].format(
        dtype=dtype, max_model_len=task.max_model_len, max_sequences=256 if toy else 128
    )
    model = "model" if toy else str(options.model or CACHED_MODEL)
    return TEMPLATE.format(model=json.dumps(model)) + task.settings.format(
        engine=engine,
        dtype=dtype,
        seed=options.seed,
        minutes=f"{options.minutes:g}",
        after_users=f"{60 * options.minutes + SETTLE_S:g}",
        stop_at=task.stop_at,
        in_flight=AGENT_IN_FLIGHT if options.agent else 1024,
        deadline_s=AGENT_DEADLINE_S if options.agent else 30.0,
        workflow=AGENT.format(url=json.dumps(options.agent)) if options.agent else task.workflow,
        processors=SHUFFLE if options.control == "shuffled" else "",
        usual=usual,
        expert=expert,
    )
