"""The demo's task shapes: how many shapes a picture shows, learned from rewards by a model with an eye.

The demonstrations teach how to look and count too low: most pictures of two or three shapes are counted one short. What
they get wrong, rewards must put right; without the picture a guess is right one time in three at most.
"""

from infra.cli.demo.char_model import PICTURES, Size
from infra.cli.demo.demo_task import DemoTask

SETTINGS = """\
[pacing]
groups_per_step = 16             # G: fresh groups in every optimizer step
max_staleness = 2                # η: no trained token is older than so many versions
steps_per_version = 1            # k
straggler_s = 5.0
reissue_s = 20.0

[engine]
{engine}

[explore]
episodes_in_flight = 512
linger_s = 0.2

[master]
num_episodes = 8
max_tokens = 3                   # a number and the end token
temperature = 1.0
first_version = 1                # rollouts begin after the supervised warm-up
seed = {seed}
evals = [
    {{ suite = "held-out", every = 20, tasks = 200, score = "vision" }},
    {{ suite = "dev", every = 10, tasks = 100, score = "vision" }},
]

[master.stop]                    # decided on the development set; the held-out one is only reported
suite = "dev"
at = {stop_at}
after = "{minutes}m"

[[score]]
name = "vision"
use = "streams.scores.vision:vision"

[reward]
blend = {{ vision = 1.0 }}
require = ["vision"]

[collect]
deadline_s = 30.0
{processors}
[trainer]
learning_rate = 1e-4
betas = [0.9, 0.98]
gradient_clip = 1.0
checkpoint_every = 20

[trainer.lanes]                  # who counts too low is no example to follow: demonstrations are for the warm-up alone
usual = {{ loss = "dppo", weight = {usual} }}
expert = {{ loss = "sft", weight = {expert}, max_uses = 100000, optional = true }}

[trainer.warmup]                 # long enough to see; no accuracy on these demonstrations would say so
lane = "expert"
stop_at = 1.0
min_steps = 150
max_steps = 150
min_experiences = 1400            # of them a tenth is kept for validation
learning_rate = 2e-3
batch = 64
"""

SHAPES = DemoTask(
    name="shapes",
    about="count the shapes in a picture",
    write="actors.tasksets.shapes:write_shapes",
    vocabulary=PICTURES,
    size=Size(hidden=64, layers=2, image=32),
    settings=SETTINGS,
    suite="held-out",
    measure="pictures counted right, greedy",
    stop_at=0.97,
    lanes={"none": (1.0, 0.0), "shuffled": (1.0, 0.0)},
    engines=("torch",),  # heads of 16, as it was measured, are none that vLLM takes on a CPU
)
