"""Rules of a broker's authorizer: who may do what, and who may not."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from aiokafka import AIOKafkaClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest, DescribeAclsRequest
from aiokafka.protocol.api import Request

Kind = Literal["topic", "group", "cluster"]
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
OPERATIONS = {"all": 2, "read": 3, "write": 4, "create": 5, "delete": 6, "describe": 8}
CLUSTER = "kafka-cluster"
ANY = 1
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3


class Rule(NamedTuple):
    """A rule about a resource by its name, or about all whose name begins so (PREFIXED). principal: such as "User:ann"."""

    kind: Kind
    name: str
    pattern: int
    principal: str
    operation: str
    permission: int

    @property
    def sent(self) -> tuple[int, str, int, str, str, int, int]:
        operation = OPERATIONS[self.operation]
        return RESOURCES[self.kind], self.name, self.pattern, self.principal, "*", operation, self.permission


async def deny(bootstrap: str, user: str, resource: Kind, name: str, *operations: str) -> None:
    """From now on `user` may do all but these. bootstrap: of a listener that may do anything."""
    # Where a resource has a rule, what no rule allows is denied; a denial comes before what is allowed.
    denied = [Rule(resource, name, LITERAL, f"User:{user}", operation, DENY) for operation in operations]
    await add_rules(bootstrap, [Rule(resource, name, LITERAL, f"User:{user}", "all", ALLOW), *denied])


async def allow(bootstrap: str, user: str, resource: Kind, name: str) -> None:
    """From now on `user` may do all, and a user without a rule may do nothing."""
    await add_rules(bootstrap, [Rule(resource, name, LITERAL, f"User:{user}", "all", ALLOW)])


async def add_rules(bootstrap: str, rules: Sequence[Rule]) -> None:
    """Make these rules; those that are there stay."""
    for answer in await _asked(bootstrap, [CreateAclsRequest(*rule.sent) for rule in rules]):
        assert [code for code, _ in answer.creation_responses] == [0], answer


async def remove_rules(bootstrap: str, rules: Sequence[Rule]) -> None:
    """Take these rules back. Raises AssertionError where one is not there."""
    for answer in await _asked(bootstrap, [DeleteAclsRequest(*rule.sent) for rule in rules]):
        assert all(code == 0 and found for code, _, found in answer.filter_responses), answer


async def list_rules(bootstrap: str) -> list[str]:
    """Return every rule of a broker, as Kafka's own tool lists them."""
    (answer,) = await _asked(bootstrap, [DescribeAclsRequest(ANY, None, ANY, None, None, ANY, ANY)])  # type: ignore[arg-type]
    operations, kinds = ({number: name.upper() for name, number in table.items()} for table in (OPERATIONS, RESOURCES))
    found = []
    for kind, name, pattern, rules in answer.resources:
        how = "PREFIXED" if pattern == PREFIXED else "LITERAL"
        found.append(
            f"Current ACLs for resource `ResourcePattern(resourceType={kinds[kind]}, name={name}, patternType={how})`:"
        )
        found += [
            f"\t(principal={principal}, host={host}, operation={operations[operation]}, "
            f"permissionType={'DENY' if permission == DENY else 'ALLOW'})"
            for principal, host, operation, permission in rules
        ]
    return found


async def _asked(bootstrap: str, requests: Sequence[Request[Any]]) -> list[Any]:
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        return [await client.send(client.get_random_node(), request) for request in requests]
    finally:
        await client.close()
