"""Versions as files in this host's memory, so that an engine, its workers and the other engines there share one copy.

    <place>/headrace-versions-<user>/<sha256 of the manifest>.safetensors         mapped by processes that hold the version
    <place>/headrace-versions-<user>/<sha256 of the manifest>.safetensors.part    one that is being filled

Guarantees: a place without room for the whole file is passed over, and so is one whose room others take meanwhile: the room
of a tensor is reserved before its first byte. A file gets its name once it is filled and matches its manifest. A process that
finds a file checks it again, and removes one that does not match. A named file is never written to. It loses its name with the
last process that holds any of its tensors: each keeps a lock on it, which the kernel takes from a killed process, and files
that it left go when the next version is placed. A process that asks for a version which another process fills waits for it, at
most `wait_s`. Where no place can be used, the tensors are the process's own.
"""

import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from infra.observe.metrics import Metrics
from infra.policies.manifest import TensorEntry
from infra.policies.tensors import Tensor, layout, load_tensors
from schemas.errors import PolicyRefused

log = logging.getLogger(__name__)
MEMORY = Path("/dev/shm")
MARGIN_BYTES = 1024 * 1024  # for others who write there too
WAIT_S = 600.0  # 140 GB from a store that gives 250 MB/s
POLL_S = 0.02


Put = Callable[[str, Tensor, Iterable[np.ndarray]], Tensor]
"""Puts a tensor of this name, dtype and shape where it should lie, from the chunks of its values. The one that lies there."""
Fill = Callable[[Put], object]
"""Puts all tensors of a version, and raises PolicyRefused unless they are what its manifest says."""
Check = Callable[[dict[str, Tensor]], object]
"""Raises PolicyRefused unless tensors are what a manifest says."""


class FileTensors(dict[str, Tensor]):
    """All tensors of one safetensors file, mapped. path: where a process that holds them can read them too."""

    path: Path


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written there."""
    return shutil.disk_usage(folder).free


class VersionFiles:
    """places: where files may go, the best first: /dev/shm, then the folder for temporary files (see TMPDIR)."""

    def __init__(
        self, places: Sequence[Path] = (), free: Callable[[Path], int] = free_bytes, *, wait_s: float = WAIT_S
    ) -> None:
        asked = places or (MEMORY, Path(tempfile.gettempdir()))
        self._folders = [place / f"headrace-versions-{os.getuid()}" for place in asked if os.access(place, os.W_OK)]
        self._free = free
        self._wait_s = wait_s
        self.metrics: Metrics | None = None
        """Counts places without room, and damaged files."""
        self._remove_left()

    def place(self, sha256: str, entries: Sequence[TensorEntry], fill: Fill, check: Check) -> FileTensors | None:
        """The tensors of a version in a file: one that is there, or made with `fill`. None where there is no place for it.

        Blocks. sha256: of its manifest. Raises the errors of `fill`.
        """
        self._remove_left()
        for folder in self._folders:
            path = folder / f"{sha256}.safetensors"
            try:
                found = self._found(path, check) or self._made(path, entries, fill, check)
            except OSError as error:
                log.warning("version_file place=%s cannot be used: %s", folder, error)
                self._count_no_room()
                continue
            if found is not None:
                return found
        return None

    def _found(self, path: Path, check: Check) -> FileTensors | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if (tensors := _held(file, path)) is None:
                return None
            check(tensors)
        except (PolicyRefused, ValueError) as error:
            log.warning("version_file_damaged path=%s: %s: it is made anew", path, str(error))  # `error` holds tensors
            if self.metrics is not None:
                self.metrics.counter("version_files_damaged").inc()
            path.unlink(missing_ok=True)
            return None
        return tensors

    def _made(self, path: Path, entries: Sequence[TensorEntry], fill: Fill, check: Check) -> FileTensors | None:
        """Tensors filled here or by another process. None without room, or if the other takes too long."""
        _make_folder(path.parent)
        header, places = layout({entry.name: (entry.dtype, entry.shape) for entry in entries})
        num_bytes = len(header) + max((stop for _, stop in places.values()), default=0)
        part, deadline = path.with_name(f"{path.name}.part"), time.monotonic() + self._wait_s
        while time.monotonic() < deadline:
            if (file := _begun(part)) is None:
                time.sleep(POLL_S)
                continue
            try:
                if found := self._found(path, check):  # of the process that had the lock before
                    return found
                if not self._has_room(path.parent, num_bytes):
                    return None
                mapped = _filled(file, header, places, num_bytes, fill)
                os.fchmod(file, 0o400)
                part.rename(path)
                if found := _held(os.dup(file), path, mapped):
                    return found
            finally:
                if is_at(file, part):
                    part.unlink()
                os.close(file)
        log.warning("version_file path=%s: another process fills it, waited for %.0f s", path, self._wait_s)
        return None

    def _has_room(self, folder: Path, num_bytes: int) -> bool:
        if self._free(folder) >= num_bytes + MARGIN_BYTES:
            return True
        log.warning("version_file place=%s free=%d needed=%d: no room", folder, self._free(folder), num_bytes)
        self._count_no_room()
        return False

    def _count_no_room(self) -> None:
        if self.metrics is not None:
            self.metrics.counter("version_files_no_room").inc()

    def _remove_left(self) -> None:
        for folder in self._folders:
            for path in folder.glob("*.safetensors*"):
                with suppress(OSError):  # held, or gone by now
                    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                    try:
                        _remove_unheld(file, path)
                    finally:
                        os.close(file)


def _filled(file: int, header: bytes, places: Mapping[str, tuple[int, int]], num_bytes: int, fill: Fill) -> mmap.mmap:
    """The file, mapped, after `fill`. places: of each tensor behind the header."""
    os.truncate(file, 0)
    os.truncate(file, num_bytes)
    mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    _write(file, header, 0)
    begin = len(header)
    fill(_putting(file, mapped, {name: (begin + start, begin + stop) for name, (start, stop) in places.items()}))
    return mapped


def _putting(file: int, mapped: mmap.mmap, places: Mapping[str, tuple[int, int]]) -> Put:
    """Puts each tensor into its place of a file. PolicyRefused for a tensor without a place, or of another size.

    Space for a tensor is reserved first: without space, access to its mapped pages would kill the process. A tensor is put
    with `pwrite`, since a write to the mapping costs a page fault for each new page.
    """
    view = memoryview(mapped)

    def put(name: str, tensor: Tensor, values: Iterable[np.ndarray]) -> Tensor:
        start, stop = places.get(name, (0, -1))
        if stop - start != tensor.num_bytes:
            raise PolicyRefused(f"{name} of {tensor.num_bytes} bytes is not expected")
        if stop > start:
            os.posix_fallocate(file, start, stop - start)
        at = start
        for chunk in values:
            _write(file, chunk.data, at)
            at += chunk.nbytes
        return Tensor(tensor.dtype, tensor.shape, view[start:stop])

    return put


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    """All of it, beside other threads: the kernel takes two GiB at a time."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _begun(part: Path) -> int | None:
    """The unfinished file, ours to fill until it is closed; None while another has it."""
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    if not is_at(file, part):  # another finished or removed it meanwhile
        os.close(file)
        return None
    return file


def is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _held(file: int, path: Path, mapped: mmap.mmap | None = None) -> FileTensors | None:
    """The tensors of an open file, which stays as long as one of them does; None where it was removed. Closes the file then,
    and when the last of them goes. mapped: a mapping of the file, if there is one: another would cost its faults again.
    """
    with ExitStack() as unless_held:
        unless_held.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_SH)
        if not is_at(file, path):
            return None
        mapped = mapped or mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        unless_held.pop_all()
    weakref.finalize(mapped, _let_go, file, path, os.getpid())
    tensors = FileTensors(load_tensors(memoryview(mapped)))
    tensors.path = path
    return tensors


def _let_go(file: int, path: Path, owner: int) -> None:
    """The last tensor is gone. A forked child shares the lock of its parent, and leaves the file."""
    if os.getpid() == owner:
        with suppress(OSError):  # another process holds it
            _remove_unheld(file, path)
    os.close(file)


def _remove_unheld(file: int, path: Path) -> None:
    """Remove a file that no process holds. Raises BlockingIOError where a process does."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if is_at(file, path):
        path.unlink()


def _make_folder(folder: Path) -> None:
    """A folder of this user alone. Raises OSError where another made it, or others may write there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "expected a folder of this user that no other user may enter", str(folder))
