"""What DeepSpeed compiles when it starts, compiled by one process at a time.

PyTorch guards such a build by a file named `lock`, which a killed process leaves behind and everybody later waits for, for
ever and without a word. So the extensions of headrace's ranks have a folder of their own and a lock that dies with whoever
holds it: under that lock, a file of PyTorch's is nobody's and is removed.

Guarantee: a process killed while it compiles keeps no later one from starting.
"""

import fcntl
import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import torch

FOLDER = "TORCH_EXTENSIONS_DIR"

logger = logging.getLogger(__name__)


def load_extensions(environment: MutableMapping[str, str]) -> None:
    """Compile and load them, before `deepspeed.init_distributed` would. FOLDER in `environment` is set unless it was."""
    from deepspeed.comm.torch import build_shm_op

    if FOLDER not in environment:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"torch-{torch.__version__}-python-{sys.version_info.major}.{sys.version_info.minor}"
        environment[FOLDER] = str(cache / "headrace" / "extensions" / name)
    with alone(Path(environment[FOLDER])):
        build_shm_op()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder of extensions; no build of a process that is gone stands in the way."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "turn").open("w") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that compiles extensions folder=%s", folder)
            fcntl.flock(turn, fcntl.LOCK_EX)
        for left in folder.glob("*/lock"):
            logger.warning("removed the lock of a build that was killed path=%s", left)
            left.unlink()
        yield
