"""A stranger with infra/deploy and its page: brings the secured stack up, breaks it, and mends it by the lines of the page.

The containers are processes (see `tests.e2e.compose_stack`). What is typed is read from the page. Users ask all the while.
"""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from infra.cli.demo.char_model import build_char_model
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.observe.alarms import parse_alarm
from schemas import Block, topics
from tests import minio
from tests.e2e.compose_stack import REPOSITORY, ComposeStack, programs
from tests.e2e.prometheus import Prometheus, program
from tests.e2e.test_compose_broker import VARIABLES
from tests.e2e.users import UserCrowd

pytestmark = pytest.mark.full

PAGE = (REPOSITORY / "infra" / "docs" / "howto" / "deploy.md").read_text(encoding="utf-8")
ROLES = ("master", "train", "process", "explore", "serve")
# For a machine without cards, and versions that do not take five minutes each.
SETS = ("engine.use=actors.engines.torch:TorchEngine", "trainer.min_publish_interval=10s")
OF_STEPS = ("alarms", "steps-skipped")
PER_S = 4.0
WAITS_S = 600.0


def blocks(title: str) -> list[list[str]]:
    """What is typed below a heading of the page: the lines of each block, but for what is exported."""
    section = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^#)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, title
    found = re.findall(r"^```text\n(.*?)^```$", section[2], re.MULTILINE | re.DOTALL)
    return [[line for line in block.splitlines() if not line.startswith("export ")] for block in found]


class Stranger:
    """Who types. stack: what runs. users: who ask meanwhile, once there is a key."""

    def __init__(self, stack: ComposeStack) -> None:
        self.stack = stack
        self.users: UserCrowd | None = None

    def types(self, lines: list[str]) -> str:
        """Each line, to its end; returns what the last one said. Raises AssertionError where one fails."""
        said = ""
        for line in lines:
            done = self.stack.typed(line)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            said = done.stdout
        return said

    def asks(self, *command: str, user: str = "operator") -> tuple[int, str]:
        """A command of headrace, as the page has it; its code and what it said."""
        done = self.stack.typed(f"docker compose run --rm {user} {' '.join(command)}")
        return done.returncode, done.stdout + done.stderr

    def sees(self, look: Callable[[], Any], what: str) -> Any:
        """Look until there is something; meanwhile what ends is started again, as the file says."""
        deadline = time.monotonic() + WAITS_S
        while not (found := look()):
            assert time.monotonic() < deadline, f"{what}\n{self.asks('status')[1]}\n{self.last_words()}"
            self.stack.keep()
            time.sleep(2.0)
        return found

    def last_words(self) -> str:
        return "\n".join(f"{role}: {self.stack.log(role)[-600:]}" for role in ROLES)

    def state(self) -> dict[str, Any]:
        """`status --json`; empty while it cannot be had."""
        code, said = self.asks("status", "--json")
        return dict(json.loads(said)) if code == 0 else {}

    def alarms(self) -> dict[str, str]:
        """What `status` says, by the alarm's name."""
        return {(one.name if (one := parse_alarm(line)) else line): line for line in self.state().get("alarms", ())}

    def sees_alarm(self, name: str, words: str) -> None:
        """Until `status` has this alarm, in these words."""
        self.sees(lambda: re.search(words, self.alarms().get(name, "")), f"{name}: {words}")

    def is_well(self) -> bool:
        """Whether `status` has no alarm, but for steps of the trainer: its model is random, and so are the ratings."""
        state = self.state()
        return bool(state) and all((one := parse_alarm(line)) and one.name in OF_STEPS for line in state["alarms"])

    def sees_that_all_is_well(self) -> None:
        """Everything can be used, nothing alarms, and the system learns again."""
        self.sees(lambda: self.asks("check", "--connect")[0] == 0, "check --connect finds nothing")
        self.sees(self.is_well, "status finds nothing")
        version = self.served()
        self.sees(lambda: self.served() > version, f"a version after {version} is served")

    def is_known(self, key: str) -> bool:
        """Whether the gateway lets the key in."""
        address = f"http://{self.stack.at('serve', 8000)}/v1/models"
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(address, headers=headers, trust_env=False).status_code == 200

    def served(self) -> int:
        """The version of the gateway; -1 while it is not known."""
        return max((item["version"] for item in self.state().get("roles", ()) if item["role"] == "serve"), default=-1)

    def is_answered(self) -> None:
        """Users get answers now."""
        assert self.users is not None
        before = len(self.users.held)
        self.sees(lambda: self.users is not None and len(self.users.held) > before + 2 * PER_S, "answers")

    def prometheus(self, ask: Callable[[Prometheus], Any]) -> Any:
        """What Prometheus says."""

        async def main() -> Any:
            address = f"http://{self.stack.at('prometheus', 9090)}"
            async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as http:
                return await ask(Prometheus(http))

        return asyncio.run(main())


@contextmanager
def traffic(address: str, key: str) -> Iterator[UserCrowd]:
    """Users in a thread of their own, until the end of the block."""
    users = UserCrowd(key)
    users.gateways.append(address)

    async def come() -> None:
        async with users:
            await users.come(PER_S)

    thread = threading.Thread(target=asyncio.run, args=(come(),), name="users")
    thread.start()
    try:
        yield users
    finally:
        users.leave()
        thread.join()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    binary = minio.find_or_build(minio.default_cache())
    if binary is None:
        pytest.skip("no minio on PATH, no Go")
    program()
    folder = tmp_path_factory.mktemp("compose")
    variables = {**VARIABLES, "MODEL": str(build_char_model(folder / "model", seed=0))}
    more = tuple(word for item in SETS for word in ("--set", item))
    with ComposeStack(folder, variables, programs=programs(binary), more=more) as stack:
        one = Stranger(stack)
        key = one.types(blocks("On one machine, by compose")[1]).strip()
        one.sees(lambda: one.is_known(key), "the gateway knows the key")
        with traffic(f"http://{stack.at('serve', 8000)}", key) as one.users:
            yield one


def test_the_page_brings_up_every_container_of_the_file_once_and_all_is_well(stranger: Stranger) -> None:
    assert stranger.stack.starts == dict.fromkeys(stranger.stack.services, 1)
    stranger.sees(stranger.is_well, "status finds nothing")
    assert stranger.asks("check", "--connect")[0] == 0
    up = {stranger.stack.at(role, 9200): "up" for role in ROLES}
    stranger.sees(lambda: stranger.prometheus(Prometheus.up) == up, "every role is scraped")


def test_a_version_that_learned_from_what_users_said_is_served(stranger: Stranger) -> None:
    stranger.sees(lambda: stranger.served() >= 1, "a version that was trained is served")


def test_a_role_that_dies_is_started_again_by_itself(stranger: Stranger) -> None:
    before = stranger.stack.starts["train"]
    os.killpg(stranger.stack.pid("train"), signal.SIGKILL)
    stranger.sees(lambda: stranger.stack.starts["train"] > before, "it is started again")
    stranger.sees_that_all_is_well()


def test_a_role_that_hangs_is_named_by_status_and_prometheus_and_mended_by_the_lines_of_the_page(
    stranger: Stranger,
) -> None:
    broken, mends = blocks("A role hangs")
    stranger.types(broken)
    stranger.sees_alarm("role-missing", "no process runs: .* last reported")

    def silent() -> bool:
        alerts: dict[tuple[str, str], str] = stranger.prometheus(Prometheus.alerts)
        return alerts.get(("HeadraceRoleSilent", "process")) == "firing"

    stranger.sees(silent, "the alert is raised")
    stranger.is_answered()
    stranger.types(mends)
    stranger.sees_that_all_is_well()


def test_users_are_served_while_the_broker_is_gone_and_all_is_well_once_it_is_started(stranger: Stranger) -> None:
    broken, mends = blocks("The broker is gone")
    stranger.types(broken)
    code, said = stranger.asks("status")
    assert code == 1 and "is not reachable" in said
    stranger.is_answered()
    stranger.types(mends)
    stranger.sees_that_all_is_well()


def test_a_right_that_is_taken_back_is_named_and_granted_by_the_lines_of_the_page(stranger: Stranger) -> None:
    broken, mends = blocks("A right at the broker is revoked")
    stranger.types(broken)
    stranger.sees_alarm("records-on-disk", "records wait on disk")
    code, said = stranger.asks("check", "--connect", "--role", "serve", user="serve")
    assert code == 1 and "topic headrace.experiences" in said and "may not write" in said, said
    stranger.is_answered()
    assert "permissionType=DENY" in stranger.types(mends[:1])
    stranger.types(mends[1:])
    stranger.sees_that_all_is_well()


def test_users_are_served_while_the_bucket_is_closed_and_all_is_well_once_it_is_as_the_file_says(
    stranger: Stranger,
) -> None:
    broken, mends = blocks("The bucket is closed to the trainer")
    stranger.types(broken)
    code, said = stranger.asks("check", "--connect", "--role", "train", user="train")
    assert code == 1 and "may not put" in said, said
    stranger.sees_alarm("role-missing", "no train runs: .*AccessDenied")
    stranger.is_answered()
    stranger.types(mends)
    stranger.sees_that_all_is_well()


def test_afterwards_no_request_has_failed_no_answer_is_lost_and_the_audit_is_clean(stranger: Stranger) -> None:
    users = stranger.users
    assert users is not None
    held = set(users.held)

    async def stored() -> set[str]:
        bus = KafkaBus(stranger.stack.at("kafka", 9094))
        await bus.start()
        try:
            read = Log(bus, "headrace").read_all(topics.EXPERIENCES)
            return {
                experience.id
                async for found in read
                if isinstance(found.value, Block)
                for experience in found.value.experiences
            }
        finally:
            await bus.close()

    stranger.sees(lambda: held <= asyncio.run(stored()), "every answer is stored")
    assert (users.failed, users.cut_off) == ([], 0)
    code, said = stranger.asks("audit")
    assert code == 0 and "clean" in said and "NOT" not in said, said
