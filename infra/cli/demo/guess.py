"""The demo's task guess: several turns with an environment, learned from its rewards alone."""

from infra.cli.demo.char_model import TURNS_TEMPLATE, Size, Vocabulary
from infra.cli.demo.demo_task import DemoTask
from infra.cli.demo.frame import framed

WORKFLOW = """\
workflow = "actors.rollout.workflows.interact:Interact"

[explore.options]
max_turns = 5

[explore.options.environment]
use = "actors.rollout.environments.guess:Guess"

[explore.options.environment.options]
high = 16
turns = 5                        # bisection finds any of up to 31 numbers in as many
higher = ">"
lower = "<"
invalid = "?"
shaped = 0.9                     # a guess is worth what it rules out; the best play stays the best
"""
TABLES = """
[tasks.dedupe]                   # every game asks the same; the number behind it makes the task
by = "task"
"""
WARMUP = """\
[trainer.warmup]                 # a player that uses its hints and wastes two guesses of three
lane = "expert"
stop_at = 1.0
min_steps = 200                  # a player at random has no accuracy to look at
max_steps = 200
min_experiences = 2000
learning_rate = 2e-3
batch = 64
"""
SETTINGS = framed(
    groups=16,
    explore="{workflow}",
    in_flight="{in_flight}",
    deadline_s="{deadline_s}",
    num_episodes=16,
    max_tokens="3                   # of a turn: a number and the end token",
    evals="""    {{ suite = "all-numbers", every = 10, tasks = 16, score = "environment" }},""",
    stop_suite="all-numbers",
    score="environment",
    tables=TABLES,
    learning_rate="1e-3",
    lanes="the player is no example to follow: its moves are for the warm-up alone",
    warmup=WARMUP,
)

GUESS = DemoTask(
    name="guess",
    minutes=10.0,
    about="guess a number from 1 to 16 in five turns",
    write="actors.tasksets.guess:write_guess",
    vocabulary=Vocabulary(
        words=(*(f"{number:02d}" for number in range(100)), *"<>?-"),
        pattern=r"\d\d|[\s\S]",
        chat_template=TURNS_TEMPLATE,
    ),
    size=Size(hidden=64, layers=2),
    settings=SETTINGS,
    workflow=WORKFLOW,
    suite="all-numbers",
    measure="numbers found, greedy",
    stop_at=0.93,
    lanes={"none": (1.0, 0.0), "shuffled": (1.0, 0.0)},
)
