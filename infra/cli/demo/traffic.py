"""The traffic demo: users ask a gateway for sums. After the warm-up the model learns only from their ratings.

Explorers answer only the evals by which the gate decides which version the users get.
"""

import sys

import msgspec

from actors.gateway.access.keys import create_key
from infra.cli.connect import app_store
from infra.cli.demo.tasks import ADD, ADD_WARMUP
from infra.cli.exit_codes import CONFIG_ERROR
from infra.cli.run.up import child_environment
from infra.cli.settings import Settings
from infra.local.broker import choose_address
from infra.local.supervisor import Child

TENANT = "demo"
USERS_FILE = "users.jsonl"

SETTINGS = """\
[pacing]
groups_per_step = 256            # answers in an optimizer step; lone ones are noisier than groups
steps_per_version = 1
reissue_s = 20.0

[engine]
{engine}

[gateway]
listen = "127.0.0.1:8000"        # the demo takes another port where it must
train_on = "consented"           # the key the users have was made with --train yes
channel = "stable"               # what the gate let pass

[gateway.limits]
max_tokens = 5

[[feedback]]                     # POST /v1/feedback
name = "user"
use = "streams.sources.received:rating"
from = {{ webhook = "/v1/feedback" }}
window = "12s"                   # then an answer without a rating is unlabelled: counted, not trained
late = "amend"

[reward]
blend = {{ user = 1.0 }}
require = ["user"]

[[score]]                        # of evals alone: in production the right answer is not known
name = "exact"
use = "streams.scores.exact:exact"

[master]
split = "none"                   # no rollouts: explorers answer evals, and production is all there is to learn from
num_episodes = 1
max_tokens = 5
first_version = 1                # the end of the supervised warm-up
seed = {seed}
evals = [
    {{ suite = "held-out", every = 16, tasks = 500 }},
    {{ suite = "dev", every = 16, tasks = 250 }},
]

[master.gate.suites.dev]
at_least = 0.15
max_drop = 0.02                  # below what the stable version has

[master.stop]                    # when the users have gone and the last window has closed
after = "{after_users}s"

[collect]
deadline_s = 30.0
{processors}
[trainer]
learning_rate = 1e-4
betas = [0.9, 0.98]
gradient_clip = 1.0
checkpoint_every = 40
min_publish_interval = "0s"             # a version as soon as there are answers for it: these users wait no five minutes

[trainer.lanes]
# Most answers are old, and most are wrong. A loss that lowers their probability without a bound lowers that of right ones
# too. topr stops at what the policy hardly says, so that an answer may be learned from several times.
live = {{ loss = "topr", weight = {usual}, min_sequences = 256, max_uses = 4, max_mean_abs_log_ratio = 1.0 }}
expert = {{ loss = "sft", weight = {expert}, max_uses = 100000, optional = true }}
"""

TRAFFIC = msgspec.structs.replace(
    ADD,
    name="traffic",
    about="two-digit addition, learned from what users of a gateway say",
    settings=f"{SETTINGS}\n{ADD_WARMUP}",
    stop_at=1.0,
    lanes={"none": (1.0, 0.0)},
    minutes=9.0,
    engines=("torch", "vllm"),  # of the first, two fit on two cores
)


def gateway_settings() -> tuple[str, ...]:
    """`--set` arguments of every role: a port that is free now."""
    return (f"gateway.listen=127.0.0.1:{choose_address().port}",)


def users_child(settings: Settings, minutes: float) -> Child:
    """The users as a child process, with a key made for them. It ends when they have gone. Raises StoreError."""
    assert settings.gateway is not None
    _, key = create_key(app_store(settings), tenant=TENANT, scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
    return Child(
        name="users",
        argv=(
            sys.executable, "-m", "infra.cli.demo.users", "--url", f"http://{settings.gateway.listen}/v1",
            "--out", str(settings.folder / USERS_FILE), "--minutes", str(minutes), "--seed", str(settings.master.seed),
        ),
        log=settings.folder / "logs" / "users.log",
        env={**child_environment(settings), "HEADRACE_KEY": key},
        final_codes=(0, CONFIG_ERROR),
        tier=3,
    )  # fmt: skip
