"""The environment of the benchmarks' peers: packages that headrace does not need and that want versions of their own.

`make bench-deps` makes it beside headrace's own. Nothing here installs anything; what is missing is printed in one line.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any


def bench_python() -> Path:
    """Its Python, whether or not it is there."""
    return Path(sys.prefix) / "bench" / "bin" / "python"


def lacks(module: str, python: Path) -> str:
    """Why a module of the environment of that Python cannot be had, "" where it can."""
    if not python.exists():
        return f"no {module}: `make bench-deps` installs it"
    looked = [str(python), "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"]
    return f"no {module} in {python.parent.parent}: `make bench-deps`" if subprocess.run(looked).returncode else ""


def find_orjson() -> Any:
    """orjson, which needs nothing besides itself, from headrace's environment or from that of the peers; None where neither has
    it.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = str(Path(sys.prefix) / "bench" / "lib" / version / "site-packages")
    sys.path.append(packages)
    try:
        import orjson

        return orjson
    except ImportError:
        return None
    finally:
        sys.path.remove(packages)
