"""`mc` and `kafka-acls.sh` for where they are not: what infra/deploy and its pages ask of them, at a real MinIO and broker.

python -m tests.e2e.compose_tools mc admin policy attach store headrace --user headrace
python -m tests.e2e.compose_tools kafka-acls --bootstrap-server 127.0.0.1:9094 --list
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

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


def kafka_acls(words: list[str]) -> None:
    """Kafka's tool for its rules: --add, --remove and --list, of topics and groups."""
    from tests.e2e.secured_broker import ALLOW, DENY, LITERAL, PREFIXED, Rule, add_rules, list_rules, remove_rules

    parser = argparse.ArgumentParser("kafka-acls.sh")
    parser.add_argument("--bootstrap-server", required=True)
    for flag in ("--add", "--remove", "--list", "--force"):
        parser.add_argument(flag, action="store_true")
    for option in ("--topic", "--group", "--operation"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--allow-principal", action="append", default=[])
    parser.add_argument("--deny-principal", action="append", default=[])
    parser.add_argument("--resource-pattern-type", choices=["literal", "prefixed"], default="literal")
    given = parser.parse_intermixed_args(words)
    if given.list:
        print("\n".join(asyncio.run(list_rules(given.bootstrap_server))))
        return
    pattern = PREFIXED if given.resource_pattern_type == "prefixed" else LITERAL
    users = [(user, DENY) for user in given.deny_principal] + [(user, ALLOW) for user in given.allow_principal]
    rules = [
        Rule(kind, name, pattern, user, operation.lower(), permission)
        for user, permission in users
        for kind, names in (("topic", given.topic), ("group", given.group))
        for name in names
        for operation in given.operation or ["all"]
    ]
    assert rules and given.add != given.remove, words
    asyncio.run((add_rules if given.add else remove_rules)(given.bootstrap_server, rules))


if __name__ == "__main__":
    {"mc": mc, "kafka-acls": kafka_acls}[sys.argv[1]](sys.argv[2:])
