"""The commands against a real broker: what was put into the log is what they show."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.store import seal
from infra.store.directory import DirectoryStore
from infra.store.seal import Keys, open_text, seal_text, sealed
from infra.store.store import Store
from schemas import Block, Closure, Control, DropMarker, EvalResult, PolicyEvent, Progress, topics
from schemas.errors import Sealed
from schemas.ids import experience_id, group_of, request_group
from tests.infra.ledger.ledger_records import batch, block
from tests.names import SECRET, session_name, subject_name
from tests.schemas.record_samples import group_block

pytestmark = pytest.mark.slow

ALL_ROLES = ("train", "explore", "process", "master")


def call(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "-c", str(config)], env={"COLUMNS": "160", "TERM": "dumb"})


def printed(config: Path, *arguments: str, code: int = 0) -> str:
    result = call(config, *arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def publish(
    bootstrap: str, app_name: str, records: list[tuple[topics.Topic, Control | Block]], store: Store | None = None
) -> None:
    async def main() -> None:
        bus = KafkaBus(bootstrap, deadline_s=30)
        await bus.start()
        log = Log(bus, app_name, store=store)
        for topic, record in records:
            await log.publish(topic, record)
        await bus.close()

    asyncio.run(main())


@pytest.fixture
def config(kafka: str, app_name: str, tmp_path: Path) -> Path:
    """Settings of an app whose topics exist."""
    file = tmp_path / "headrace.toml"
    file.write_text(f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{kafka}"\npartitions = 2\n')
    assert "topics created" in printed(file, "check", "--create")
    return file


def test_topics_that_are_missing_are_one_line_that_says_how_to_create_them(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{kafka}"\npartitions = 2\n')
    for arguments in (["status"], ["peek", "buffer"], ["audit"]):
        result = call(config, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert f"{app_name}." in line and "headrace check --create" in line and kafka in line
    assert f"{app_name}.buffer" in printed(config, "check", "--create")
    assert "none, all were there" in printed(config, "check", "--create")
    result = call(config, "check", "--create", "--set", "kafka.partitions=3")
    assert result.exit_code == 2 and "2" in result.stderr and "3" in result.stderr


def test_forget_forgets_a_user_says_so_as_text_and_as_json_and_may_be_repeated(
    kafka: str, app_name: str, config: Path
) -> None:
    keys = Keys(store := DirectoryStore(config.parent / "store"))
    store.put(seal.SECRET, SECRET)
    names = {user: experience_id(request_group(session_name("acme", user), 7, 3), 0, 0) for user in ("ann", "bob")}
    answers = []
    for user, name in names.items():
        subject = subject_name("acme", user)
        changed = structs.replace(group_block(1).experiences[0], id=name, group=group_of(name), subject=subject)
        answers.append(sealed(Block((changed,)), keys, subject))
    said = {user: seal_text("a fine name", keys, name) for user, name in names.items()}
    publish(kafka, app_name, [(topics.EXPERIENCES, answer) for answer in answers], store)
    told = printed(config, "forget", "--user", "ann", "--tenant", "acme")
    assert "1 keys destroyed, 1 groups cannot be opened" in told and "turns without their name are unreadable" in told
    again = json.loads(printed(config, "forget", "--user", "ann", "--tenant", "acme", "--json"))
    assert (again["groups"], again["texts"], len(again["keys"])) == (1, 1, 1)
    with pytest.raises(Sealed, match="forgotten"):
        open_text(said["ann"], Keys(store), names["ann"])
    assert open_text(said["bob"], Keys(store), names["bob"]) == "a fine name"
    unknown = call(config, "forget", "--user", "carol", "--tenant", "acme")
    assert unknown.exit_code == 2 and "nothing was written of this user" in unknown.stderr


def output_lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


def deaf_to_ctrl_c() -> None:
    """Start a process like a shell without job control starts a background one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_following_shows_the_past_then_what_arrives_and_ends_by_ctrl_c_whoever_started_it(
    kafka: str, app_name: str, config: Path
) -> None:
    publish(kafka, app_name, [(topics.POLICIES, PolicyEvent(event="published", policy="main", version=1))])
    command = [sys.executable, "-m", "infra.cli.main", "peek", "policies", "--follow", "--json", "-c", str(config)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=deaf_to_ctrl_c
    ) as process:
        stopper = threading.Timer(60, process.kill)
        stopper.start()
        lines = output_lines(process)
        assert json.loads(next(lines))["record"]["version"] == 1
        for version in (2, 3):
            event = PolicyEvent(event="published", policy="main", version=version)
            publish(kafka, app_name, [(topics.POLICIES, event)])
            assert json.loads(next(lines))["record"]["version"] == version
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        stopper.cancel()
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_status_tells_what_the_log_says_and_check_gives_the_exit_code(kafka: str, app_name: str, config: Path) -> None:
    assert "nothing yet" in printed(config, "status"), "plain status always exits with 0"
    assert printed(config, "status", "--check", code=1).count("no role has reported") == 1
    told = [Progress(role=role, instance=f"{role}/1", state="running", version=4) for role in ALL_ROLES]
    records = [
        (topics.POLICIES, PolicyEvent(event="published", policy="main", version=4)),
        (topics.EVALS, EvalResult(policy="main", version=4, suite="dev", num_tasks=10, num_correct=9)),
        *((topics.REPORTS, item) for item in told),
    ]
    publish(kafka, app_name, records)
    shown = printed(config, "status", "--check")
    assert "train/1" in shown and "dev 90.0% at v4" in shown and "alarm" not in shown
    state = json.loads(printed(config, "status", "--kept", "--json", "--check"))
    assert {item["what"]: item["num"] for item in state["kept"]}["topic evals"] == 1
    assert state["alarms"] == [] and state["policies"]["published"] == 4 and set(state["lags"]) >= {"verified"}
    refused = Progress(role="explore", instance="explore/1", state="serving", refused={4: "NaN"})
    publish(kafka, app_name, [(topics.REPORTS, refused)])
    state = json.loads(printed(config, "status", "--kept", "--json", "--check", code=1))
    assert state["alarms"] == ["policy v4 was refused: v4 by explore/1: NaN"]
    assert "refused" in printed(config, "status")


def test_audit_accounts_for_what_was_published_and_says_when_a_promise_is_broken(
    kafka: str, app_name: str, config: Path
) -> None:
    trained = structs.replace(batch(0, "a.0.0-0-0", "a.0.0-1-0"), run=app_name, token=0, version=0)
    records = [
        *((topics.EXPERIENCES, block(group)) for group in ("a.0", "b.0", "c.0")),
        (topics.VERIFIED, DropMarker(id="c.0.0-0-0", group="c.0", episode=0, group_size=4, reason="too short")),
        (topics.BUFFER, block("a.0")),
        (topics.PROGRESS, Closure(group="b.0", outcome="dropped", reason="all rewards equal")),
        (topics.BATCHES, trained),
    ]
    publish(kafka, app_name, records)
    found = json.loads(printed(config, "audit", "--json"))
    assert (found["published"], found["trained"], found["pending"], found["clean"]) == (6, 2, 1, True)
    assert found["dropped"] == {"all rewards equal": 2, "too short": 1}
    assert "dropped: all rewards equal" in printed(config, "audit")
    publish(kafka, app_name, [(topics.BATCHES, structs.replace(trained, step=1, version=1))])
    shown = printed(config, "audit", code=1)
    assert "NOT CLEAN" in shown and "trained twice: a.0.0-0-0, a.0.0-1-0" in shown
    assert json.loads(printed(config, "audit", "--json", code=1))["clean"] is False


def test_a_role_that_cannot_start_is_an_alarm_with_its_reason(config: Path) -> None:
    assert "policy.model" in call(config, "explore", "--set", "policy.model=").output
    shown = json.loads(printed(config, "status", "--check", "--json", code=1))
    (line,) = [alarm for alarm in shown["alarms"] if alarm.startswith("no explore runs")]
    assert "policy.model" in line
