"""Exit codes of the commands, and the causes of failure that a restart cannot fix. `reference/commands.md` has the table."""

import os
import re
import stat
from pathlib import Path

DONE = 0
FAILED = 1
CONFIG_ERROR = 2
FENCED_OUT = 3
INTERRUPTED = 130
STOPPED = 143  # 128 and SIGTERM, as a shell reports it

# A library's own words for a cause in the settings or the model, which a restart cannot fix.
FINAL_WORDS = re.compile(
    r"larger than the available KV cache memory|No available memory for the cache blocks|max_model_len|model's max seq len"
    r"|are not supported for now|does not recognize this architecture|does not appear to have a file named"
    r"|trust_remote_code|Can't load the configuration of|is not a valid model identifier|not divisible by tensor parallel"
)
TAIL_BYTES = 65_536
_BEGIN = "started role="  # the first line of each life of a role
_SEE_ABOVE = re.compile("root cause above|for the root cause")  # vLLM's process says only that another has failed
_ERROR = re.compile(
    r"^(?:\([^)]*\) )?(?:(?:ERROR|CRITICAL) .*?\] )?(headrace: .+|(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Stopped)(?:: .+)?)$"
)


def exit_code(errors: list[BaseException]) -> int:
    """The code of a command that ended with these errors."""
    from schemas.errors import BrokerDenies, ConfigError, FencedOut, SandboxUnavailable, UnknownMajor

    if any(isinstance(error, FencedOut) for error in errors):
        return FENCED_OUT
    final = (ConfigError, BrokerDenies, SandboxUnavailable, UnknownMajor)
    return CONFIG_ERROR if all(isinstance(error, final) for error in errors) else FAILED


def last_error(log: Path) -> str:
    """The cause of a role's end, as the last lines of its log name it; its last line where none names an error, "" for none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = text.rpartition(_BEGIN)[2].strip().splitlines()
    found = [match[1] for line in lines if not _SEE_ABOVE.search(line) and (match := _ERROR.match(line.rstrip()))]
    return (found or lines or [""])[-1].removeprefix("headrace: ")


def root_cause(error: BaseException) -> str:
    """One line about an error of a role. Where an engine's process has failed, the role's log names the cause, if a file."""
    from schemas.errors import HeadraceError, causes

    first = causes(error)[0]
    is_above = _SEE_ABOVE.search(str(first)) and stat.S_ISREG(os.fstat(2).st_mode)
    found = last_error(Path(os.readlink("/proc/self/fd/2"))) if is_above else ""
    return found or (str(first) if isinstance(first, HeadraceError) else f"{type(first).__name__}: {first}")
