"""The tasks of `headrace demo`: data, vocabulary, settings, and what counts as success.

instructions   a chat model follows instructions that can be checked: each kind shown alone, then learned from the score
traffic        users of a gateway teach the same model what they like, by ratings

Toys, which the tests use, with a character model of at most 0.9 M parameters:

add            two-digit addition, one answer an episode, learned with the MIX loss
guess          several turns with an environment, learned from its rewards alone
shapes         how many shapes a picture shows. The demonstrations count too low, so the model learns from them to look at the
               picture, and from rewards to count; without the picture a guess is right one time in three at most.
"""

from string import Template

import msgspec

from infra.cli.demo.char_model import CHARACTERS_ALONE, PICTURES, TURNS_TEMPLATE, Size, Vocabulary


class DemoTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task of `headrace demo`.

    name: by which `--task` knows it. write: a function (folder, seed=) that writes tasks.jsonl and experts.jsonl. vocabulary,
    size: of a toy's model; without them a chat model learns. max_model_len: of the engine. settings: the TOML from [pacing] on,
    with $engine, $dtype, $seed, $minutes and $after_users. suite: the evals that are reported. measure: what a person calls
    them. engines: those it runs on, the usual one first. minutes: how long tasks are issued by default.

    Example: DemoTask(name="add", ..., suite="held-out", measure="held-out accuracy")
    """

    name: str
    write: str
    settings: str
    suite: str
    measure: str
    vocabulary: Vocabulary | None = None
    size: Size | None = None
    max_model_len: int = 64
    engines: tuple[str, ...] = ("vllm", "torch")
    minutes: float = 4.0


FRAME = Template("""\
[pacing]
groups_per_step = $groups             # G: fresh groups in every optimizer step
max_staleness = 2                # η: no trained token is older than so many versions
steps_per_version = 1            # k
straggler_s = $straggler_s
reissue_s = $reissue_s

[engine]
$engine

[explore]
episodes_in_flight = $in_flight
linger_s = 0.2
$explore
[master]
num_episodes = $num_episodes
max_tokens = $max_tokens
temperature = 1.0
first_version = 1                # rollouts begin after the supervised warm-up
seed = $seed
evals = [
$evals
]

[master.stop]$stop_why
suite = "$stop_suite"
at = $stop_at
after = "${minutes}m"
$tables
[reward]
blend = { $score = 1.0 }
require = ["$score"]

[collect]
deadline_s = $deadline_s

[trainer]
learning_rate = $learning_rate
betas = [0.9, 0.98]              # a short memory of gradient sizes: they fall fast as answers become right
gradient_clip = 1.0
checkpoint_every = 20
$trainer
[trainer.lanes]                  # $lanes
usual = { loss = "dppo", weight = $usual }
expert = { loss = "sft", weight = $expert, max_uses = 100000, optional = true }

$warmup""")
BY_DEV = {
    "stop_suite": "dev",
    "stop_why": "                    # decided on the development set; the held-out one is only reported",
}


def scored(name: str, use: str) -> str:
    """The settings table of a score."""
    return f'\n[[score]]\nname = "{name}"\nuse = "{use}"\n'


def framed(**holes: object) -> str:
    """The settings for `DemoTask.settings`: the frame, filled with the values of a task."""
    return FRAME.safe_substitute(
        {
            "explore": "",
            "tables": "",
            "trainer": "",
            "stop_why": "",
            "in_flight": 1024,
            "deadline_s": 30.0,
            "straggler_s": 5.0,
            "reissue_s": 20.0,
            "usual": 1.0,
            "expert": 0.0,
        }
        | holes
    )


CHAT_WARMUP = """\
[trainer.warmup]
lane = "expert"
stop_at = 1.0
min_steps = 12
max_steps = 12
min_experiences = 350
learning_rate = 1e-4
batch = 24
"""

INSTRUCTIONS = DemoTask(
    name="instructions",
    write="actors.tasksets.instructions:write_instructions",
    settings=framed(
        **BY_DEV,
        stop_at=0.95,
        groups=8,
        num_episodes=8,
        in_flight=128,
        straggler_s=60.0,
        reissue_s=300.0,
        deadline_s=600.0,
        max_tokens=40,
        evals="""\
    { suite = "held-out", every = 1000, tasks = 200, score = "instructions" },   # before, after the warm-up, at the end
    { suite = "dev", every = 10, tasks = 64, score = "instructions" },""",
        score="instructions",
        tables=scored("instructions", "streams.scores.instructions:instructions"),
        learning_rate="5e-5",
        trainer="""\
dtype = "$dtype"
threads = 2
max_tokens_per_microbatch = 2048
""",
        lanes="the demonstrations, six kinds of instruction, are for the warm-up alone",
        warmup=CHAT_WARMUP,
    ),
    suite="held-out",
    measure="held-out prompts with every instruction followed",
    max_model_len=256,
    minutes=10.0,
)

ADD_WARMUP = """\
[trainer.warmup]
lane = "expert"
stop_at = 0.30                   # greedy accuracy on demonstrations kept for validation
min_steps = 150
max_steps = 600
min_experiences = 2000
learning_rate = 5e-4
batch = 64
"""

ADD = DemoTask(
    name="add",
    write="actors.tasksets.arithmetic:write_arithmetic",
    vocabulary=CHARACTERS_ALONE,
    size=Size(hidden=128, layers=4),
    settings=framed(
        **BY_DEV,
        stop_at=0.93,
        usual=0.75,
        expert=0.25,
        groups=32,
        num_episodes=16,
        max_tokens=5,
        evals="""\
    { suite = "held-out", every = 40, tasks = 500 },
    { suite = "dev", every = 20, tasks = 250 },""",
        score="exact",
        tables=scored("exact", "streams.scores.exact:exact"),
        learning_rate="2e-4",
        trainer="schedule = { hold_steps = 60, decay_steps = 100, final = 0.1 }   # smaller steps as less is wrong\n",
        lanes="the MIX loss: (1 - m) reinforcement + m supervised",
        warmup=ADD_WARMUP,
    ),
    suite="held-out",
    measure="held-out accuracy",
)

GUESS_WORKFLOW = """\
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
GUESS_TABLES = """
[tasks.dedupe]                   # every prompt is the same; the hidden number makes the task
by = "task"
"""
GUESS_WARMUP = """\
[trainer.warmup]                 # a player that uses its hints and wastes two guesses of three
lane = "expert"
stop_at = 1.0
min_steps = 200                  # a player at random has no accuracy to look at
max_steps = 200
min_experiences = 2000
learning_rate = 2e-3
batch = 64
"""

GUESS = DemoTask(
    name="guess",
    minutes=10.0,
    write="actors.tasksets.guess:write_guess",
    vocabulary=Vocabulary(
        words=(*(f"{number:02d}" for number in range(100)), *"<>?-"),
        pattern=r"\d\d|[\s\S]",
        chat_template=TURNS_TEMPLATE,
    ),
    size=Size(hidden=64, layers=2),
    settings=framed(
        stop_at=0.93,
        groups=16,
        explore=GUESS_WORKFLOW,
        num_episodes=16,
        max_tokens="3                   # of a turn: a number and the end token",
        evals="""    { suite = "all-numbers", every = 10, tasks = 16, score = "environment" },""",
        stop_suite="all-numbers",
        score="environment",
        tables=GUESS_TABLES,
        learning_rate="1e-3",
        lanes="the player is no example to follow: its moves are for the warm-up alone",
        warmup=GUESS_WARMUP,
    ),
    suite="all-numbers",
    measure="numbers found, greedy",
)

SHAPES_WARMUP = """\
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
    write="actors.tasksets.shapes:write_shapes",
    vocabulary=PICTURES,
    size=Size(hidden=64, layers=2, image=32),
    settings=framed(
        **BY_DEV,
        stop_at=0.97,
        groups=16,
        in_flight=512,
        num_episodes=8,
        max_tokens="3                   # a number and the end token",
        evals="""\
    { suite = "held-out", every = 20, tasks = 200, score = "vision" },
    { suite = "dev", every = 10, tasks = 100, score = "vision" },""",
        score="vision",
        tables=scored("vision", "streams.scores.vision:vision"),
        learning_rate="1e-4",
        lanes="who counts too low is no example to follow: demonstrations are for the warm-up alone",
        warmup=SHAPES_WARMUP,
    ),
    suite="held-out",
    measure="pictures counted right, greedy",
    engines=("torch",),  # vLLM refuses heads of 16, which is what was measured, on a CPU
)

# Users ask a gateway. After the warm-up the model learns from their ratings alone, and explorers answer only the evals by which
# the gate decides which version the users get.
TRAFFIC = DemoTask(
    name="traffic",
    write="actors.tasksets.instructions:write_questions",
    settings="""\
[pacing]
groups_per_step = 64             # answers in an optimizer step
steps_per_version = 1
reissue_s = 20.0

[engine]
$engine

[gateway]
listen = "127.0.0.1:8000"        # the demo takes another port where it must
train_on = "consented"           # the key the users have was made with --train yes
channel = "stable"               # what the gate let pass

[gateway.limits]
max_tokens = 48

[[feedback]]                     # POST /v1/feedback
name = "user"
use = "streams.sources.received:rating"
from = { webhook = "/v1/feedback" }
window = "12s"                   # then an answer without a rating is unlabelled: counted, not trained
late = "amend"

[reward]
blend = { user = 1.0 }
require = ["user"]

[[score]]                        # of evals alone: in production nobody knows which answer will be liked
name = "instructions"
use = "streams.scores.instructions:instructions"

[master]
split = "none"                   # no rollouts: explorers answer evals, and production is all there is to learn from
num_episodes = 1
max_tokens = 48
first_version = 1                # the end of the supervised warm-up
seed = $seed
evals = [
    { suite = "held-out", every = 4, tasks = 100, score = "instructions" },
    { suite = "dev", every = 4, tasks = 64, score = "instructions" },
]

[master.gate.suites.dev]
at_least = 0.05
max_drop = 0.05                  # below what the stable version has

[master.stop]                    # when the users have gone and the last window has closed
after = "${after_users}s"

[collect]
deadline_s = 30.0

[trainer]
learning_rate = 5e-5
betas = [0.9, 0.98]
gradient_clip = 1.0
checkpoint_every = 40
min_publish_interval = "0s"      # a version as soon as there are answers for it: these users wait no five minutes
dtype = "$dtype"
threads = 2
max_tokens_per_microbatch = 2048

[trainer.lanes]
# Most answers are old, and most are bad. A loss that lowers their probability without a bound lowers that of good ones
# too. topr stops at what the policy hardly says, so that an answer may be learned from twice.
live = { loss = "topr", weight = 1.0, min_sequences = 64, max_uses = 2, max_mean_abs_log_ratio = 1.0 }
expert = { loss = "sft", weight = 0.0, max_uses = 100000, optional = true }

"""
    + CHAT_WARMUP,
    suite="held-out",
    measure="held-out questions answered as readers like it",
    engines=("vllm",),
    max_model_len=256,
    minutes=10.0,
)
