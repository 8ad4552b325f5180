"""Release of this headrace, and in a checkout its commit."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"


@cache
def release() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return UNKNOWN


def full_release() -> str:
    """Release and commit, as `headrace --version` says them; of this process, even if the files change meanwhile.

    Example: "0.1.0 (9f00a1b2c3d4)"
    """
    return release() + (f" ({commit()})" if commit() else "")


@cache
def commit(root: Path = ROOT) -> str:
    """The commit of a checkout, with "+changes" if files that git knows differ from it; "" outside of a checkout."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
