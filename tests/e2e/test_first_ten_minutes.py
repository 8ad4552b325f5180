"""The walk of the README: init, up, a first answer with the openai client, and status shows that it was recorded."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.demo.char_model import build_char_model
from infra.local.address import choose_address

pytestmark = pytest.mark.slow

ASK: Any = [{"role": "user", "content": "37+45="}]
LIMIT_S = 180.0


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infra.cli.main", *arguments]


def test_init_up_a_first_answer_and_status_shows_that_it_was_recorded(tmp_path: Path) -> None:
    folder, listen = tmp_path / "support", f"127.0.0.1:{choose_address().port}"
    subprocess.run(headrace("init", str(folder), "--engine", "torch"), check=True, capture_output=True, timeout=60)
    build_char_model(folder / "model", seed=0)
    config = folder / "headrace.toml"
    said = folder / "up.out"
    # The one difference from the README: a port of its own, and short answers from a model that never learned to end one.
    command = headrace("up", "-c", str(config), "--set", f"gateway.listen={listen}", "--set", "gateway.limits.max_tokens=8")
    with said.open("wb") as output:
        up = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        base_url, key = door(said, up)
        assert base_url == f"http://{listen}/v1"
        answer = first_answer(openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60), up, said)
        assert answer.choices[0].message.content is not None and answer.id.startswith("hr-")
        serve = reported(config)
        assert serve["gauges"]["answers_recorded"] == 1.0 and serve["version"] == 0
        peeked = subprocess.run(
            headrace("peek", "experiences", "-c", str(config)), check=True, capture_output=True, text=True, timeout=60
        )
        assert answer.id.removeprefix("hr-") in peeked.stdout
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(timeout=60)
