"""The walk of the README: init, up, answers with the openai client, ratings, and the version that learned from them."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.cli.demo.char_model import build_char_model
from infra.local.address import choose_address

pytestmark = pytest.mark.slow

ASK: Any = [{"role": "user", "content": "37+45="}]
LIMIT_S = 180.0


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infra.cli.main", *arguments]


def test_init_up_answers_that_wait_are_rated_and_a_version_learns_from_them(tmp_path: Path) -> None:
    folder, listen = tmp_path / "support", f"127.0.0.1:{choose_address().port}"
    subprocess.run(headrace("init", str(folder), "--engine", "torch"), check=True, capture_output=True, timeout=60)
    build_char_model(folder / "model", seed=0)
    config = folder / "headrace.toml"
    said = folder / "up.out"
    # The differences from the README: a port of its own, short answers from a model that never learned to end one, and
    # neither a session nor a version waits for five minutes.
    sets = (
        f"gateway.listen={listen}", "gateway.limits.max_tokens=8", "trainer.version_every=1s", "collect.session_s=1",
    )  # fmt: skip
    command = headrace("up", "-c", str(config), *[word for one in sets for word in ("--set", one)])
    with said.open("wb") as output:
        up = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        base_url, key = door(said, up)
        assert base_url == f"http://{listen}/v1"
        client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)
        answer = first_answer(client, up, said)
        assert answer.choices[0].message.content is not None and answer.id.startswith("hr-")
        assert recorded(config)["newest"] == answer.id
        assert answer.id in told(config, "status").replace("\n", "")
        until(lambda: told(config, "trace", answer.id), "it waits for feedback of user, until ")
        until(
            lambda: told(config, "status"), r"1 groups wait for members, feedback or their session; the first is closed"
        )
        # A step waits for 64; of what an untrained model says, many are dropped as too short or as loops.
        answers = [answer, *(client.chat.completions.create(model="main", messages=sum_of(at)) for at in range(159))]
        for at, one in enumerate(answers):
            client.post("/feedback", cast_to=object, body={"answer_id": one.id, "value": float(at % 2)})
        until(lambda: told(config, "trace", answer.id), "learned in version 1;")
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(timeout=60)


def sum_of(at: int) -> Any:
    """A question of its own."""
    return [{"role": "user", "content": f"{10 + at}+{12 + at}="}]


def told(config: Path, *arguments: str) -> str:
    """What a command prints."""
    command = headrace(*arguments, "-c", str(config))
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def until(say: Callable[[], str], words: str) -> None:
    """Until it says so."""
    deadline = time.monotonic() + LIMIT_S
    while not re.search(words, found := " ".join(say().split())):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def door(said: Path, up: "subprocess.Popen[bytes]") -> tuple[str, str]:
    """The base_url and the key that `up` prints."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := re.search(r"base_url (\S+).*api_key  (\S+)", said.read_text(), re.DOTALL)):
        assert up.poll() is None and time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)
    return found[1], found[2]


def first_answer(client: openai.OpenAI, up: "subprocess.Popen[bytes]", said: Path) -> Any:
    """As soon as the model is loaded."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return client.chat.completions.create(model="main", messages=ASK)
        except openai.APIConnectionError:
            logs = "".join(log.read_text()[-1000:] for log in said.parent.glob("logs/serve.log"))
            assert up.poll() is None and time.monotonic() < deadline, said.read_text() + logs
            time.sleep(0.1)


def recorded(config: Path) -> dict[str, Any]:
    """The newest answer that status knows, once it knows one."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        told = subprocess.run(
            headrace("status", "--json", "-c", str(config)), check=True, capture_output=True, text=True, timeout=60
        )
        if answers := json.loads(told.stdout)["answers"]:
            return dict(answers)
        assert time.monotonic() < deadline, told.stdout
