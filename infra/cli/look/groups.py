"""The consumer groups of an app, and which topics each reads: its lag is what waits to be done."""

from typing import Literal

from schemas import topics

Group = Literal["tasks", "explore", "verify", "collect"]
READS: dict[Group, tuple[topics.Topic, ...]] = {
    "tasks": (topics.TASKSET_RAW,),
    "explore": (topics.TASKS,),
    "verify": (topics.EXPERIENCES, topics.EXPERTS),
    "collect": (topics.VERIFIED,),
}
