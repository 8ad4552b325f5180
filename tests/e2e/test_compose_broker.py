"""infra/deploy/compose.yml as processes: each role's user has the rights of its row, and a stranger runs it by the page alone.

The stranger brings the stack up, breaks it, and mends it by the lines of `howto/deploy.md`, while users ask.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from infra.cli.demo.char_model import build_char_model
from infra.cli.settings import load_settings
from infra.log.access import kafka_access
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.log.rights import asking
from infra.observe.alarms import parse_alarm
from infra.roles.rights import PREFIXES, RIGHTS
from infra.store.s3 import open_s3
from infra.store.store import Store
from schemas import Block, topics
from schemas.errors import NotInStore, StoreError
from schemas.ids import ANSWER_PREFIX
from tests import minio
from tests.e2e.compose_stack import REPOSITORY, ComposeStack, programs
from tests.variables import variables

pytestmark = pytest.mark.full

USERS = ("MASTER", "TRAIN", "PROCESS", "EXPLORE", "SERVE", "OPERATOR", "TLS", "MINIO_ADMIN", "GRAFANA")
VARIABLES = {
    **{f"{user}_PASSWORD": f"password{number}of{user.lower()}" for number, user in enumerate(USERS)},
    **{f"{image}_DIGEST": f"sha256:{'0' * 64}" for image in ("KAFKA", "MINIO", "MC", "PROMETHEUS", "GRAFANA", "PYTHON")},
    "MODEL": "/",
}  # fmt: skip
GROUPS = ("tasks", "explore", "verify", "collect", "feedback", "feedback.tickets")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    program = minio.find_or_build(minio.default_cache())
    if program is None:
        pytest.skip("no minio on PATH, no Go")
    with ComposeStack(tmp_path_factory.mktemp("compose"), VARIABLES, programs=programs(program)) as stack:
        for name in ("certificate", "kafka", "rights", "minio", "bucket", "operator"):
            stack.start(name)
        yield stack


def called(stack: ComposeStack, service: str, *words: str) -> tuple[int, str]:
    done = stack.run(service, *words)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("role", RIGHTS)
async def test_a_roles_user_may_do_at_the_broker_what_its_row_says_and_nothing_else(
    role: str, stack: ComposeStack
) -> None:
    rights, environment = RIGHTS[role], stack.environment(role)
    with variables(**{name: environment[name] for name in ("HEADRACE_KAFKA_USERNAME", "HEADRACE_KAFKA_PASSWORD")}):
        settings = load_settings(stack.home(role) / "headrace.toml")
        settings_access = kafka_access(settings)
    async with asking(settings.kafka.bootstrap_servers, settings_access) as broker:
        denied = {
            topic.name: (await broker.topic_rights(f"headrace.{topic.name}", ("read", "write", "delete"), 1)).denied
            for topic in topics.ALL
        }
        groups = {group for group in GROUPS if not (await broker.group_rights(f"headrace.{group}")).denied}
        elsewhere = (await broker.topic_rights("other.buffer", ("read",), 1)).denied
    for topic in topics.ALL:
        assert set(denied[topic.name]) == {"read", "write", "delete"} - set(rights.at_topic(topic)), topic.name
    assert groups == {group for group in GROUPS if any(group.startswith(item) for item in rights.groups)}
    assert elsewhere == ("describe",)


@pytest.mark.parametrize("role", RIGHTS)
def test_a_roles_user_may_do_in_the_bucket_what_its_row_says_and_nothing_else(role: str, stack: ComposeStack) -> None:
    store, admin = (store_of(stack, user) for user in (role, "operator"))
    for prefix in PREFIXES:
        folder = prefix.replace("*", "headrace")
        key = f"{folder}tried-by-{role}" if prefix.endswith("/") else folder
        admin.put(key, b"there")
        may = [
            verb
            for verb, step in (
                ("get", lambda key=key: store.get(key)),
                ("put", lambda key=key: store.put(key, b"there")),
                ("delete", lambda key=key: store.delete(key)),
            )
            if not is_denied(step)
        ]
        assert tuple(may) == RIGHTS[role].at_prefix(prefix), prefix
        assert list(store.keys(folder)) == ([] if "delete" in may else [key]), "every role lists names"
        admin.delete(key)
    with pytest.raises(NotInStore):
        store.get("identity/nothing")
    assert is_denied(lambda: store_of(stack, role, bucket="others").put("checks/x", b"x"))


def is_denied(step: object) -> bool:
    try:
        step()  # type: ignore[operator]
    except StoreError:
        return True
    return False


def store_of(stack: ComposeStack, role: str, bucket: str = "headrace") -> Store:
    return open_s3(bucket, "main", stack.environment(role))


def test_check_connect_finds_every_right_of_a_role_and_names_what_is_taken_away(stack: ComposeStack) -> None:
    for role in RIGHTS:
        code, said = called(stack, role, "check", "--connect", "--role", role)
        assert code == 0 and "put, list, get, delete" in said, said
    code, said = called(stack, "serve", "check", "--connect", "--role", "serve", "--set", "store.url=s3://others/main")
    assert code == 1 and "may not put" in said, said
    acls = "docker compose exec kafka /opt/kafka/bin/kafka-acls.sh --bootstrap-server 127.0.0.1:9094"
    rule = "--deny-principal User:serve --operation Write --topic headrace.experiences"
    assert stack.typed(f"{acls} --add {rule}").returncode == 0
    listed = stack.typed(f"{acls} --list").stdout
    assert "name=headrace., patternType=PREFIXED" in listed and "permissionType=DENY" in listed
    code, said = called(stack, "serve", "check", "--connect", "--role", "serve")
    assert code == 1 and "topic headrace.experiences" in said and "may not write: it needs an ACL" in said, said
    assert stack.typed(f"{acls} --remove --force {rule}").returncode == 0
    stack.services["bucket"]["environment"]["ADMIN_PASSWORD"] = "another1"
    done = stack.run("bucket")
    assert done.returncode == 1 and "MINIO_ADMIN_PASSWORD is not the one that minio was started with" in done.stderr
    stack.services["bucket"]["environment"]["ADMIN_PASSWORD"] = VARIABLES["MINIO_ADMIN_PASSWORD"]
    for service in ("rights", "bucket"):
        assert stack.typed(f"docker compose run --rm {service}").returncode == 0, "typed again, it changes nothing"
    assert called(stack, "serve", "check", "--connect", "--role", "serve")[0] == 0


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


def program() -> str:
    """Where `prometheus` lies; the test is skipped, or fails, where it is not."""
    found = shutil.which("prometheus")
    if found is None:
        if os.environ.get("HEADRACE_REQUIRE_PROMETHEUS") == "1":
            pytest.fail("HEADRACE_REQUIRE_PROMETHEUS=1, and there is none on PATH: apt-get install prometheus")
        pytest.skip("prometheus is not on PATH: apt-get install prometheus")
    return found


ASK_S = 30.0
NUM_RATERS = 200
BODY = {"model": "main", "messages": [{"role": "user", "content": "37+45="}], "max_tokens": 6}


class UserCrowd:
    """Users of a gateway, who rate every other answer. No request is sent twice: each that fails counts.

    held: ids of answers. failed: what came in place of an answer. cut_off: requests without a response.
    """

    def __init__(self, gateway: str, key: str) -> None:
        self.held: set[str] = set()
        self.failed: list[str] = []
        self.cut_off = 0
        self._asked = 0
        self._is_leaving = False
        # No connection is kept: one that ends as it is used again is no fault of the gateway.
        self._http = httpx.AsyncClient(
            base_url=gateway,
            headers={"authorization": f"Bearer {key}"},
            timeout=ASK_S,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def come(self, per_s: float) -> None:
        """Ask until `leave`; return once every request has ended."""
        async with self._http, asyncio.TaskGroup() as group:
            while not self._is_leaving:
                self._asked += 1
                group.create_task(self._visit(self._asked))
                await asyncio.sleep(1.0 / per_s)

    def leave(self) -> None:
        self._is_leaving = True

    async def _visit(self, number: int) -> None:
        answer = await self._post("/v1/chat/completions", BODY, 200)
        if answer is None:
            return
        self.held.add(answer["id"].removeprefix(ANSWER_PREFIX))
        if number % 2:
            said = {"answer_id": answer["id"], "value": number % 4 // 2, "rater": f"user-{number % NUM_RATERS}"}
            await self._post("/v1/feedback", said, 202)

    async def _post(self, path: str, body: object, expected: int) -> dict[str, Any] | None:
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError:
            self.cut_off += 1
            return None
        if response.status_code == expected:
            return dict(response.json())
        self.failed.append(f"{path}: {response.status_code} {response.text[:200]}")
        return None


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

    def _prometheus(self, what: str) -> list[dict[str, Any]]:
        """Prometheus's list of targets or alerts."""
        url = f"http://{self.stack.at('prometheus', 9090)}/api/v1/{what}"
        answer = httpx.get(url, trust_env=False, timeout=60).json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["activeTargets" if what == "targets" else what])

    def scraped(self) -> dict[str, str]:
        """Health of every target, by its address."""
        return {target["labels"]["instance"]: target["health"] for target in self._prometheus("targets")}

    def alerts(self) -> dict[tuple[str, str], str]:
        """State of every alert that is not inactive, by its name and its label `role`."""
        found = self._prometheus("alerts")
        return {(alert["labels"]["alertname"], alert["labels"].get("role", "")): alert["state"] for alert in found}


@contextmanager
def traffic(address: str, key: str) -> Iterator[UserCrowd]:
    """Users in a thread of their own, until the end of the block."""
    users = UserCrowd(address, key)
    thread = threading.Thread(target=asyncio.run, args=(users.come(PER_S),), name="users")
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
    stranger.sees(lambda: stranger.scraped() == up, "every role is scraped")


def test_a_version_that_learned_from_what_users_said_is_served(stranger: Stranger) -> None:
    stranger.sees(lambda: stranger.served() >= 1, "a version that was trained is served")


def test_a_role_that_dies_is_started_again_by_itself(stranger: Stranger) -> None:
    before = stranger.stack.starts["train"]
    os.killpg(stranger.stack.pid("train"), signal.SIGKILL)
    stranger.sees(lambda: stranger.stack.starts["train"] > before, "it is started again")
    stranger.sees_that_all_is_well()


@pytest.mark.parametrize(
    ("title", "alarm", "asked", "said"),
    [
        ("A role hangs", ("role-missing", "no process runs: .* last reported"), (), ""),
        ("The broker is down", (), ("status",), "is not reachable"),
        ("A right at the broker is revoked", ("records-on-disk", "records wait on disk"),
         ("check", "--connect", "--role", "serve"), "may not write"),
        ("The bucket is closed to the trainer", ("role-missing", "no train runs: .*AccessDenied"),
         ("check", "--connect", "--role", "train"), "may not put"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named_while_users_are_served_and_the_lines_of_the_page_mend_it(
    stranger: Stranger, title: str, alarm: tuple[str, ...], asked: tuple[str, ...], said: str
) -> None:
    broken, mends = blocks(title)
    stranger.types(broken)
    if alarm:
        stranger.sees_alarm(*alarm)
    if asked:
        code, told = stranger.asks(*asked, user=asked[-1] if "--role" in asked else "operator")
        assert code == 1 and said in told, told
    if title == "A role hangs":
        role = ("HeadraceRoleSilent", "process")
        stranger.sees(lambda: stranger.alerts().get(role) == "firing", "the alert is raised")
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
