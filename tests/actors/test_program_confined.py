"""A program's command in the sandbox: it reaches its base URL and its folder, and nothing else."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.program.workflow import Program
from actors.rollout.workflow import EpisodeFailed
from schemas import Score
from schemas.errors import ConfigError
from tests.actors.gateway.gateway_rig import EOS
from tests.actors.rig import until
from tests.actors.test_program import PROMPT, SCRIPT, play
from tests.infra.sandbox.confining import sandbox_or_skip


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    sandbox_or_skip()


def confined(tmp_path: Path, ending: str, **limits: Any) -> Program:
    """A program of one script, in a folder that everyone can read, as an operator keeps it."""
    folder = tmp_path / "agent"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    (folder / "words.txt").write_text("mine")
    (folder / "agent.py").write_text(SCRIPT + ending)
    command = (sys.executable, "-I", str(folder / "agent.py"))
    return Program(command=command, sandbox={"folders": [str(folder), sys.prefix], "limits": limits})


def tried(tmp_path: Path, code: str) -> str:
    """What a confined program notes of an attempt: what it got, or why it did not."""
    indented = "\n".join(f"    {line}" for line in code.strip().splitlines())
    ending = f"\ntry:\n{indented}\nexcept OSError as error:\n    got = type(error).__name__\n"
    ending += "print(json.dumps({'answer': str(got)}))\n"
    _, (experience,), _ = play(confined(tmp_path, ending))
    assert experience.tokens.tolist() == [*PROMPT, *b"Hello.", EOS], "it reached its base URL"
    return str(experience.notes["answer"])


def test_a_confined_command_reaches_its_base_url_and_gives_back_its_result(tmp_path: Path) -> None:
    scores, (experience,), _ = play(confined(tmp_path, 'print(json.dumps({"reward": 1, "answer": task["id"]}))'))
    assert scores == (Score(name="program", value=1.0),)
    assert experience.tokens.tolist() == [*PROMPT, *b"Hello.", EOS] and experience.notes["answer"] == "t"


def test_a_confined_command_reads_its_folder_and_cannot_write_it(tmp_path: Path) -> None:
    words = tmp_path / "agent" / "words.txt"
    assert tried(tmp_path, f"got = open({str(words)!r}).read()") == "mine"
    assert tried(tmp_path, f"got = open({str(words)!r}, 'w')") == "OSError"


def test_a_confined_command_reads_no_file_outside_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "secret.txt"
    outside.write_text("secret")
    for path in (outside, Path(__file__), Path("/etc/passwd"), Path("/proc/1/environ")):
        assert tried(tmp_path, f"got = open({str(path)!r}).read()") == "FileNotFoundError"


@pytest.mark.parametrize(
    "address", ["('127.0.0.1', {port})", "('10.0.0.1', 80)", "('1.1.1.1', 53)", "('::1', {port}, 0, 0)"]
)
async def test_a_confined_command_reaches_no_network_outside(tmp_path: Path, address: str) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    family = "socket.AF_INET6" if "::" in address else "socket.AF_INET"
    code = f"import socket\ngot = socket.socket({family}).connect({address.format(port=port)})"
    got = await asyncio.to_thread(tried, tmp_path, code)
    server.close()
    assert got in ("ConnectionRefusedError", "OSError")


LEFT = """
import subprocess, time
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600) # {mark}"], start_new_session=True)
"""


def with_mark(mark: str) -> list[str]:
    """Processes of this machine that carry a mark in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            found += [entry.name] if mark.encode() in (entry / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


def test_what_a_confined_command_leaves_behind_ends_with_its_episode(tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}-{time.monotonic_ns()}"
    scores, _, _ = play(confined(tmp_path, LEFT.format(mark=mark) + "time.sleep(0.2)\nprint(1)\n"))
    assert scores == (Score(name="program", value=1.0),)
    assert not with_mark(mark), "also those in sessions of their own"


async def test_a_confined_command_ends_with_an_episode_that_is_cut_off(tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}-{time.monotonic_ns()}"
    program = confined(tmp_path, LEFT.format(mark=mark) + "time.sleep(600)\n")
    playing = asyncio.create_task(asyncio.to_thread(play, program, stop=lambda: bool(with_mark(mark))))
    await until(playing.done, seconds=60.0)
    with pytest.raises(asyncio.CancelledError):
        playing.result()
    assert not with_mark(mark)


@pytest.mark.parametrize(
    ("ending", "limits", "message"),
    [
        ("sys.exit(3)", {}, "ended with 3"),
        ("x = bytearray(200 << 20)\nimport time\ntime.sleep(60)", {"total_bytes": 100 << 20}, "was stopped: memory"),
        ("while True: print('x' * 9999)", {}, "was stopped: output limit"),
        ("import subprocess\nwhile True: subprocess.Popen(['sleep', '9'])", {"processes": 24}, "BlockingIOError"),
    ],
)
def test_a_confined_command_that_crashes_or_floods_fails_its_episode_alone(
    tmp_path: Path, ending: str, limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(EpisodeFailed, match=message) as failed:
        play(confined(tmp_path, ending, **limits))
    assert failed.value.cause == "agent"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use": "print:print", "sandbox": {}}, "sandbox without command"),
        ({"command": ["x"], "sandbox": {"folders": ["/nowhere"]}}, "expected a folder"),
        ({"command": ["x"], "sandbox": {"limits": {"wall": 1}}}, "program.sandbox.limits"),
        ({"command": ["x"], "sandbox": {"network": True}}, "network"),
    ],
)
def test_mistakes_of_a_confinement_are_found_when_the_role_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Program(**options)
