"""A sandbox for tests, where this machine has one; HEADRACE_REQUIRE_SANDBOX=1 turns its absence into a failure."""

import os

import pytest

from infra.sandbox.command import SandboxLimits
from infra.sandbox.sandbox import Sandbox
from schemas.errors import SandboxUnavailable

PATIENT = SandboxLimits(wall_s=60.0)


def sandbox_or_skip(limits: SandboxLimits = PATIENT, *, as_root: bool | None = None) -> Sandbox:
    """A sandbox, or the end of the test."""
    try:
        return Sandbox(limits, as_root=as_root)
    except SandboxUnavailable as error:
        if os.environ.get("HEADRACE_REQUIRE_SANDBOX") == "1":
            pytest.fail(f"HEADRACE_REQUIRE_SANDBOX=1, and {error}")
        pytest.skip(str(error))
