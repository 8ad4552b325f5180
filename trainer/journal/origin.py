"""The origin of a run's bits besides its journal: code, libraries, device, threads, settings.

Each checkpoint records it, so that a replay can name the differences and the guarantees that still hold. The code is every
source file that may decide the weights of a journaled batch: headrace's, and the files next to the plugins that train.
"""

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from infra.chain.chain import Step
from infra.settings.config import Floor
from infra.settings.plugin import BELOW, SHIPPED, here, option_defaults
from trainer.config import TrainerConfig, loss_use
from trainer.learners.learner import Learner

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("schemas", "trainer", "infra/model", "infra/policies/tensors.py", "infra/store/images.py")


def made_with(config: TrainerConfig, floor: Floor, learner: Learner) -> dict[str, str]:
    """By name, in words that can be compared."""
    return {"code": code_hash(modules(config, learner)), "settings": config_hash(config, floor), **learner.numerics()}


def config_hash(config: TrainerConfig, floor: Floor, chain: Sequence[Step] = ()) -> str:
    """Hash of the settings that shape a step, so that the journal shows where they changed."""
    steps = [[step.stamp, repr(option_defaults(step.function))] for step in chain]
    pacing = msgspec.to_builtins(floor.pacing)
    del pacing["groups_in_flight"]  # limits issued groups, and no step depends on it
    shaping = {"trainer": msgspec.to_builtins(config), "pacing": pacing, "batch": steps}
    return hashlib.sha256(msgspec.json.encode(shaping, order="deterministic")).hexdigest()[:16]


def modules(config: TrainerConfig, learner: Learner) -> tuple[str, ...]:
    """Modules of the learner and of the losses, also of plugins."""
    losses = {here(loss_use(lane.loss).partition(":")[0]) for lane in config.lanes.values()}
    return tuple(sorted({type(learner).__module__, *losses}))


@functools.cache
def code_hash(names: tuple[str, ...] = (), root: Path = ROOT) -> str:
    """Hash of headrace's sources below `root`, of the files next to each of these plugins, and of all names."""
    files = [(path.relative_to(root), path) for name in SOURCES for path in [*(root / name).rglob("*.py"), root / name]]
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.removeprefix(BELOW).partition(".")[0] not in SHIPPED and "site-packages" not in file:
            files += [(Path(name, path.name), path) for path in Path(file).parent.glob("*.py")]
    digest = hashlib.sha256(" ".join(sorted(name.removeprefix(BELOW) for name in names)).encode())
    for label, path in sorted(set(files)):
        if path.is_file():
            # Installed, our modules lie below that name.
            text = path.read_bytes().replace(b"headrace.", b"")
            digest.update(label.as_posix().encode() + hashlib.sha256(text).digest())
    return digest.hexdigest()[:12]


def differences(then: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Entries that differ: name → (then, here)."""
    names = sorted(then.keys() | here.keys()) if then else []
    return {
        name: (then.get(name, "not known"), here.get(name, "not known"))
        for name in names
        if then.get(name) != here.get(name)
    }
