"""What lives beside a chain: a step that has to hear of something, such as the versions of a model it judges with.

Guarantee: it runs for as long as its worker does; an error that escapes it stops the worker, since its verdicts would
go stale in silence.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from infra.chain.chain import Step
from infra.log.log import Log
from infra.observe.metrics import Metrics


@runtime_checkable
class Companion(Protocol):
    """A step's function that is more than its calls."""

    async def accompany(self, log: Log, metrics: Metrics) -> None:
        """Run until cancelled."""


def companions(steps: Sequence[Step]) -> list[Companion]:
    """The companions among the functions of a chain."""
    functions: list[object] = [step.function for step in steps]
    return [function for function in functions if isinstance(function, Companion)]
