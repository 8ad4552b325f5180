"""What gateways report of what they served: counts, of everybody, and no words."""

from typing import Annotated

from schemas.fields import Bounds, Count, Number, Struct


class Client(Struct, frozen=True):
    """What one gateway served of one version to one client since it started, at most one answer of each session or user.

    client: id of the key. failed, refused: as in Answered.

    Example: Client(client="abcdefghijklmnop", answers=120, refused=4)
    """

    client: str
    answers: Count = 0
    failed: Count = 0
    refused: Count = 0


class Answered(Struct, frozen=True):
    """What one gateway served of one version since it started. trial: as in a Closure. failed: answers the engine did
    not bring to an end. refused: answers that began as a refusal. clients: whom; those past 63 are one, of no name. ()
    from gateways that did not tell yet.

    Example: Answered(version=44, answers=480, failed=1, refused=12)
    """

    version: Count
    trial: Number = -1
    answers: Count = 0
    failed: Count = 0
    refused: Count = 0
    clients: Annotated[tuple[Client, ...], Bounds(max_length=64)] = ()
