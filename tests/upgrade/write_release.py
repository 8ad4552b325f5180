"""Keeps what this release writes: `python -m tests.upgrade.write_release`, once, before it is tagged.

It makes `tests/upgrade/releases/<release>/<part>/` and, beside each, `<part>.json` with what is read from it. What is there
already stays as it is: bytes of a release never change, so a release that has a new part gets that part alone.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from infra.observe.release import release
from tests.upgrade.parts import PARTS, UpgradePart

RELEASES = Path(__file__).parent / "releases"


def keep(folder: Path, parts: dict[str, UpgradePart]) -> list[str]:
    """Write those parts that are not there; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    new = [name for name in parts if not (folder / name).exists() and not (folder / f"{name}.json").exists()]
    for name in new:
        with tempfile.TemporaryDirectory() as place:
            made = Path(place) / name
            parts[name].write(made)
            picture = json.dumps(reading(made, parts[name]), indent=1)
            shutil.copytree(made, folder / name, ignore=shutil.ignore_patterns(".*"))
        (folder / f"{name}.json").write_text(picture + "\n")
    return new


def reading(folder: Path, part: UpgradePart) -> object:
    """What is read from a copy of the folder."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / folder.name))
        return json.loads(json.dumps(part.read(copy)))


def main() -> int:
    folder = RELEASES / release()
    new = keep(folder, PARTS)
    print(f"{folder}: {', '.join(new)}" if new else f"{folder}: all parts are there, and nothing was changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
