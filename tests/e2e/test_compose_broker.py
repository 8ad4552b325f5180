"""infra/deploy/compose.yml as processes: a role's user has the rights of its row; the commands of the page bring all up."""

import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator

import httpx
import pytest

from infra.cli.demo.char_model import build_char_model
from infra.cli.settings import load_settings
from infra.log.access import kafka_access
from infra.log.rights import asking
from infra.roles.rights import PREFIXES, RIGHTS
from infra.store.s3 import open_s3
from infra.store.store import Store
from schemas import topics
from schemas.errors import NotInStore, StoreError
from tests import minio
from tests.e2e.compose_stack import REPOSITORY, ComposeStack, programs
from tests.variables import variables

pytestmark = pytest.mark.full

USERS = ("MASTER", "TRAIN", "PROCESS", "EXPLORE", "SERVE", "OPERATOR", "TLS", "MINIO_ADMIN", "GRAFANA")
VARIABLES = {
    **{f"{user}_PASSWORD": f"password{number}of{user.lower()}" for number, user in enumerate(USERS)},
    **{
        f"{image}_DIGEST": f"sha256:{'0' * 64}" for image in ("KAFKA", "MINIO", "MC", "PROMETHEUS", "GRAFANA", "PYTHON")
    },
}
# For a machine without cards, and versions that do not take five minutes each.
SETS = ("--set", "engine.use=actors.engines.torch:TorchEngine", "--set", "trainer.min_publish_interval=10s")
GROUPS = ("tasks", "explore", "verify", "collect", "feedback", "feedback.tickets")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    program = minio.find_or_build(minio.default_cache())
    if program is None:
        pytest.skip("no minio on PATH, no Go")
    folder = tmp_path_factory.mktemp("compose")
    variables = {**VARIABLES, "MODEL": str(build_char_model(folder / "model", seed=0))}
    with ComposeStack(folder, variables, programs=programs(program), more=SETS) as stack:
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
BODY = {"model": "main", "messages": [{"role": "user", "content": "37+45="}], "max_tokens": 6}
WAITS_S = 600.0
NUM_RATERS = 200


def test_the_page_brings_up_every_container_and_a_version_that_learned_from_users_is_served(
    stack: ComposeStack,
) -> None:
    (commands,) = re.findall(r"^export MODEL.*\n((?:docker compose .*\n)+)", PAGE, re.MULTILINE)
    said = [stack.typed(line) for line in commands.splitlines()]
    assert [done.returncode for done in said] == [0] * len(said), said
    numbers, deadline_s = itertools.count(), time.monotonic() + WAITS_S
    gateway = f"http://{stack.at('serve', 8000)}/v1"
    headers = {"authorization": f"Bearer {said[-1].stdout.strip()}"}
    with httpx.Client(base_url=gateway, headers=headers, timeout=60, trust_env=False) as http:
        while served(stack) < 1:
            assert time.monotonic() < deadline_s, (
                f"{called(stack, 'operator', 'status')[1]}\n{stack.log('train')[-2000:]}"
            )
            stack.keep()
            if http.get("/models").status_code == 200:  # the gateway knows the key
                rate(http, itertools.islice(numbers, 8))
    assert called(stack, "operator", "check", "--connect")[0] == 0
    code, told = called(stack, "operator", "audit")
    assert code == 0 and "clean" in told and "NOT" not in told, told


def rate(http: httpx.Client, numbers: Iterable[int]) -> None:
    """Ask and rate: every second answer is good."""
    for number in numbers:
        answer = http.post("/chat/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        rating = {"answer_id": answer.json()["id"], "value": number % 2, "rater": f"user-{number % NUM_RATERS}"}
        assert http.post("/feedback", json=rating).status_code == 202


def served(stack: ComposeStack) -> int:
    """The version of the gateway; -1 while it is not known."""
    code, said = called(stack, "operator", "status", "--json")
    roles = json.loads(said).get("roles", ()) if code == 0 else ()
    return max((item["version"] for item in roles if item["role"] == "serve"), default=-1)
