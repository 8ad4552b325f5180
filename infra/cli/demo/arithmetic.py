"""The demo's task arithmetic: two-digit addition, one answer an episode, learned with the MIX loss."""

from infra.cli.demo.char_model import CHARACTERS_ALONE, Size
from infra.cli.demo.demo_task import DemoTask

WARMUP = """
[trainer.warmup]
lane = "expert"
stop_at = 0.30                   # greedy accuracy on demonstrations kept for validation
min_steps = 150
max_steps = 600
min_experiences = 2000
learning_rate = 5e-4
batch = 64
"""
SETTINGS = """\
[pacing]
groups_per_step = 32             # G: fresh groups in every optimizer step
max_staleness = 2                # η: no trained token is older than so many versions
steps_per_version = 1            # k
straggler_s = 5.0
reissue_s = 20.0

[engine]
{engine}

[explore]
episodes_in_flight = 1024
linger_s = 0.2

[master]
num_episodes = 16
max_tokens = 5
temperature = 1.0
first_version = 1                # rollouts begin after the supervised warm-up
seed = {seed}
evals = [
    {{ suite = "held-out", every = 40, tasks = 500 }},
    {{ suite = "dev", every = 20, tasks = 250 }},
]

[master.stop]                    # decided on the development set; the held-out one is only reported
suite = "dev"
at = {stop_at}
after = "{minutes}m"

[[score]]
name = "exact"
use = "streams.scores.exact:exact"

[reward]
blend = {{ exact = 1.0 }}
require = ["exact"]

[collect]
deadline_s = 30.0
{processors}
[trainer]
learning_rate = 2e-4
betas = [0.9, 0.98]              # a short memory of gradient sizes: they fall fast as answers become right
gradient_clip = 1.0
schedule = {{ hold_steps = 60, decay_steps = 100, final = 0.1 }}   # smaller steps as there is less to correct
checkpoint_every = 20

[trainer.lanes]                  # the MIX loss: (1 - m) reinforcement + m supervised
usual = {{ loss = "dppo", weight = {usual} }}
expert = {{ loss = "sft", weight = {expert}, max_uses = 100000, optional = true }}
"""

ARITHMETIC = DemoTask(
    name="arithmetic",
    about="two-digit addition",
    write="actors.tasksets.arithmetic:write_arithmetic",
    vocabulary=CHARACTERS_ALONE,
    size=Size(hidden=128, layers=4),
    settings=SETTINGS + WARMUP,
    suite="held-out",
    measure="held-out accuracy",
    stop_at=0.93,
    lanes={"none": (0.75, 0.25), "shuffled": (0.75, 0.25), "sft": (0.0, 0.25), "rl": (1.0, 0.0)},
)
