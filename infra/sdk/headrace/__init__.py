"""Names for plugins: `from headrace import Experience, Outcome, processor, …`. Re-exports only.

Nothing is loaded before it is asked for: a stream worker's plugin does not load torch, and `import headrace` loads nothing.
Type checkers read `__init__.pyi`.
"""

from importlib import import_module

# Kind of code that you write → the module of each name. The reference in docs shows the names by these kinds.
HOMES: dict[str, dict[str, str]] = {
    "records": {
        "Experience": "schemas.experience",
        **dict.fromkeys(("Feedback", "Image", "Message", "Task"), "schemas.records"),
        **dict.fromkeys(("Score", "Span"), "schemas.fields"),
    },
    "processors, scores and feedback sources": {
        **dict.fromkeys(("Drop", "Memory", "Verdict", "feedback", "processor", "score"), "infra.chain.processor"),
        "synthetic_group": "schemas.ids",
        "with_weight": "trainer.processors",
    },
    "tasksets": dict.fromkeys(("Demonstration", "Preference", "Taskset"), "actors.tasksets.taskset"),
    "environments": dict.fromkeys(("Environment", "Outcome"), "actors.rollout.environment"),
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
    "parts of a run": {  # of infra/cli/examples/walkthrough.py; they may change between releases
        **dict.fromkeys(("Log", "LogMessage"), "infra.log.log"),
        **dict.fromkeys(("Context", "make_step", "new_memories", "run_chain"), "infra.chain.chain"),
        **dict.fromkeys(("NewVersion", "publish"), "infra.policies.publish"),
        **dict.fromkeys(("LaneConfig", "TrainerConfig"), "trainer.config"),
        **dict.fromkeys(("Stamp", "assemble"), "trainer.batch.assemble"),
        **dict.fromkeys(("Issued", "PolicyEvent"), "schemas.records"),
        "Block": "schemas.wire.block",
        "MemoryBus": "infra.log.memory",
        "MemoryStore": "infra.store.memory",
        "PolicyFetcher": "infra.policies.fetch",
        "StreamsConfig": "streams.config",
        **dict.fromkeys(
            ("BATCHES", "BUFFER", "EXPERIENCES", "POLICIES", "TASKS", "VERIFIED", "Topic"), "schemas.topics"
        ),
        "TorchEngine": "actors.engines.torch",
        "build_collect": "streams.stages.chain_builder",
        "build_char_model": "infra.cli.demo.char_model",
        "load_tokenizer": "infra.model.model",
        "make_candidate": "trainer.buffer.buffer",
        "open_learner": "trainer.learners.learner",
        "pack": "trainer.batch.batch",
    },
    "options": {**dict.fromkeys(("Section", "Use"), "infra.settings.config"), "ConfigError": "schemas.errors"},
}
_MODULES = {name: module for names in HOMES.values() for name, module in names.items()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Load a name when it is first asked for."""
    module = "infra.cli.main" if name == "main" else _MODULES.get(name)
    if module is None:
        raise AttributeError(f"headrace has no {name!r}; expected one of {', '.join(__all__)}")
    found: object = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
