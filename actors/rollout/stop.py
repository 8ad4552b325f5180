"""How the episodes of a group are stopped once nothing they could still say would be of use."""

import asyncio

from schemas import Closure, Drawn


class Stop:
    """Of one group that runs. reason: why it was stopped, "" while it was not."""

    def __init__(self) -> None:
        self.reason = ""
        self._episodes: list[asyncio.Task[object]] = []

    def watch(self, episode: "asyncio.Task[object]") -> None:
        """Let an episode be stopped, at once where the group is already."""
        self._episodes.append(episode)
        if self.reason:
            episode.cancel()

    def now(self, reason: str) -> None:
        """Stop what has not ended; the first reason stays."""
        if self.reason:
            return
        self.reason = reason
        for episode in self._episodes:
            episode.cancel()


def groups_over(record: object) -> tuple[str, ...]:
    """Groups of which nothing can be trained any more that is not there yet, as a record of `progress` tells."""
    if isinstance(record, Closure) and record.revision == 0 and record.sequence >= 0:  # evals have none
        return (record.group,)
    return tuple(record.dropped) if isinstance(record, Drawn) else ()
