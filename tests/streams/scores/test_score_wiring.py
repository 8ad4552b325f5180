"""Every built-in score, wired from one settings file as `headrace check` does it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.sandbox.confining import sandbox_or_skip

SETTINGS = """
app = "scores"

[policy]
name = "main"

[[score]]
name = "exact"
use = "streams.scores.exact:exact"

[[score]]
name = "format"
use = "streams.scores.format:format"
options = { pattern = ".*" }

[[score]]
name = "math"
use = "streams.scores.math:Math"

[[score]]
name = "code"
use = "streams.scores.code:Code"
options = { partial = true, limits = { wall_s = 5.0, memory_bytes = 268435456 } }
timeout_s = 60

[[score]]
name = "school"
use = "streams.scores.k12:k12"
options = { tolerance = 0.02 }

[[score]]
name = "seen"
use = "streams.scores.vision:vision"
options = { kind = "box", format = "xywh", threshold = 0.7 }

[[score]]
name = "judge"
use = "streams.scores.judge:Judge"
options = { endpoint = { url = "http://127.0.0.1:9/v1", model = "judge" }, high = 5 }

[[score]]
name = "rubric"
use = "streams.scores.rubric:Rubric"
options = { endpoint = { url = "http://127.0.0.1:9/v1", model = "judge" }, criteria = ["short", { text = "true", weight = 2 }] }

[[score]]
name = "learned"
use = "streams.scores.model:Model"
options = { folder = "FOLDER", policy = "reward" }

[reward]
blend = { code = 1.0, learned = 0.5 }
"""


@pytest.mark.slow
def test_check_wires_every_score_with_its_options(tmp_path: Path) -> None:
    sandbox_or_skip()
    (tmp_path / "config.json").write_text(json.dumps({}))
    path = tmp_path / "headrace.toml"
    path.write_text(SETTINGS.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    command = [sys.executable, "-m", "infra.cli.main", "check", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("exact", "format", "math", "code", "school", "seen", "judge", "rubric", "learned"):
        assert f" {name} " in done.stdout, done.stdout
