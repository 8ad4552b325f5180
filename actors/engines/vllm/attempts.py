"""Which loaded weights are proved: one label per load attempt, and the verdict on it; and how old keys and values are."""

import asyncio

from actors.engines.engine import KvMode


class Attempts:
    """Labels of load attempts. Tokens of one that is undecided must not leave; those of a refused one never do.

    kv: what a load does with the keys and values of running requests. Where they are kept, those of a request are at most as
    old as the label it began under, and as the last attempt at which they were rebuilt after all (a refused one is undone so).
    """

    def __init__(self, kv: KvMode = "rebuild") -> None:
        self.keeps = kv == "keep"
        self._rebuilt: list[str] = []  # one for each refused attempt
        self._count = 0
        self._undecided: dict[str, asyncio.Future[bool]] = {}
        self._refused: set[str] = set()

    def begin(self, version: int, *, proved: bool = False) -> str:
        """The label of a new attempt to serve `version`. proved: its weights were served before, and nothing that was computed
        since is kept.
        """
        self._count += 1
        label = f"{version}.{self._count}"
        if proved and self.keeps:
            self._rebuilt.append(label)
        if not proved:
            self._undecided[label] = asyncio.get_running_loop().create_future()
        return label

    def decide(self, label: str, accepted: bool) -> None:
        """Give the verdict; all that wait for it continue."""
        if not accepted:
            self._refused.add(label)
        self._undecided.pop(label).set_result(accepted)

    def fail(self, label: str, error: Exception) -> None:
        """There will be no verdict: all that wait for it get the error."""
        verdict = self._undecided[label]  # stays, so that later waiters get it too
        verdict.set_exception(error)
        verdict.exception()  # perhaps no caller waits any more

    def is_proved(self, label: str) -> bool:
        """Whether tokens of this attempt may leave now."""
        return label not in self._undecided and label not in self._refused

    async def accepted(self, label: str) -> bool:
        """The verdict, once there is one."""
        verdict = self._undecided.get(label)
        return label not in self._refused if verdict is None else await asyncio.shield(verdict)

    def kv_of(self, label: str, born: str) -> int:
        """Oldest version of the keys and values of a request that began under `born`, where it samples under `label`."""
        if not self.keeps or born == label:
            return self.version_of(label)
        rebuilt = (one for one in reversed(self._rebuilt) if _number(one) <= _number(label))
        return self.version_of(max(born, next(rebuilt, born), key=_number))

    @staticmethod
    def version_of(label: str) -> int:
        """The policy version an attempt was to serve."""
        return int(label.partition(".")[0])


def _number(label: str) -> int:
    """Of an attempt, in the order of all."""
    return int(label.partition(".")[2])
