"""Folders of gateways: one belongs to a process until it dies, and what is spooled there waits for the next."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.simulator.plugins import WatchedEngine
from tests.simulator.virtual_loop import Process


class GatewayLife(msgspec.Struct, frozen=True):
    """One life of a gateway. role: serve or canary, each with folders of its own."""

    role: str
    folder: Path
    engine: WatchedEngine

    def let_go(self) -> None:
        """The process is dead: the kernel takes its locks back."""
        for lock in self.folder.rglob("lock"):
            lock.unlink()


def next_folder(base: Path, lives: Mapping[Process, GatewayLife], role: str) -> Path:
    """The first folder of a role that no living process has, one with spooled records before others."""
    for folder in orphans(lives, role):
        return folder
    taken = {life.folder for process, life in lives.items() if not process.is_dead}
    return next(path for number in range(100) if (path := base / f"{role}-{number}") not in taken)


def orphans(lives: Mapping[Process, GatewayLife], role: str) -> list[Path]:
    """Folders of a role's dead in which records are spooled."""
    taken = {life.folder for process, life in lives.items() if not process.is_dead}
    folders = {life.folder for life in lives.values() if life.role == role} - taken
    return sorted(folder for folder in folders if any(folder.rglob("*.spool")))
