"""Rules of a broker's authorizer, which aiokafka has no request for: who may not do what."""

from typing import Literal

from aiokafka import AIOKafkaClient
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String

RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
OPERATIONS = {"all": 2, "read": 3, "write": 4, "create": 5, "delete": 6, "describe": 8}
CLUSTER = "kafka-cluster"
LITERAL, DENY, ALLOW = 3, 2, 3


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
    SCHEMA = Schema(
        (
            "creations",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                ("pattern_type", Int8),
                ("principal", String("utf-8")),
                ("host", String("utf-8")),
                ("operation", Int8),
                ("permission", Int8),
            ),
        )
    )


class CreateAclsRequest(Request[CreateAclsRequest_v1]):
    API_KEY = 30

    def __init__(self, creations: list[tuple[int, str, int, str, str, int, int]]) -> None:
        self._creations = creations

    def build(self, request_struct_class: type[CreateAclsRequest_v1]) -> CreateAclsRequest_v1:
        return request_struct_class(self._creations)


Kind = Literal["topic", "group", "cluster"]


async def deny(bootstrap: str, user: str, resource: Kind, name: str, *operations: str) -> None:
    """From now on `user` may do all but these. bootstrap: of a listener that may do anything."""
    # Where a resource has a rule, what no rule allows is denied; a denial comes before what is allowed.
    await _rule(bootstrap, user, resource, name, ("all", ALLOW), *((one, DENY) for one in operations))


async def allow(bootstrap: str, user: str, resource: Kind, name: str) -> None:
    """From now on `user` may do all, and whoever no rule allows nothing."""
    await _rule(bootstrap, user, resource, name, ("all", ALLOW))


async def _rule(bootstrap: str, user: str, resource: Kind, name: str, *permissions: tuple[str, int]) -> None:
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        rules = [
            (RESOURCES[resource], name, LITERAL, f"User:{user}", "*", OPERATIONS[operation], permission)
            for operation, permission in permissions
        ]
        answer = await client.send(client.get_random_node(), CreateAclsRequest(rules))
        assert [code for code, _ in answer.results] == [0] * len(rules), answer
    finally:
        await client.close()
