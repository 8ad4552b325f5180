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
    """The commit of a checkout, with "+changes" where files that git knows differ from it; "" outside of one."""
    if not (root / ".git").exists():
        return ""
    found = [_git(root, "rev-parse", "--short=12", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")]
    if None in found or not found[0]:
        return ""
    return f"{found[0]}+changes" if found[1] else found[0]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
