"""What the bits of a run depend on besides its journal: code, libraries, device, threads, settings. Told with every
checkpoint, so that a replay can say what differs here and what can still be promised.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

from trainer.state import Learning, config_hash

PACKAGE = Path(__file__).resolve().parent


def made_with(run: Learning) -> dict[str, str]:
    """By name, in words that can be compared."""
    return {"code": code_hash(), "settings": config_hash(run.config, run.floor), **run.learner.numerics()}


@functools.cache
def code_hash() -> str:
    """Of the sources that turn a journal into weights: this package, and the model's loader."""
    digest = hashlib.sha256()
    for path in [*sorted(PACKAGE.rglob("*.py")), PACKAGE.parent / "infra" / "model.py"]:
        digest.update(path.relative_to(PACKAGE.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def differences(then: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is not as it was: name → (then, here)."""
    names = sorted(then.keys() | here.keys()) if then else []
    return {
        name: (then.get(name, "not told"), here.get(name, "not told"))
        for name in names
        if then.get(name) != here.get(name)
    }


def promises_bits(then: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether equal journals must give equal bits: nothing differs, and all was computed on the CPU."""
    return not differences(then, here) and here.get("device", "cpu") == "cpu"
