"""Rights of this client at the brokers, by topic and group, asked without leaving anything behind.

A broker checks rights before it checks the rest of a request. So each right is asked for with a request that changes nothing:
a produce without records (write), a fetch at offset 0 (read), a deletion of the records below offset 0, a heartbeat of a member
that the group does not have, and the creation of a topic in validate-only mode.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

from aiokafka import AIOKafkaClient, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest

from infra.log.access import Access, client_options
from infra.log.retry import DENIED

Right = Literal["describe", "read", "write", "delete"]
TIMEOUT_MS = 10_000
TRIES = 20  # a coordinator that is only being made
ABSENT = "absent"  # the member that asks


class Asked(NamedTuple):
    """Rights on a topic or a group. partitions: 0 where a topic is absent or hidden. denied: rights that this client lacks.
    creates: whether it may create an absent topic. fault: another error, in words.
    """

    partitions: int = 0
    denied: tuple[Right, ...] = ()
    creates: bool = False
    fault: str = ""


class Rights:
    """Asks brokers for the rights of this client. Use it only within `asking`."""

    def __init__(self, client: AIOKafkaClient, admin: AIOKafkaAdminClient) -> None:
        self._client = client
        self._admin = admin

    async def topic_rights(
        self, name: str, wanted: Sequence[Right], partitions: int, config: Mapping[str, str] = {}
    ) -> Asked:
        """Rights on one topic. partitions, config: with which it would be created."""
        try:
            answer = await self._client.send(self._client.get_random_node(), MetadataRequest([name], False))
            ((code, _, _, known),) = answer.topics
            error, leaders = for_code(code), [leader for _, _, leader, *_ in sorted(known, key=lambda each: each[1])]
            if error is UnknownTopicOrPartitionError:
                return Asked(creates=await self._creates(name, partitions, config))
            if error in DENIED:
                return Asked(denied=("describe",))
            if not leaders:
                return Asked(fault=f"{name}: {error.__name__}")
            denied = [right for right in wanted if await self._is_denied(right, TopicPartition(name, 0), leaders[0])]
            return Asked(len(leaders), tuple(denied))
        except (KafkaError, OSError) as error:
            return Asked(fault=repr(error))

    async def group_rights(self, name: str) -> Asked:
        for _ in range(TRIES):
            try:
                node = await self._admin.find_coordinator(name)
                answer = await self._client.send(node, HeartbeatRequest(name, -1, ABSENT))
            except GroupAuthorizationFailedError:
                return Asked(denied=("describe",))
            except (KafkaError, OSError) as error:
                fault = repr(error)
            else:
                kind = for_code(answer.error_code)
                if not kind.retriable:
                    return Asked(denied=("read",) if kind is GroupAuthorizationFailedError else ())
                fault = kind.__name__
            await asyncio.sleep(TIMEOUT_MS / 1000 / TRIES)
        return Asked(fault=fault)

    async def _creates(self, name: str, partitions: int, config: Mapping[str, str]) -> bool:
        new = NewTopic(name, partitions, -1, replica_assignments={}, topic_configs=dict(config))
        answer = await self._admin.create_topics([new], timeout_ms=TIMEOUT_MS, validate_only=True)
        return not any(for_code(code) in DENIED for _, code, *_ in answer.topic_errors)

    async def _is_denied(self, right: Right, at: TopicPartition, leader: int) -> bool:
        if right == "delete":
            try:
                await self._admin.delete_records({at: RecordsToDelete(0)})
            except KafkaError as error:
                return isinstance(error, TopicAuthorizationFailedError)
            return False
        if right == "write":
            request = ProduceRequest(None, -1, TIMEOUT_MS, [(at.topic, [(at.partition, b"")])])
        else:
            request = FetchRequest(0, 0, 1, 0, [(at.topic, [(at.partition, 0, 1)])])
        answer = await self._client.send(leader, request)
        ((_, ((_, code, *_),)),) = answer.topics
        return for_code(code) is TopicAuthorizationFailedError


@asynccontextmanager
async def asking(bootstrap_servers: str, access: Access) -> AsyncIterator[Rights]:
    """Connected to brokers that answer. Raises KafkaError where they do not."""
    options = {
        "bootstrap_servers": bootstrap_servers, "request_timeout_ms": TIMEOUT_MS, **client_options(access),
    }  # fmt: skip
    client, admin = AIOKafkaClient(**options), AIOKafkaAdminClient(**options)
    try:
        await client.bootstrap()
        await admin.start()
        yield Rights(client, admin)
    finally:
        await admin.close()
        await client.close()
