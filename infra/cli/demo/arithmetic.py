"""The demo's task arithmetic: two-digit addition, one answer an episode, learned with the MIX loss."""

from infra.cli.demo.char_model import CHARACTERS_ALONE, Size
from infra.cli.demo.demo_task import DemoTask
from infra.cli.demo.frame import BY_DEV, framed, scored

WARMUP = """\
[trainer.warmup]
lane = "expert"
stop_at = 0.30                   # greedy accuracy on demonstrations kept for validation
min_steps = 150
max_steps = 600
min_experiences = 2000
learning_rate = 5e-4
batch = 64
"""
SETTINGS = framed(
    **BY_DEV,
    groups=32,
    num_episodes=16,
    max_tokens=5,
    evals="""\
    {{ suite = "held-out", every = 40, tasks = 500 }},
    {{ suite = "dev", every = 20, tasks = 250 }},""",
    score="exact",
    tables=scored("exact", "streams.scores.exact:exact"),
    learning_rate="2e-4",
    schedule="schedule = {{ hold_steps = 60, decay_steps = 100, final = 0.1 }}   # smaller steps as there is less to correct\n",
    lanes="the MIX loss: (1 - m) reinforcement + m supervised",
    warmup=WARMUP,
)

ARITHMETIC = DemoTask(
    name="arithmetic",
    about="two-digit addition",
    write="actors.tasksets.arithmetic:write_arithmetic",
    vocabulary=CHARACTERS_ALONE,
    size=Size(hidden=128, layers=4),
    settings=SETTINGS,
    suite="held-out",
    measure="held-out accuracy",
    stop_at=0.93,
    lanes={"none": (0.75, 0.25), "shuffled": (0.75, 0.25), "sft": (0.0, 0.25), "rl": (1.0, 0.0)},
)
