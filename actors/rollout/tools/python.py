"""Tool that runs the policy's Python code in `infra.sandbox`.

Guarantees: nothing runs unconfined; without a sandbox the tool does not load. Every call is a new process that leaves nothing
behind.
"""

from collections.abc import Mapping
from typing import Any

from infra.sandbox.command import PROGRAM, SandboxLimits
from infra.sandbox.sandbox import Sandbox
from infra.settings.config import decode

SCRIPT = "call.py"
NOTHING = "(it printed nothing)"
MAX_OUTPUT_CHARS = 400  # the end of a traceback names the error; a failure holds 500 characters


class Python:
    """Run a Python program without network, files or installed packages, and get what it printed.

    Nothing is kept between calls.
    """

    name = "python"

    def __init__(self, *, limits: Mapping[str, Any] | None = None, concurrency: int = 0) -> None:
        """limits: Resource limits of a call, see `infra.sandbox.command.SandboxLimits`. concurrency: Maximum concurrent calls.
        0: one per CPU. The workflow's timeout_s includes the wait for a free call.
        """
        self._sandbox = Sandbox(decode(dict(limits or {}), SandboxLimits, "tool.limits"), concurrency=concurrency)

    def __call__(self, code: str) -> str:
        """Standard output. Raises ValueError with the last of standard error for a program that failed or was stopped."""
        command = self._sandbox.python_command(f"{PROGRAM}/{SCRIPT}")
        finished = self._sandbox.run(command, files={SCRIPT: code.encode("utf-8", "replace")})
        printed = finished.stdout.decode("utf-8", "replace")
        if finished.code == 0:
            return printed or NOTHING
        why = finished.fault or f"exit code {finished.code}"
        output = "\n".join(part for part in (printed, finished.stderr.decode("utf-8", "replace").strip()) if part)
        raise ValueError(f"{why}\n{output[-MAX_OUTPUT_CHARS:]}")
