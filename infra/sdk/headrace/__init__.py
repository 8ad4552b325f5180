"""What plugins import: `from headrace import Experience, Outcome, processor, …`. Re-exports only.

Nothing is loaded before it is asked for: a stream worker's plugin does not load torch, and `import headrace` loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.engines.engine import (
        Chunk,
        Completion,
        ContextFull,
        Engine,
        EngineStopped,
        LoadReport,
        OnChunk,
        Sampling,
        SchemaRefused,
    )
    from actors.rollout.agent import Act, Agent
    from actors.rollout.environment import Environment, Outcome
    from actors.rollout.session import Session
    from actors.rollout.workflow import Workflow
    from actors.tasksets.taskset import Demonstration, Preference, Taskset
    from infra.chain.processor import Drop, Memory, Verdict, feedback, processor, score
    from infra.policies.policy import Policy
    from infra.settings.config import Section, Use
    from infra.store.images import Pixels
    from infra.store.store import Store, check_key, check_prefix
    from schemas import Experience, Feedback, Image, Message, Score, Span, Task
    from schemas.errors import ConfigError, NotInStore, PolicyRefused, StoreError
    from schemas.ids import synthetic_group
    from trainer.batch.weight import with_weight
    from trainer.losses.loss import LossInputs, LossOutput, Needs, needs

# What is written → the module each name lives in. The reference of docs shows the names by these kinds.
HOMES: dict[str, dict[str, str]] = {
    "records": dict.fromkeys(("Experience", "Feedback", "Image", "Message", "Score", "Span", "Task"), "schemas"),
    "processors, scores and feedback sources": {
        **dict.fromkeys(("Drop", "Memory", "Verdict", "feedback", "processor", "score"), "infra.chain.processor"),
        "synthetic_group": "schemas.ids",
        "with_weight": "trainer.batch.weight",
    },
    "tasksets": dict.fromkeys(("Demonstration", "Preference", "Taskset"), "actors.tasksets.taskset"),
    "environments": dict.fromkeys(("Environment", "Outcome"), "actors.rollout.environment"),
    "agents": dict.fromkeys(("Act", "Agent"), "actors.rollout.agent"),
    "workflows": {"Session": "actors.rollout.session", "Workflow": "actors.rollout.workflow"},
    "engines": {
        **dict.fromkeys(
            ("Chunk", "Completion", "ContextFull", "Engine", "EngineStopped", "LoadReport", "OnChunk", "Sampling"),
            "actors.engines.engine",
        ),
        "Pixels": "infra.store.images",
        "Policy": "infra.policies.policy",
        "PolicyRefused": "schemas.errors",
        "SchemaRefused": "actors.engines.engine",
    },
    "losses": dict.fromkeys(("LossInputs", "LossOutput", "Needs", "needs"), "trainer.losses.loss"),
    "stores": {
        **dict.fromkeys(("Store", "check_key", "check_prefix"), "infra.store.store"),
        **dict.fromkeys(("NotInStore", "StoreError"), "schemas.errors"),
    },
    "options": {**dict.fromkeys(("Section", "Use"), "infra.settings.config"), "ConfigError": "schemas.errors"},
}
__all__ = [
    "Act",
    "Agent",
    "Chunk",
    "Completion",
    "ConfigError",
    "ContextFull",
    "Demonstration",
    "Drop",
    "Engine",
    "EngineStopped",
    "Environment",
    "Experience",
    "Feedback",
    "Image",
    "LoadReport",
    "LossInputs",
    "LossOutput",
    "Memory",
    "Message",
    "Needs",
    "NotInStore",
    "OnChunk",
    "Outcome",
    "Pixels",
    "Policy",
    "PolicyRefused",
    "Preference",
    "Sampling",
    "SchemaRefused",
    "Score",
    "Section",
    "Session",
    "Span",
    "Store",
    "StoreError",
    "Task",
    "Taskset",
    "Use",
    "Verdict",
    "Workflow",
    "check_key",
    "check_prefix",
    "feedback",
    "needs",
    "processor",
    "score",
    "synthetic_group",
    "with_weight",
]


def __getattr__(name: str) -> object:
    """Load a name when it is first asked for."""
    for names in HOMES.values():
        if name in names:
            found: object = getattr(import_module(names[name]), name)
            globals()[name] = found
            return found
    raise AttributeError(f"headrace has no {name!r}; expected one of {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
