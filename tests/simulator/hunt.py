"""Plants the bugs of `bugs/` one at a time in a copy of the source, and lets the simulator find each.

An edit says what it replaces, and not where: the one file of the source that has it, and that has `beside` where an edit names
that. So a bug survives a move of its code.

`python -m tests.simulator.hunt [NAME …]` prints one JSON line per bug: the seed that found it, the promise, and whether
the unpatched source is clean on the same seeds. A patch that no longer applies is an error that names it.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BUGS = Path(__file__).resolve().parent / "bugs"
PATCHED = ("schemas", "infra", "streams", "actors", "trainer")
COPIED = (*PATCHED, "tests/simulator")
COPIED_FILES = ("tests/__init__.py", "tests/role.py")
# Loaded once, before the forks: each child then only loads the source it is about.
HEAVY = (
    "torch",
    "numpy",
    "msgspec",
    "zstandard",
    "xxhash",
    "prometheus_client",
    "aiokafka",
    "safetensors",
    "uvicorn",
    "starlette",
)
MAX_SEEDS = 80


def read_bug(path: Path) -> dict[str, Any]:
    """A bug file; ValueError names a patch that does not apply to the source as it is."""
    bug = tomllib.loads(path.read_text())
    for edit in bug["edit"]:
        place_of(edit, ROOT, path.name)
    return bug


def place_of(edit: dict[str, str], source: Path, bug: str) -> Path:
    """The file that an edit is for. ValueError where what it replaces is in none, in several, or twice in one."""
    search, beside = edit["search"].removeprefix("\n"), edit.get("beside", "")
    found = {
        path: count
        for top in PATCHED
        for path in sorted((source / top).rglob("*.py"))
        if (count := (text := path.read_text()).count(search)) and beside in text
    }
    if sum(found.values()) != 1:
        counts = {str(path.relative_to(source)): count for path, count in found.items()}
        raise ValueError(f"{bug}: found in {counts or 'no file'}, expected once in one file:\n{search}")
    return next(iter(found))


def planted(bug: dict[str, Any], folder: Path) -> Path:
    """A copy of the source with the bug in it. Its bytecode comes along: what is not edited is not compiled anew."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("docs", "pictures")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy(ROOT / name, folder / name)
    places = [place_of(edit, folder, bug["says"]) for edit in bug["edit"]]
    for edit, path in zip(bug["edit"], places, strict=True):
        path.write_text(path.read_text().replace(edit["search"].removeprefix("\n"), edit["replace"].removeprefix("\n")))
    return folder


def simulate(source: Path, bug: dict[str, Any], seeds: range, answer: Path) -> None:
    """In a child: run seeds on this source until one complains; write (seed, promise, what)."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(source), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.chdir(source)
    from random import Random

    import msgspec

    from tests.simulator.faults import draw_mixture
    from tests.simulator.run import run_seed
    from tests.simulator.scenario import draw_scenario

    assert str(source) in str(sys.modules["tests.simulator.run"].__file__)
    found: tuple[int, str, str] = (-1, "", "")
    for seed in seeds:
        mixture = msgspec.structs.replace(draw_mixture(Random(f"mixture/{seed}")), **bug.get("mixture", {}))
        scenario = msgspec.structs.replace(draw_scenario(seed), **bug.get("scenario", {}))
        outcome = run_seed(seed, mixture=mixture, scenario=scenario)
        if outcome.violations:
            found = (seed, outcome.violations[0].promise, outcome.violations[0].what[:200])
            break
    answer.write_text(json.dumps(found))


def forked(source: Path, bug: dict[str, Any], seeds: range, answer: Path) -> int:
    """`simulate` in a child; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        simulate(source, bug, seeds, answer)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def hunt(name: str, folder: Path) -> dict[str, Any]:
    """One bug, and the unpatched source on the seeds it took."""
    bug = read_bug(BUGS / f"{name}.toml")
    begin = bug.get("begin", 0)
    began = time.monotonic()
    source = planted(bug, folder / name)
    os.waitpid(forked(source, bug, range(begin, begin + MAX_SEEDS), folder / f"{name}.json"), 0)
    seed, promise, what = read_answer(folder / f"{name}.json")
    clean: Any = None
    if seed >= 0:
        os.waitpid(forked(ROOT, bug, range(begin, seed + 1), folder / f"{name}.clean.json"), 0)
        at, broken, how = read_answer(folder / f"{name}.clean.json")
        clean = True if at == -1 else f"seed {at}: {broken}: {how}"
    shutil.rmtree(source)
    seconds = round(time.monotonic() - began, 1)
    return {"bug": name, "seed": seed, "promise": promise, "what": what, "clean": clean, "seconds": seconds}


def read_answer(path: Path) -> tuple[int, str, str]:
    if not path.exists():
        return -2, "the child died", ""
    seed, promise, what = json.loads(path.read_text())
    return seed, promise, what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names or sorted(path.stem for path in BUGS.glob("*.toml"))
    for name in names:
        read_bug(BUGS / f"{name}.toml")  # one that no longer applies is said before anything runs
    for module in HEAVY:
        __import__(module)
    with tempfile.TemporaryDirectory(prefix="hunt-") as folder:
        halves = [names[0::2], names[1::2]]
        children = []
        for half in halves:
            child = os.fork()
            if not child:
                for name in half:
                    print(json.dumps(hunt(name, Path(folder))), flush=True)
                os._exit(0)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
