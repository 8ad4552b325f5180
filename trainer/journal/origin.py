"""What the bits of a run depend on besides its journal: code, libraries, device, threads, settings. Recorded with
every checkpoint, so that a replay can say what differs here and what can still be promised.

Code is what makes the weights of a journaled batch and its blocks: how blocks are read, how items are packed,
how pictures are prepared, the lanes' losses, the learner. Which batches are executed, and in which order, the journal says.
"""

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from infra.chain.chain import Step
from infra.settings.config import Floor
from infra.settings.plugin import BELOW, here, option_defaults
from trainer.config import TrainerConfig, loss_use
from trainer.journal.closure import Definition, Sources
from trainer.learners.learner import Learner

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("schemas", "infra", "trainer")
ROOTS = (
    Definition("schemas.wire.block", "decode_block"),
    Definition("trainer.batch.assemble", "train_items"),
    Definition("trainer.batch.image_inputs", "ImageInputs"),
    Definition("trainer.batch.inputs", "step_inputs"),
    Definition("trainer.health.guard", "norm_limit"),
)
# Settings are compared on their own, and what is fetched is checked by its hash: how both are done changes no bit.
NOT_FOLLOWED = (
    "infra/log/", "infra/settings/config.py", "infra/observe/failpoint.py", "infra/settings/plugin.py",
    "infra/chain/processor.py", "infra/store/store.py", "infra/store/directory.py", "infra/store/memory.py",
    "infra/store/s3.py", "schemas/errors.py", "trainer/config.py",
)  # fmt: skip
KIND = "definitions "  # before the hash: one of another kind, from an older headrace, is never equal


def made_with(config: TrainerConfig, floor: Floor, learner: Learner) -> dict[str, str]:
    """By name, in words that can be compared."""
    code = code_hash(places(config, learner))
    return {"code": code, "settings": config_hash(config, floor), **learner.numerics()}


def config_hash(config: TrainerConfig, floor: Floor, chain: Sequence[Step] = ()) -> str:
    """Of the settings that shape a step, so that the journal shows where they changed."""
    steps = [[step.stamp, repr(option_defaults(step.function))] for step in chain]
    pacing = msgspec.to_builtins(floor.pacing)
    del pacing["groups_in_flight"]  # of what is issued, and no step depends on that
    shaping = {"trainer": msgspec.to_builtins(config), "pacing": pacing, "batch": steps}
    return hashlib.sha256(msgspec.json.encode(shaping, order="deterministic")).hexdigest()[:16]


def places(config: TrainerConfig, learner: Learner) -> tuple[Definition, ...]:
    """The definitions that a run's weights come from; those of plugins too."""
    losses = {loss_use(lane.loss) for lane in config.lanes.values()}
    named = [
        Definition(here(module), name.partition(".")[0])
        for module, _, name in (use.partition(":") for use in sorted(losses))
    ]
    made = type(learner)
    return (*ROOTS, Definition(made.__module__, made.__qualname__.partition(".")[0]), *named)


@functools.cache
def code_hash(roots: Sequence[Definition], root: Path = ROOT) -> str:
    """Of all that the roots reach, see `trainer.journal.closure`.

    root: folder of the sources. Of a root whose sources are not here, as of one in an installed library, its name counts.
    """
    sources = Sources(lambda module: file_of(module, root, folders))
    folders = tuple(found for place in roots if (found := _plugin_folder(place)) is not None)
    known = [place for place in roots if sources.home(place) is not None]
    named = sorted(f"{place.module}:{place.name}" for place in roots if place not in known)
    digest = hashlib.sha256(f"{sources.digest(known)} {' '.join(named)}".encode())
    return KIND + digest.hexdigest()[:12]


def file_of(module: str, root: Path = ROOT, folders: Sequence[Path] = ()) -> Path | None:
    """Where a module lies that is followed: one of ours, or one of the plugin folders."""
    names = module.removeprefix(BELOW).split(".")
    for folder in (root,) if names[0] in PACKAGES else folders:
        path = folder.joinpath(*names)
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return None if found.relative_to(folder).as_posix().startswith(NOT_FOLLOWED) else found
    return None


def _plugin_folder(place: Definition) -> Path | None:
    """The folder on the path that a plugin was imported from; None for one of ours, and for a library."""
    file = getattr(sys.modules.get(place.module), "__file__", None)
    if place.module.removeprefix(BELOW).partition(".")[0] in PACKAGES or file is None or "site-packages" in file:
        return None
    path = Path(file)
    return path.parents[place.module.count(".") + (path.name == "__init__.py")]


def differences(then: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is not as it was: name → (then, here)."""
    names = sorted(then.keys() | here.keys()) if then else []
    return {
        name: (then.get(name, "not known"), here.get(name, "not known"))
        for name in names
        if then.get(name) != here.get(name)
    }
