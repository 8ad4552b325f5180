"""The demo's task shapes: how many shapes a picture shows, learned from rewards by a model with an eye.

The demonstrations count too low: in most pictures of two or three shapes they miss one. So the model learns from them to look
at the picture, and from rewards to count. Without the picture a guess is right one time in three at most.
"""

from infra.cli.demo.char_model import PICTURES, Size
from infra.cli.demo.demo_task import DemoTask
from infra.cli.demo.frame import BY_DEV, framed, scored

WARMUP = """\
[trainer.warmup]                 # long enough to see; no accuracy on these demonstrations would say so
lane = "expert"
stop_at = 1.0
min_steps = 150
max_steps = 150
min_experiences = 1400            # of them a tenth is kept for validation
learning_rate = 2e-3
batch = 64
"""
SETTINGS = framed(
    **BY_DEV,
    groups=16,
    in_flight=512,
    num_episodes=8,
    max_tokens="3                   # a number and the end token",
    evals="""\
    {{ suite = "held-out", every = 20, tasks = 200, score = "vision" }},
    {{ suite = "dev", every = 10, tasks = 100, score = "vision" }},""",
    score="vision",
    tables=scored("vision", "streams.scores.vision:vision"),
    learning_rate="1e-4",
    lanes="who counts too low is no example to follow: demonstrations are for the warm-up alone",
    warmup=WARMUP,
)

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
    engines=("torch",),  # vLLM refuses heads of 16, which is what was measured, on a CPU
)
