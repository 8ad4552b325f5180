"""`headrace init DIR`: a commented headrace.toml and a plugin folder, which `headrace check` accepts as they are.

Guarantee: nothing that is there is overwritten.
"""

from pathlib import Path

from infra.cli.terminal import Screen
from schemas.errors import ConfigError

TOML = """\
app = "{app}"                     # prefix of all topics; one app, one log
plugins = ["plugins"]            # folders beside this file with your own code

# [kafka]                        # left out: an embedded broker, its data in ./kafka
# bootstrap_servers = "kafka-1:9092,kafka-2:9092"
# partitions = 12                # fixed once the topics exist

# [store]                        # left out: the folder ./store
# url = "s3://bucket/prefix"     # credentials from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY

[policy]
model = "{model}"                # a model folder beside this file, or a name in the local Hugging Face cache

[engine]                         # explorers and gateway; [gateway.engine] overrides it for the gateway
use = "{engine}"
# options = {{ max_model_len = 8192 }}   # the engine's own names

[gateway]
listen = "127.0.0.1:8000"
train_on = "consented"           # nothing | consented (keys made with --train yes) | all (but --train no)
# channel = "candidate"          # every version, instead of those that were promoted
# canary = {{ url = "http://127.0.0.1:8010", share = 0.1 }}   # tries new versions: see [master.gate.canary]

[gateway.limits]
max_tokens = 512                 # of one answer

[gateway.redact]                 # taken out before anything is written
kinds = ["email", "card", "phone", "key", "iban", "ssn"]
# patterns = {{ ticket = "T-[0-9]+" }}

# What people say later. Each becomes scores.<name>; collect waits `window` for it.
[[feedback]]
name = "user"                    # POST /v1/feedback, with a key or a browser's token
use = "streams.sources.received:rating"
from = {{ webhook = "/v1/feedback" }}
window = "24h"
late = "amend"                   # drop | amend | retrain

[[feedback]]
name = "csat"                    # a file your ticket system appends to, one JSON object a line
use = "mine:csat"
from = {{ file = "tickets.jsonl" }}
window = "24h"

[[processor]]
use = "mine:not_trivial"
options = {{ min_tokens = 2 }}
stage = "verify"
after = "validate"

[[score]]
name = "brief"
use = "mine:brief"

[reward]                         # absent scores: the others' weights are renormalized
blend = {{ user = 1.0, csat = 1.0, brief = 0.1 }}
require = ["user"]               # without it an answer is unlabelled: counted, never trained

[trainer]
version_every = "5m"             # at least so long between versions; everybody loads each of them

[trainer.lanes]
# Answers are old, and many are bad: topr pushes these down only so far. A step waits for `least` of them.
live = {{ loss = "topr", weight = 1.0, least = 64 }}
"""
PLUGIN = '''\
"""Your own steps. Raise `version` whenever a decision changes: it is stamped on what it saw."""

from headrace import Drop, Experience, Feedback, feedback, processor, score


@feedback(version=1)
def csat(ticket: dict) -> Feedback | None:
    """A closed ticket, 1 to 5 stars; a ticket without stars says nothing."""
    if "stars" not in ticket:
        return None
    return Feedback(ref=ticket["answer_id"], id=ticket["ticket"], value=(ticket["stars"] - 1) / 4)


@processor(version=1)
def not_trivial(experience: Experience, *, min_tokens: int = 8) -> Experience | Drop:
    """There is nothing to learn from an answer of a token or two."""
    return experience if experience.num_sampled >= min_tokens else Drop("too short")


@score(version=1)
def brief(experience: Experience, *, words: int = 200) -> float:
    """1 for an answer people read to its end."""
    return float(len(experience.response.split()) <= words)
'''
ENGINES = {"vllm": "actors.engines.vllm.engine:VllmEngine", "torch": "actors.engines.torch:TorchEngine"}


def run_init(directory: Path, model: str, engine: str) -> int:
    """Write the files. Raises ConfigError where there are some already."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine: got {engine!r}, expected one of {', '.join(ENGINES)}")
    files = {
        directory / "headrace.toml": TOML.format(app=app_name(directory), model=model, engine=ENGINES[engine]),
        directory / "plugins" / "mine.py": PLUGIN,
    }
    if there := [path for path in files if path.exists()]:
        raise ConfigError(f"{there[0]}: is there already; init writes into a folder without one")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    console = Screen()
    for path in files:
        console.print(f"wrote {path}")
    where = directory / "headrace.toml"
    console.print(f"next: headrace check -c {where}, then headrace up -c {where}")
    return 0


def app_name(directory: Path) -> str:
    """A topic prefix after the folder.

    >>> app_name(Path("/srv/Support Bot"))
    'support-bot'
    """
    name = "".join(one if one.isascii() and one.isalnum() else "-" for one in directory.resolve().name.lower())
    return name.strip("-") or "headrace"
