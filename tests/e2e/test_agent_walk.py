"""The walk of the README's "Train the agent that you have": its files and commands as they stand there, in an empty folder.

At its end the agent's tokens were recorded and trained, and a version that learned from them is sampled from.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.cli.commands.init import example_files
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
        serving = rf"explore/\S+ +│ serving +│ v(?:{learned}|[1-9]\d*) "
        assert walk.said(status, running, until=serving)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(timeout=60)
    assert running.returncode in (0, 130)


def test_the_readme_s_agent_takes_ten_lines_of_settings_and_five_commands() -> None:
    lines = example_files("program")["headrace.toml"].read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) <= 10 and len(commands()) == 5
    assert 'explore.options.use = "my_agent:run"' in section()
