"""`mc` and `kafka-acls.sh` for where they are not: what infra/deploy and its pages ask of them, at a real MinIO and broker.

python -m tests.e2e.compose_tools mc admin policy attach store headrace --user headrace
python -m tests.e2e.compose_tools kafka-acls --bootstrap-server 127.0.0.1:9094 --add --allow-principal User:serve --topic x
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiokafka import AIOKafkaClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest
from aiokafka.protocol.api import Request

ALIASES = Path(".mc.json")  # in the working folder
REGION = "us-east-1"


def mc(words: list[str]) -> None:
    """One command of MinIO's client; whatever it does not know is an error."""
    from minio import Minio
    from minio.credentials import StaticProvider
    from minio.error import S3Error
    from minio.minioadmin import MinioAdmin

    if words[:2] == ["alias", "set"]:
        _, _, name, url, user, password = words
        known = {name: (urlsplit(url).netloc, user, password)}
        try:
            Minio(known[name][0], user, password, secure=False, region=REGION).list_buckets()
        except S3Error as error:
            raise SystemExit(f"mc: {error.code}") from None
        ALIASES.write_text(json.dumps(known))
        return
    parser = argparse.ArgumentParser("mc")
    parser.add_argument("words", nargs="+")
    parser.add_argument("--ignore-existing", action="store_true")
    parser.add_argument("--user")
    given = parser.parse_intermixed_args(words)
    *command, alias = given.words[: {"mb": 1, "admin": 3}[given.words[0]] + 1]
    rest = given.words[len(command) + 1 :]
    alias, _, bucket = alias.partition("/")
    host, user, password = json.loads(ALIASES.read_text())[alias]
    admin = MinioAdmin(endpoint=host, credentials=StaticProvider(user, password), region=REGION, secure=False)
    match command:
        case ["mb"]:
            client = Minio(host, user, password, secure=False, region=REGION)
            if not (given.ignore_existing and client.bucket_exists(bucket)):
                client.make_bucket(bucket)
        case ["admin", "user", "add"]:
            admin.user_add(*rest)
        case ["admin", "policy", "create"]:
            admin.policy_add(rest[0], policy_file=rest[1])
        case ["admin", "policy", "attach"]:
            attached = json.loads(admin.user_info(given.user)).get("policyName", "").split(",")
            if wanted := [item for item in rest if item not in attached]:
                admin.attach_policy(wanted, user=given.user)
        case ["admin", "policy", "detach"]:
            admin.detach_policy(rest, user=given.user)
        case _:
            raise SystemExit(f"mc: {command} is not known here")


KINDS = {"topic": 2, "group": 3}
OPERATIONS = {"all": 2, "read": 3, "write": 4, "delete": 6, "describe": 8}
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3


def kafka_acls(words: list[str]) -> None:
    """Kafka's tool for its rules: --add and --remove, of topics and groups."""
    parser = argparse.ArgumentParser("kafka-acls.sh")
    parser.add_argument("--bootstrap-server", required=True)
    for flag in ("--add", "--remove", "--force"):
        parser.add_argument(flag, action="store_true")
    for option in ("--topic", "--group", "--operation", "--allow-principal", "--deny-principal"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--resource-pattern-type", choices=["literal", "prefixed"], default="literal")
    given = parser.parse_intermixed_args(words)
    pattern = PREFIXED if given.resource_pattern_type == "prefixed" else LITERAL
    users = [(user, DENY) for user in given.deny_principal] + [(user, ALLOW) for user in given.allow_principal]
    named = {"topic": given.topic, "group": given.group}
    rules = [
        (KINDS[kind], name, pattern, user, "*", OPERATIONS[operation.lower()], permission)
        for user, permission in users
        for kind, names in named.items()
        for name in names
        for operation in given.operation or ["all"]
    ]
    assert rules and given.add != given.remove, words
    request = CreateAclsRequest if given.add else DeleteAclsRequest
    for reply in asyncio.run(asked(given.bootstrap_server, [request(*rule) for rule in rules])):
        if given.add:
            assert [code for code, _ in reply.creation_responses] == [0], reply
        else:
            assert all(code == 0 and found for code, _, found in reply.filter_responses), reply


async def asked(bootstrap: str, requests: Sequence[Request[Any]]) -> list[Any]:
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        return [await client.send(client.get_random_node(), request) for request in requests]
    finally:
        await client.close()


if __name__ == "__main__":
    {"mc": mc, "kafka-acls": kafka_acls}[sys.argv[1]](sys.argv[2:])
