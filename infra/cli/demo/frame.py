"""The settings that the demo's tasks have in common: rollouts after a supervised warm-up."""

from string import Template

FRAME = Template("""\
[pacing]
groups_per_step = $groups             # G: fresh groups in every optimizer step
max_staleness = 2                # η: no trained token is older than so many versions
steps_per_version = 1            # k
straggler_s = 5.0
reissue_s = 20.0

[engine]
{engine}

[explore]
episodes_in_flight = $in_flight
linger_s = 0.2
$explore
[master]
num_episodes = $num_episodes
max_tokens = $max_tokens
temperature = 1.0
first_version = 1                # rollouts begin after the supervised warm-up
seed = {seed}
evals = [
$evals
]

[master.stop]$stop_why
suite = "$stop_suite"
at = {stop_at}
after = "{minutes}m"
$tables
[reward]
blend = {{ $score = 1.0 }}
require = ["$score"]

[collect]
deadline_s = $deadline_s
{processors}
[trainer]
learning_rate = $learning_rate
betas = [0.9, 0.98]              # a short memory of gradient sizes: they fall fast as answers become right
gradient_clip = 1.0
checkpoint_every = 20
$schedule
[trainer.lanes]                  # $lanes
usual = {{ loss = "dppo", weight = {usual} }}
expert = {{ loss = "sft", weight = {expert}, max_uses = 100000, optional = true }}

$warmup""")
BY_DEV = {
    "stop_suite": "dev",
    "stop_why": "                    # decided on the development set; the held-out one is only reported",
}


def scored(name: str, use: str) -> str:
    """The settings table of a score."""
    return f'\n[[score]]\nname = "{name}"\nuse = "{use}"\n'


def framed(**holes: object) -> str:
    """The settings for `DemoTask.settings`: the frame, filled with the values of a task. Raises KeyError for a missing one."""
    return FRAME.substitute(
        {"explore": "", "tables": "", "schedule": "", "stop_why": "", "in_flight": 1024, "deadline_s": 30.0} | holes
    )
