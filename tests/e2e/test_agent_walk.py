"""The walk of the README's "Train the agent that you have": its files and commands as they stand there, in an empty folder.

At its end the agent's tokens were recorded and trained, and a version that learned from them is sampled from.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.cli.commands.init import example_files
from infra.cli.demo.char_model import build_char_model
from infra.local.broker import choose_address
from tests.infra.test_docs import ROOT

LIMIT_S = 300.0


def section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^### Train the agent that you have\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return str(found)


def fences(language: str) -> list[tuple[str, str]]:
    """What stands behind the language, and the text."""
    return re.findall(rf"^```{language}([^\n]*)\n(.*?)^```$", section(), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """With the headrace of this environment in place of the word."""
    ((_, text),) = fences("sh")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert all(words[0] == "headrace" for words in lines)
    return [[sys.executable, "-m", "infra.cli.main", *words[1:]] for words in lines]


class Walk:
    """Types the commands in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deadline_s = time.monotonic() + LIMIT_S
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'infra' / 'sdk'}"}

    def begin(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """One that goes on."""
        with (self.folder / "up.out").open("wb") as output:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def said(self, command: list[str], up: "subprocess.Popen[bytes] | None" = None, until: str = "") -> str:
        """What a command says, typed again until its words are there, as people do who are early."""
        while True:
            done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
            if done.returncode == 0 and re.search(until, done.stdout):
                return done.stdout
            words = f"{command}: {done.stdout}{done.stderr}"
            assert up is None or up.poll() is None, words + (self.folder / "up.out").read_text()
            assert time.monotonic() < self.deadline_s and up is not None, words + self.last_words()
            time.sleep(0.5)

    def last_words(self) -> str:
        return "".join(f"\n{item.name}: {item.read_text()[-600:]}" for item in self.folder.glob("mine/logs/*.log"))


@pytest.mark.full
def test_the_walk_of_the_readme_ends_with_a_served_version_that_learned_from_the_agent(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    init, up, load, trace, status = commands()
    walk.said(init)
    ((name, agent),) = fences("python agent")
    file = tmp_path / name.strip()
    assert file.read_text().endswith(f'"""\n\n{agent}'), (
        "init writes what the README shows, below a line that says what it is"
    )
    file.write_text(agent)
    running = walk.begin(up)
    try:
        walk.said(load, running)
        told = walk.said(trace, running, until=r"learned in version (\d+)")
        assert re.search(r"answered +'.*' +\d+ tokens of v\d+", told) and "judged        program " in told
        learned = int(re.findall(r"learned in version (\d+)", told)[0])
        serving = rf"explore/\S+ +serving +v(?:{learned}|[1-9]\d*) "
        assert walk.said(status, running, until=serving)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(timeout=60)
    assert running.returncode in (0, 130)


def test_the_readme_s_agent_takes_ten_lines_of_settings_and_five_commands() -> None:
    lines = example_files("program")["headrace.toml"].read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) <= 10 and len(commands()) == 5
    assert 'explore.options.use = "my_agent:run"' in section()


ASK: Any = [{"role": "user", "content": "37+45="}]
WALK_S = 180.0
NUM_RATED = 80  # a step takes 64, and an answer of a single token is dropped


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infra.cli.main", *arguments]


@pytest.mark.slow
def test_init_up_a_first_answer_and_a_version_that_learned_from_what_was_said(tmp_path: Path) -> None:
    folder, listen = tmp_path / "support", f"127.0.0.1:{choose_address().port}"
    subprocess.run(headrace("init", str(folder), "--engine", "torch"), check=True, capture_output=True, timeout=60)
    build_char_model(folder / "model", seed=0)
    config = folder / "headrace.toml"
    said = folder / "up.out"
    # The differences from the README: a port of its own, short answers from a model that never learned to end one, and a
    # version after ten seconds for those that wait for this test; by the file the first comes after five minutes.
    sets = (f"gateway.listen={listen}", "gateway.limits.max_tokens=8", "trainer.min_publish_interval=10s")
    command = headrace("up", "-c", str(config), *(word for item in sets for word in ("--set", item)))
    with said.open("wb") as output:
        up = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        base_url, key = door(said, up)
        assert base_url == f"http://{listen}/v1"
        client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)
        answer = first_answer(client, up, said)
        assert answer.choices[0].message.content is not None and answer.id.startswith("hr-")
        assert recorded(config)["newest"] == answer.id
        assert answer.id in subprocess.run(
            headrace("status", "-c", str(config)), check=True, capture_output=True, text=True, timeout=60
        ).stdout.replace("\n", "")
        say_once(config, "trace", answer.id, until="for feedback until its window ends")
        say_once(config, "status", until=r"waiting +1 answers for feedback; the first window closes in \d+ (min|s)")
        rate(client, [answer.id, *(ask(client).id for _ in range(NUM_RATED - 1))])
        say_once(config, "trace", answer.id, until=r"learned in version [1-9]")
        edited = {"answer_id": ask(client).id, "correction": "82"}
        client.post("/feedback", cast_to=object, body=edited)
        say_once(config, "peek", "buffer", "-n", "5", until=r"lane expert")
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(timeout=60)


def ask(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="main", messages=ASK)


def rate(client: openai.OpenAI, answers: list[str]) -> None:
    """Every second one is good: of what is all alike none has an advantage."""
    for number, answer in enumerate(answers):
        client.post("/feedback", cast_to=object, body={"answer_id": answer, "value": float(number % 2)})


def say_once(config: Path, *command: str, until: str) -> None:
    """Type a command again until it says what is expected."""
    deadline = time.monotonic() + WALK_S
    while True:
        typed = headrace(*command, "-c", str(config))
        told = subprocess.run(typed, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
        if re.search(until, told.stdout):
            return
        logs = "".join(log.read_text()[-800:] for log in config.parent.glob("logs/*.log"))
        assert time.monotonic() < deadline, told.stdout + told.stderr + logs
        time.sleep(0.5)


def door(said: Path, up: "subprocess.Popen[bytes]") -> tuple[str, str]:
    """The base_url and the key that `up` prints."""
    deadline = time.monotonic() + WALK_S
    while not (found := re.search(r"base_url (\S+).*api_key  (\S+)", said.read_text(), re.DOTALL)):
        assert up.poll() is None and time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)
    return found[1], found[2]


def first_answer(client: openai.OpenAI, up: "subprocess.Popen[bytes]", said: Path) -> Any:
    """As soon as the model is loaded."""
    deadline = time.monotonic() + WALK_S
    while True:
        try:
            return ask(client)
        except openai.APIConnectionError:
            logs = "".join(log.read_text()[-1000:] for log in said.parent.glob("logs/serve.log"))
            assert up.poll() is None and time.monotonic() < deadline, said.read_text() + logs
            time.sleep(0.1)


def recorded(config: Path) -> dict[str, Any]:
    """The newest answer that status knows, once it knows one."""
    deadline = time.monotonic() + WALK_S
    while True:
        told = subprocess.run(
            headrace("status", "--json", "-c", str(config)), check=True, capture_output=True, text=True, timeout=60
        )
        if answers := json.loads(told.stdout)["answers"]:
            return dict(answers)
        assert time.monotonic() < deadline, told.stdout
