"""Files through which tensors go to vLLM's workers where they lie in none yet (see `infra.policies.version_files`): adapters,
and what the engine began with. In this host's memory, and on disk where that is too small.

    <place>/headrace-weights-<random>/owner     whose lock the engine's process holds as long as it lives

Guarantees: no file is begun in a place that has no room for all of it, and no file is left half written. What a killed engine
left, the next one removes when it begins.
"""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from infra.model.adapter import write_adapter_folder
from infra.policies.adapter import Adapter
from infra.policies.tensors import Tensor, write_tensors
from infra.policies.version_files import MARGIN_BYTES, MEMORY, FileTensors, free_bytes
from schemas.errors import PolicyRefused

_log = logging.getLogger(__name__)
PREFIX = "headrace-weights-"
OWNER = "owner"


class Exchange:
    """places: where files may go, the best first: /dev/shm, then the folder for temporary files (see TMPDIR). Of one engine."""

    def __init__(self, places: Sequence[Path] = (), free: Callable[[Path], int] = free_bytes) -> None:
        self._places = [one for one in places or (MEMORY, Path(tempfile.gettempdir())) if os.access(one, os.W_OK)]
        self._free = free
        self._folders: dict[Path, Path] = {}
        self._owned: list[int] = []
        self._written = 0
        for place in self._places:
            _remove_orphans(place)

    def write(self, tensors: Mapping[str, Tensor], adapter: Adapter | None = None) -> Path:
        """The tensors as a safetensors file where there is room for it, or as peft's folder where they are an adapter.

        Blocks. Raises PolicyRefused where there is no room.
        """
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values()) + MARGIN_BYTES
        found = {place: self._free(place) for place in self._places}
        for place in self._places:
            if found[place] < num_bytes:
                continue
            if place != self._places[0]:
                _log.warning("exchange on disk folder=%s needed=%d free=%s", place, num_bytes, _shown(found))
            if (path := self._written_to(place, tensors, adapter)) is not None:
                return path
        raise PolicyRefused(
            f"a reload needs {num_bytes:,} bytes to pass the weights to vLLM, free are {_shown(found)}; give the container a "
            "larger /dev/shm, or set TMPDIR to a folder with room"
        )

    def written(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Path:
        """A safetensors file with these of the tensors: where they lie already, or as `write` writes them."""
        if isinstance(tensors, FileTensors):
            return tensors.path
        return self.write({name: tensors[name] for name in names})

    def discard(self, path: Path) -> None:
        """Remove what was written here and has been read; another file stays."""
        if path.parent not in self._folders.values():
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what it made."""
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()
        for lock in self._owned:
            os.close(lock)
        self._owned.clear()

    def _written_to(self, place: Path, tensors: Mapping[str, Tensor], adapter: Adapter | None) -> Path | None:
        """What was written, or None where others took the room meanwhile."""
        if place not in self._folders:
            self._folders[place], lock = _made(place)
            self._owned.append(lock)
        self._written += 1
        path = self._folders[place] / (f"{self._written}" if adapter else f"{self._written}.safetensors")
        try:
            if adapter is not None:
                path.mkdir()
                write_adapter_folder(path, adapter, tensors)
            else:
                with path.open("wb") as file:
                    write_tensors(file, tensors)
        except OSError as error:
            self.discard(path)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return None
        return path


def _made(place: Path) -> tuple[Path, int]:
    """A folder, and the lock of its owner, which gets its name once it is held: no other engine takes the folder for left."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    lock = os.open(folder / "taking", os.O_WRONLY | os.O_CREAT)  # held until `close`
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "taking").rename(folder / OWNER)
    return folder, lock


def _remove_orphans(place: Path) -> None:
    """Remove folders of this user whose engine has ended."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, held by its engine, or gone by now
            if folder.lstat().st_uid != os.getuid():
                continue
            with open(folder / OWNER, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            _log.warning("exchange removed folder=%s: its engine was killed", folder)


def _shown(found: Mapping[Path, int]) -> str:
    return ", ".join(f"{num_bytes:,} in {place}" for place, num_bytes in found.items())
