"""Rules of a broker's authorizer, which aiokafka has no request for: who may do what, and who may not."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from aiokafka import AIOKafkaClient
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String

Kind = Literal["topic", "group", "cluster"]
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
OPERATIONS = {"all": 2, "read": 3, "write": 4, "create": 5, "delete": 6, "describe": 8}
CLUSTER = "kafka-cluster"
ANY = 1
LITERAL, PREFIXED = 3, 4
DENY, ALLOW = 2, 3
RULE = (
    ("resource_type", Int8),
    ("resource_name", String("utf-8")),
    ("pattern_type", Int8),
    ("principal", String("utf-8")),
    ("host", String("utf-8")),
    ("operation", Int8),
    ("permission", Int8),
)
OF_RESOURCE = (
    ("error_code", Int16),
    ("error_message", String("utf-8")),
    ("resource_type", Int8),
    ("resource_name", String("utf-8")),
    ("pattern_type", Int8),
    (
        "acls",
        Array(("principal", String("utf-8")), ("host", String("utf-8")), ("operation", Int8), ("permission", Int8)),
    ),
)


class Rule(NamedTuple):
    """One rule: of a resource by its name, or of all whose name begins so (PREFIXED). principal: such as "User:ann"."""

    kind: Kind
    name: str
    pattern: int
    principal: str
    operation: str
    permission: int

    @property
    def sent(self) -> tuple[int, str, int, str, str, int, int]:
        """As the broker's requests have it."""
        return (
            RESOURCES[self.kind], self.name, self.pattern, self.principal, "*", OPERATIONS[self.operation], self.permission,
        )  # fmt: skip


class CreateAclsResponse_v1(Response):
    API_KEY = 30
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("results", Array(("error_code", Int16), ("error_message", String("utf-8"))))
    )


class CreateAclsRequest_v1(RequestStruct):
    API_KEY = 30
    API_VERSION = 1
    RESPONSE_TYPE = CreateAclsResponse_v1
    SCHEMA = Schema(("creations", Array(*RULE)))


class CreateAclsRequest(Request[CreateAclsRequest_v1]):
    API_KEY = 30

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules

    def build(self, request_struct_class: type[CreateAclsRequest_v1]) -> CreateAclsRequest_v1:
        return request_struct_class([rule.sent for rule in self._rules])


class DeleteAclsResponse_v1(Response):
    API_KEY = 31
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "filter_results",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("matching_acls", Array(("error_code", Int16), ("error_message", String("utf-8")), *RULE)),
            ),
        ),
    )


class DeleteAclsRequest_v1(RequestStruct):
    API_KEY = 31
    API_VERSION = 1
    RESPONSE_TYPE = DeleteAclsResponse_v1
    SCHEMA = Schema(("filters", Array(*RULE)))


class DeleteAclsRequest(Request[DeleteAclsRequest_v1]):
    API_KEY = 31

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules

    def build(self, request_struct_class: type[DeleteAclsRequest_v1]) -> DeleteAclsRequest_v1:
        return request_struct_class([rule.sent for rule in self._rules])


class DescribeAclsResponse_v1(Response):
    API_KEY = 29
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("error_message", String("utf-8")),
        ("resources", Array(*OF_RESOURCE[2:])),
    )


class DescribeAclsRequest_v1(RequestStruct):
    API_KEY = 29
    API_VERSION = 1
    RESPONSE_TYPE = DescribeAclsResponse_v1
    SCHEMA = Schema(*RULE)


class DescribeAclsRequest(Request[DescribeAclsRequest_v1]):
    """Every rule there is."""

    API_KEY = 29

    def build(self, request_struct_class: type[DescribeAclsRequest_v1]) -> DescribeAclsRequest_v1:
        return request_struct_class(ANY, None, ANY, None, None, ANY, ANY)


async def deny(bootstrap: str, user: str, resource: Kind, name: str, *operations: str) -> None:
    """From now on `user` may do all but these. bootstrap: of a listener that may do anything."""
    # Where a resource has a rule, what no rule allows is denied; a denial comes before what is allowed.
    denied = [Rule(resource, name, LITERAL, f"User:{user}", one, DENY) for one in operations]
    await add_rules(bootstrap, [Rule(resource, name, LITERAL, f"User:{user}", "all", ALLOW), *denied])


async def allow(bootstrap: str, user: str, resource: Kind, name: str) -> None:
    """From now on `user` may do all, and whoever no rule allows nothing."""
    await add_rules(bootstrap, [Rule(resource, name, LITERAL, f"User:{user}", "all", ALLOW)])


async def add_rules(bootstrap: str, rules: Sequence[Rule]) -> None:
    """Make these rules; those that are there stay."""
    answer = await _asked(bootstrap, CreateAclsRequest(rules))
    assert [code for code, _ in answer.results] == [0] * len(rules), answer


async def remove_rules(bootstrap: str, rules: Sequence[Rule]) -> None:
    """Take these rules back. Raises AssertionError where one is not there."""
    answer = await _asked(bootstrap, DeleteAclsRequest(rules))
    assert all(code == 0 and found for code, _, found in answer.filter_results), answer


async def rules_of(bootstrap: str) -> list[str]:
    """Every rule of a broker, as Kafka's own tool lists them."""
    answer = await _asked(bootstrap, DescribeAclsRequest())
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


async def _asked(bootstrap: str, request: Request) -> Response:  # type: ignore[type-arg]
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        return await client.send(client.get_random_node(), request)
    finally:
        await client.close()
