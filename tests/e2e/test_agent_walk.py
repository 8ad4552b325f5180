"""Walks of the README: its files and commands as they stand there, in an empty folder, to a version that learned."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.cli.commands.init import example_files
from infra.cli.demo.char_model import build_char_model
from infra.local.broker import choose_address
from tests.own_sources import ROOT

LIMIT_S = 300.0
ASK: Any = [{"role": "user", "content": "37+45="}]
NUM_RATED = 80  # a step takes 64, and an answer of a single token is dropped


def section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^### Train the agent that you have\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return str(found)


def fences(language: str) -> list[tuple[str, str]]:
    """Words after the language of each fence, and its text."""
    return re.findall(rf"^```{language}([^\n]*)\n(.*?)^```$", section(), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Words of each command, without `headrace`."""
    ((_, text),) = fences("sh")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert all(words[0] == "headrace" for words in lines)
    return [words[1:] for words in lines]


class Walk:
    """Types commands in a folder, while `headrace up` runs there once it was begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed = folder / "up.out"
        self._deadline_s = time.monotonic() + LIMIT_S
        self._environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'infra' / 'sdk'}", "COLUMNS": "200"}
        self._up: subprocess.Popen[bytes] | None = None

    def type(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "infra.cli.main", *words]
        return subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=60
        )

    @contextmanager
    def up(self, *words: str) -> Iterator[None]:
        """`headrace up`, ended with Ctrl-C after the block."""
        command = [sys.executable, "-m", "infra.cli.main", *words]
        with self._printed.open("wb") as output:
            self._up = subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield
        finally:
            self._up.send_signal(signal.SIGINT)
            self._up.wait(timeout=60)
        assert self._up.returncode in (0, 130)

    def wait(self, said: str) -> None:
        """Go on, but not without `up` nor past the deadline."""
        logs = "".join(f"\n{item.name}: {item.read_text()[-800:]}" for item in self.folder.rglob("logs/*.log"))
        running = self._up is not None and self._up.poll() is None
        assert running and time.monotonic() < self._deadline_s, f"{said}\n{self.printed()}{logs}"
        time.sleep(0.5)

    def printed(self) -> str:
        """Output of `up`."""
        return self._printed.read_text() if self._printed.exists() else ""

    def said(self, *words: str, until: str = "") -> str:
        """Output of a command, repeated until it contains the expected words."""
        while True:
            done = self.type(*words)
            if done.returncode == 0 and re.search(until, done.stdout):
                return done.stdout
            self.wait(f"{words}: {done.stdout}{done.stderr}")


@pytest.mark.full
def test_the_walk_of_the_readme_ends_with_a_served_version_that_learned_from_the_agent(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    init, up, load, trace, status = commands()
    assert walk.type(*init).returncode == 0
    ((name, agent),) = fences("python agent")
    file = tmp_path / name.strip()
    assert file.read_text().endswith(f'"""\n\n{agent}'), "init writes what the README shows, below a line about it"
    file.write_text(agent)
    with walk.up(*up):
        walk.said(*load)
        told = walk.said(*trace, until=r"learned in version (\d+)")
        assert re.search(r"answered +'.*' +\d+ tokens of v\d+", told) and "judged        program " in told
        walk.said(*status, until=r"explore/\S+ +serving +v[1-9]\d* ")


def test_the_readme_s_agent_takes_ten_lines_of_settings_and_five_commands() -> None:
    lines = example_files("program")["headrace.toml"].read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) <= 10 and len(commands()) == 5
    assert 'explore.options.use = "my_agent:run"' in section()


@pytest.mark.slow
def test_init_up_a_first_answer_and_a_version_that_learned_from_what_was_said(tmp_path: Path) -> None:
    walk, listen = Walk(tmp_path), f"127.0.0.1:{choose_address().port}"
    assert walk.type("init", "support", "--engine", "torch").returncode == 0
    build_char_model(tmp_path / "support" / "model", seed=0)
    file = ("-c", "support/headrace.toml")
    # The differences from the README: a port of its own, short answers from a model that never learned to end one, and a
    # version after ten seconds for those that wait for this test; by the file the first comes after five minutes.
    sets = (f"gateway.listen={listen}", "gateway.limits.max_tokens=8", "trainer.min_publish_interval=10s")
    with walk.up("up", *file, *(word for item in sets for word in ("--set", item))):
        while not (door := re.search(r"base_url (\S+).*api_key  (\S+)", walk.printed(), re.DOTALL)):
            walk.wait("no base_url and no api_key")
        assert door[1] == f"http://{listen}/v1"
        client = openai.OpenAI(base_url=door[1], api_key=door[2], max_retries=0, timeout=60)
        answer = first_answer(walk, client)
        assert answer.choices[0].message.content is not None and answer.id.startswith("hr-")
        newest = walk.said("status", "--json", *file, until=r'"newest": ?"hr-')
        assert json.loads(newest)["answers"]["newest"] == answer.id
        assert answer.id in walk.said("status", *file).replace("\n", "")
        walk.said("trace", answer.id, *file, until="for feedback until its window ends")
        walk.said("status", *file, until=r"waiting +1 answers for feedback; the first window closes in \d+ (min|s)")
        rated = [answer.id, *(ask(client).id for _ in range(NUM_RATED - 1))]
        rate(client, rated)
        # A step draws 64 of the answers at random; the others wait in the buffer for the next step.
        names = itertools.cycle(rated)
        while "learned in version" not in walk.type("trace", next(names), *file).stdout:
            walk.wait("no version learned from any of them")
        edited = {"answer_id": ask(client).id, "correction": "82"}
        client.post("/feedback", cast_to=object, body=edited)
        walk.said("peek", "buffer", "-n", "5", *file, until=r"lane expert")


def ask(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="main", messages=ASK)


def rate(client: openai.OpenAI, answers: list[str]) -> None:
    """Every second one is good: of what is all alike none has an advantage."""
    for number, answer in enumerate(answers):
        client.post("/feedback", cast_to=object, body={"answer_id": answer, "value": float(number % 2)})


def first_answer(walk: Walk, client: openai.OpenAI) -> Any:
    """The first answer after the model is loaded."""
    while True:
        try:
            return ask(client)
        except openai.APIConnectionError as error:
            walk.wait(f"no answer: {error}")
