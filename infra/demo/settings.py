"""The demo's headrace.toml: the same settings a real run would have, for a model of 0.9 M parameters on two cores."""

from pathlib import Path

import msgspec

from schemas.errors import ConfigError

CONTROLS = ("none", "shuffled", "sft", "rl")
ENGINES = {
    "vllm": 'use = "actors.engines.vllm.engine:VllmEngine"\n'
    'options = { dtype = "float32", max_model_len = 64, max_num_seqs = 256 }',
    "torch": 'use = "actors.engines.torch:TorchEngine"\noptions = { max_sequences = 256 }',
}
# What each control changes: the supervised share alone, reinforcement alone, or advantages that say nothing.
LANES = {
    "none": (0.75, 0.25),
    "shuffled": (0.75, 0.25),
    "sft": (0.0, 0.25),
    "rl": (1.0, 0.0),
}
SHUFFLE = """
[[processor]]                    # the control: advantages permuted within each group
use = "streams.processors.control:shuffle_advantages"
stage = "collect"
after = "advantage"
"""
TEMPLATE = """\
# Written by `headrace demo`. Edit it and run `headrace up`, or remove the folder to begin anew.
app = "demo"

[kafka]                          # no bootstrap_servers: an embedded broker, its data in ./kafka
partitions = 2

[store]
url = "store"

[policy]
model = "model"

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
    {{ suite = "dev", every = 20, tasks = 200 }},
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
checkpoint_every = 20

[trainer.lanes]                  # the MIX loss: (1 - m) reinforcement + m supervised
usual = {{ loss = "dppo", weight = {usual} }}
expert = {{ loss = "sft", weight = {expert}, max_uses = 100000, optional = true }}

[trainer.warmup]
lane = "expert"
stop_at = 0.30                   # greedy accuracy on demonstrations kept for validation
min_steps = 150
max_steps = 600
min_experiences = 2000
learning_rate = 5e-4
batch = 64
"""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace demo` was asked for."""

    directory: Path
    minutes: float = 4.0
    seed: int = 0
    engine: str = "vllm"
    control: str = "none"
    quiet: bool = False
    stop_at: float = 0.93


def demo_toml(options: DemoOptions) -> str:
    """The settings file. Raises ConfigError for an engine or control there is not."""
    if options.engine not in ENGINES:
        raise ConfigError(f"--engine: got {options.engine!r}, expected one of {', '.join(ENGINES)}")
    if options.control not in CONTROLS:
        raise ConfigError(f"--control: got {options.control!r}, expected one of {', '.join(CONTROLS)}")
    usual, expert = LANES[options.control]
    return TEMPLATE.format(
        engine=ENGINES[options.engine],
        seed=options.seed,
        minutes=f"{options.minutes:g}",
        stop_at=options.stop_at,
        processors=SHUFFLE if options.control == "shuffled" else "",
        usual=usual,
        expert=expert,
    )
