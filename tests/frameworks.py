"""The Python that has the agent frameworks of others, where it is installed; HEADRACE_REQUIRE_AGENTS=1 turns its absence into a
failure.
"""

import os
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[1] / ".venv" / "agents" / "bin" / "python"


def frameworks_or_skip() -> Path:
    """Its path, or the end of the test."""
    if not PYTHON.exists():
        if os.environ.get("HEADRACE_REQUIRE_AGENTS") == "1":
            pytest.fail(f"HEADRACE_REQUIRE_AGENTS=1, and there is no {PYTHON}: make agents")
        pytest.skip(f"no {PYTHON}: make agents")
    return PYTHON
