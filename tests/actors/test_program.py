"""Any program that knows a base URL plays an episode, and what it asked the policy is what is recorded."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from actors.engines.engine import Sampling
from actors.engines.scripted import ScriptedEngine
from actors.master.plan import rollout
from actors.program.site import ProgramSite
from actors.program.workflow import Program
from actors.rollout.explorer import run_explorer
from actors.rollout.parts import AT_ONCE, OTHER, TEMPLATE_DIFFERS
from actors.rollout.session import Session
from actors.rollout.workflow import EpisodeFailed
from infra.observe.metrics import Metrics
from infra.settings.plugin import load
from schemas import Experience, Message, Score, Task
from schemas.errors import ConfigError
from schemas.topics import EXPERIENCES, TASKS
from tests.actors import agents_of_tests
from tests.actors.gateway.gateway_rig import EOS, VOCABULARY, ByteTokenizer, says
from tests.actors.rig import EXPLORE, FLOOR, MASTER, TopicArrivals, folder_store, gone, memory_log, running, task, until
from tests.http_endpoint import http_endpoint
from tests.role import role_of
from tests.variables import variables

ROOT = Path(__file__).parents[2]
AGENTS = "tests.actors.agents_of_tests"
TASK = Task(id="t", messages=(Message(role="user", content="Hi"),), answer="secret", split="train", meta={"level": 1})
PROMPT = ByteTokenizer().encode_request([{"role": "user", "content": "Hi"}])


class ChatBytes(ByteTokenizer):
    """One that a session can use too."""

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode_request([{"role": message.role, "content": message.content} for message in messages])


def play(program: Program, *texts: str, **more: Any) -> tuple[tuple[Score, ...], list[Experience], Session]:
    """Scores, and what was recorded of one episode. texts: what the policy says, in turn. more: of `episode`."""
    return asyncio.run(episode(program, TASK, *texts, **more))


async def episode(
    program: Program,
    task: Task,
    *texts: str,
    max_model_len: int = 4096,
    max_tokens: int = 64,
    token_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[tuple[Score, ...], list[Experience], Session]:
    """An episode of any task, played like `play`. stop: when it is cut off."""
    engine = ScriptedEngine(
        num_vocabulary=VOCABULARY, max_model_len=max_model_len, script=says(*(texts or ("Hello.",))), token_s=token_s
    )
    await engine.start()
    sampling = Sampling(max_tokens=max_tokens, stop=(EOS,), temperature=0.7)
    session = Session(engine, ChatBytes(), sampling)
    try:
        playing = asyncio.create_task(program(task, session))
        while not (await asyncio.wait([playing], timeout=0.01))[0]:
            if stop():
                playing.cancel()
                await asyncio.wait([playing])
        scores = playing.result()
    finally:
        found = session.experiences(group="t.0", attempt=0, episode=0)
    await engine.close()
    return scores, found, session


def function(name: str, **options: Any) -> Program:
    return Program(use=f"{AGENTS}:{name}", **options)


def test_every_token_of_every_turn_is_recorded_in_one_sequence_and_scored_where_it_was_said() -> None:
    scores, (experience,), _ = play(function("two_turns"), "One.", "Two.")
    assert scores == (Score(name="program", value=1.0),)
    assert experience.scores == (Score(name="polite", value=0.5, at=len(PROMPT) + 4),)
    follows = [*b"<user>and?", EOS, *b"<assistant>"]
    assert experience.tokens.tolist() == [*PROMPT, *b"One.", EOS, *follows, *b"Two.", EOS]
    assert [(span.temperature, span.ratio) for span in experience.spans] == [(0.7, True)] * 2, "as the task says"
    assert [message.content for message in experience.messages] == ["Hi", "One.", "and?", "Two."]
    assert (experience.end, experience.notes) == ("terminal", {"answer": "Two."})


@pytest.mark.parametrize(("page", "said"), [("README.md", "4242"), ("infra/docs/howto/train-an-agent.md", "It is 42.")])
def test_the_agent_of_the_documentation_is_trained_as_it_is_written_there(tmp_path: Path, page: str, said: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python agent[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(source.strip().splitlines()) <= 10
    name = f"agent_of_{page.rpartition('/')[2].partition('.')[0].lower().replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        scores, (experience,), _ = play(Program(use=f"{name}:run"), said)
    finally:
        sys.path.remove(str(tmp_path))
    assert scores == (Score(name="program", value=1.0),)
    assert experience.tokens.tolist() == [*PROMPT, *said.encode(), EOS]


@pytest.mark.parametrize(("name", "reward"), [("blocking", 0.25), ("messages", 7.0)])
def test_functions_may_block_and_may_speak_any_of_the_apis(name: str, reward: float) -> None:
    scores, (experience,), _ = play(function(name))
    assert scores == (Score(name="program", value=reward),)
    assert experience.tokens.tolist() == [*PROMPT, *b"Hello.", EOS]


def test_requests_at_once_and_sub_agents_are_sequences_of_their_own_each_with_its_reason() -> None:
    _, found, _ = play(function("at_once"), token_s=0.01)
    assert [entry.part_reason for entry in found] == ["", AT_ONCE, AT_ONCE, OTHER]
    assert [entry.last for entry in found] == [False, False, False, True]
    assert all(entry.tokens.tolist()[-7:] == [*b"Hello.", EOS] for entry in found)


def test_a_turn_with_other_tools_is_a_sequence_of_its_own() -> None:
    _, found, _ = play(function("drops_its_tools"))
    assert [entry.part_reason for entry in found] == ["", TEMPLATE_DIFFERS]
    assert found[1].tokens.tolist()[: len(PROMPT)] == PROMPT


class Meeting(ChatBytes):
    """Holds a thread that follows a conversation until another does so too, or long enough to see that none does."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)

    def decode(self, ids: Sequence[int]) -> str:
        if threading.current_thread() is not threading.main_thread():
            with suppress(threading.BrokenBarrierError):
                self._both.wait(timeout=0.5)
        return super().decode(ids)


async def test_of_two_requests_at_once_that_go_on_from_a_long_conversation_one_continues_its_sequence() -> None:
    engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=65_536, script=says("Hello."))
    await engine.start()
    session = Session(engine, Meeting(), Sampling(max_tokens=64, stop=(EOS,)))
    await function("two_after_much")(TASK, session)
    found = session.experiences(group="t.0", attempt=0, episode=0)
    assert [entry.num_sampled for entry in found] == [14, 7]


def test_a_function_runs_beside_the_explorer_s_loop_and_is_cancelled_there_with_its_episode() -> None:
    agents_of_tests.CUT_OFF.clear()
    with pytest.raises(asyncio.CancelledError):
        play(function("notes_its_thread"), stop=lambda: bool(agents_of_tests.CUT_OFF))
    asyncio.run(until(lambda: agents_of_tests.CUT_OFF == ["programs"]))


def test_an_episode_that_fills_its_context_is_truncated() -> None:
    scores, (experience,), _ = play(function("never_ends"), max_model_len=1000)
    assert scores == () and (experience.end, experience.truncated) == ("truncated", "context is full")
    assert experience.num_sampled == 4 * 7


async def test_a_key_opens_nothing_once_its_episode_is_over() -> None:
    program = function("keeps_its_key")
    engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("Hello."))
    await engine.start()
    await program(TASK, Session(engine, ChatBytes(), Sampling(max_tokens=64, stop=(EOS,))))
    url, key = agents_of_tests.LEFT.pop()
    async with httpx.AsyncClient(trust_env=False) as client:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        assert (await client.post(f"{url}/chat/completions", json=body, headers=headers)).status_code == 401


def test_what_a_client_did_not_get_is_not_recorded() -> None:
    scores, found, _ = play(function("goes_away"), "a" * 40, token_s=0.03)
    assert scores == (Score(name="program", value=1.0),)
    assert [entry.num_sampled for entry in found] == [41]


def test_a_request_in_flight_at_the_end_of_its_program_is_no_part_of_the_episode() -> None:
    _, found, _ = play(function("ends_in_mid_stream"), "a" * 40, token_s=0.03)
    agents_of_tests.OPEN.pop().close()
    assert [(entry.num_sampled, entry.last) for entry in found] == [(41, True)]


SCRIPT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.read())
body = json.dumps({"model": os.environ["HEADRACE_MODEL"], "messages": task["messages"]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.loads(urllib.request.urlopen(urllib.request.Request(url, body, headers)).read())
print("some words of the program")
"""


def command(tmp_path: Path, ending: str, **options: Any) -> Program:
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT + ending)
    return Program(command=(sys.executable, "-I", str(script)), **options)


def test_a_command_gets_its_task_without_the_answer_and_its_last_line_is_the_result(tmp_path: Path) -> None:
    told = 'print(json.dumps({"rewards": {"said": 1.0}, "answer": json.dumps(task)}))'
    scores, (experience,), _ = play(command(tmp_path, told))
    assert scores == (Score(name="said", value=1.0),)
    assert experience.tokens.tolist() == [*PROMPT, *b"Hello.", EOS]
    task = json.loads(str(experience.notes["answer"]))
    assert task == {"id": "t", "messages": [{"role": "user", "content": "Hi"}], "meta": {"level": 1}}


def test_a_command_sees_no_variables_of_the_explorer_but_those_it_is_given(tmp_path: Path) -> None:
    told = 'print(json.dumps({"answer": " ".join(sorted(os.environ))}))'
    with variables(AWS_SECRET_ACCESS_KEY="x"):
        _, (experience,), _ = play(command(tmp_path, told, environment={"MINE": "1"}))
    names = str(experience.notes["answer"]).split()
    assert "MINE" in names and "ANTHROPIC_BASE_URL" in names and "AWS_SECRET_ACCESS_KEY" not in names


@pytest.mark.parametrize(
    ("ending", "cause", "message"),
    [
        ("sys.exit(3)", "agent", "ended with 3"),
        ("raise LookupError('lost')", "agent", "LookupError: lost"),
        ("print('done')", "reward", "last line is no JSON: 'done'"),
        ("print(json.dumps({'rewards': 3}))", "reward", "expected nothing, a number, or an object"),
        (
            "print(json.dumps({'turns': [{'id': 'hr-no', 'rewards': {'x': 1}}]}))",
            "reward",
            "no answer has the id 'hr-no'",
        ),
        ("print('[' * 2_000_000)", "reward", "printed more than"),
    ],
)
def test_a_command_that_crashes_or_talks_nonsense_fails_its_episode_alone(
    tmp_path: Path, ending: str, cause: str, message: str
) -> None:
    with pytest.raises(EpisodeFailed, match=message) as failed:
        play(command(tmp_path, ending))
    assert failed.value.cause == cause


@pytest.mark.parametrize("how", ["stdout=-3, stderr=-3", "", "start_new_session=True"])
def test_a_command_s_result_waits_for_nothing_that_it_started_and_what_stays_in_its_group_ends_with_it(
    tmp_path: Path, how: str
) -> None:
    pid = tmp_path / "pid"
    left = (
        "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {how})\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print(1)\n"
    )
    scores, _, _ = play(command(tmp_path, left))
    assert scores == (Score(name="program", value=1.0),)
    if "session" in how:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    asyncio.run(until(lambda: gone(int(pid.read_text()))))


def test_a_service_is_sent_the_task_the_address_and_the_key() -> None:
    def answer(path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        told = json.loads(body)
        asked = {"model": told["model"], "max_tokens": 50, "messages": told["task"]["messages"]}
        headers = {"x-api-key": told["api_key"]}
        with httpx.Client(trust_env=False) as client:
            said = client.post(f"{told['anthropic_base_url']}/v1/messages", json=asked, headers=headers).json()
        return 200, json.dumps({"reward": float(said["content"][0]["text"] == "Hello.")}).encode()

    with http_endpoint(answer) as url:
        scores, (experience,), _ = play(Program(url=f"{url}/episode"))
    assert scores == (Score(name="program", value=1.0),) and experience.num_sampled == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got none of use, command and url, expected one"),
        ({"use": "a:b", "url": "http://x"}, "got use and url of use, command and url"),
        ({"use": "nowhere:run"}, 'no module "nowhere"'),
        ({"command": ["x"], "sampling": "mine"}, "sampling"),
    ],
)
def test_mistakes_are_found_when_the_role_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("actors.program.workflow:Program", options, "explore.workflow")


async def status(site: ProgramSite, key: str, path: str, body: str = "") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    method = "POST" if body else "GET"
    writer.write(f"{method} {path} HTTP/1.1\r\nauthorization: Bearer {key}\r\n".encode())
    writer.write(f"content-length: {len(body)}\r\n\r\n{body}".encode())
    try:
        return (await reader.readline()).split()[1]
    finally:
        writer.close()


async def test_an_episode_takes_neither_all_connections_nor_all_processors_from_another() -> None:
    site, go, counting = ProgramSite("127.0.0.1:0"), threading.Semaphore(0), list[int]()

    def count(request: Any) -> int:
        counting.append(len(counting))
        assert go.acquire(timeout=60)
        return 1

    await site.start()
    for key in ("hr-greedy", "hr-other"):
        site.open(cast(Any, SimpleNamespace(key=key, count=count, version=7)))
    asked = '{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}'
    path = "/v1/messages/count_tokens"
    greedy = [asyncio.create_task(status(site, "hr-greedy", path, asked)) for _ in range(20)]
    async with asyncio.timeout(20):
        done, _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
        assert {first.result() for first in done} == {b"429"} and len(counting) <= 2
        other = asyncio.create_task(status(site, "hr-other", path, asked))
        await until(lambda: len(counting) == 2)
        for _ in range(4):
            go.release()
        assert await other == b"200", "its turn comes before those of the first episode that wait"
        for _ in range(20):
            go.release()
        assert sorted(await asyncio.gather(*greedy)) == [b"200"] * 17 + [b"429"] * 3
    head = b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer hr-greedy\r\ncontent-length: 2\r\n\r\n{"
    unfinished = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(65)]
    for _, writer in unfinished:
        writer.write(head)
    refused = [asyncio.create_task(reader.readline()) for reader, _ in unfinished]
    async with asyncio.timeout(20):
        done, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        assert [b" 429 " in first.result() for first in done] == [True], "one body too many"
        assert await status(site, "hr-other", "/v1/models") == b"200"
    for reading, (_, writer) in zip(refused, unfinished, strict=True):
        reading.cancel()
        writer.close()


GOOD = [*PROMPT, *b"Hello.", EOS, *b"<user>and?", EOS, *b"<assistant>", *b"Hello.", EOS]
BAD = {
    "asks_nothing": ("agent", "it ended without an answer of the policy"),
    "raises": ("agent", "LookupError: the agent broke"),
    "exits": ("agent", "SystemExit"),
    "cancels_itself": ("agent", "CancelledError"),
    "invents_a_key": ("agent", "no running episode has this key"),
    "asks_too_often": ("agent", "has used its 8 requests"),
    "leaves_in_mid_stream": ("agent", "ended without an answer of the policy"),
    "sends_no_json": ("agent", "ended without an answer of the policy"),
    "steals_a_key": ("agent", "ended without an answer of the policy"),
    "not_a_number": ("reward", "program: got nan, expected a finite number"),
}


def beside(name: str) -> tuple[EpisodeFailed, tuple[Score, ...], list[Experience]]:
    """The failure of a bad episode, and the record of the good one that ran meanwhile."""

    async def run() -> tuple[EpisodeFailed, tuple[Score, ...], list[Experience]]:
        token_s = 0.2 if name == "leaves_in_mid_stream" else 0.002  # time for a client to leave
        engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("Hello."), token_s=token_s)
        await engine.start()
        program = Program(use=f"{AGENTS}:good_or_bad", requests=8)

        async def play(meta: dict[str, Any]) -> tuple[tuple[Score, ...], list[Experience]]:
            session = Session(engine, ChatBytes(), Sampling(max_tokens=64, stop=(EOS,)))
            scores = await program(replace(TASK, meta=meta), session)
            return scores, session.experiences(group="t.0", attempt=0, episode=0)

        bad = asyncio.create_task(play({"bad": name}))
        scores, found = await play({})
        (failed,) = await asyncio.gather(bad, return_exceptions=True)
        await until(lambda: not engine.num_running)
        await engine.close()
        assert isinstance(failed, EpisodeFailed), failed
        return failed, scores, found

    return asyncio.run(run())


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_agent_fails_with_a_typed_cause_and_costs_no_other_episode_anything(name: str) -> None:
    failed, scores, found = beside(name)
    cause, message = BAD[name]
    assert failed.cause == cause and message in str(failed)
    assert scores == (Score(name="program", value=1.0),)
    sequences = [entry.tokens.tolist() for entry in found]
    assert [tokens for tokens in sequences if tokens[: len(PROMPT)] == PROMPT] == [GOOD]
    assert len(found) == (2 if name == "steals_a_key" else 1), "what was asked with its key is a part of its own"


async def test_a_bad_agent_s_requests_end_with_its_episode() -> None:
    """One that is cut off while it floods leaves nothing running."""

    engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("a" * 60), token_s=60.0)
    await engine.start()
    session = Session(engine, ChatBytes(), Sampling(max_tokens=64, stop=(EOS,)))
    playing = asyncio.create_task(Program(use=f"{AGENTS}:floods")(TASK, session))
    await until(lambda: engine.num_running > 4)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await until(lambda: not engine.num_running)
    assert not session.num_sampled
    await engine.close()


CONFIG = replace(
    EXPLORE, workflow="actors.program.workflow:Program", options={"use": f"{AGENTS}:two_turns"}, linger_s=5.0
)


def played(folder: Path, config: object) -> tuple[TopicArrivals, Metrics]:
    """The records that an explorer publishes of a group of three episodes."""

    async def run() -> tuple[TopicArrivals, Metrics]:
        log, metrics = await memory_log(), Metrics("explore")
        heard = TopicArrivals(log, EXPERIENCES)
        engine = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=says("Hello."))
        role = role_of("explore", FLOOR, log, folder_store(folder), metrics=metrics)
        explorer = asyncio.create_task(run_explorer(role, config, engine, ChatBytes(), (EOS,)))  # type: ignore[arg-type]
        issued = rollout(task("add"), MASTER, round=0, attempt=0, sequence=0, min_version=0)
        async with running(explorer, asyncio.create_task(heard.listen())):
            await log.publish(TASKS, replace(issued, issued=replace(issued.issued, max_tokens=50)))
            await until(lambda: len(heard.experiences) == 3, seconds=60.0)
        return heard, metrics

    return asyncio.run(run())


def test_a_group_of_programs_is_published_with_its_rewards(tmp_path: Path) -> None:
    heard, _ = played(tmp_path, CONFIG)
    assert len(heard.records) == 1, "one block: they finished together"
    for experience in heard.experiences:
        assert (experience.group, experience.group_size, experience.part, experience.last) == ("add.0", 3, 0, True)
        assert experience.num_sampled == 2 * 7 and len(experience.spans) == 2
        assert Score(name="program", value=1.0) in experience.scores and experience.answer == "yes"
