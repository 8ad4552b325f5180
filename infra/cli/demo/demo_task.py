"""What defines one task of the demo: data, vocabulary, settings, and what counts as success."""

from collections.abc import Mapping

import msgspec

from infra.cli.demo.char_model import Size, Vocabulary


class DemoTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task of `headrace demo`.

    name: by which `--task` knows it. about: what it is, in a few words. write: a function (folder, seed=) that writes
    tasks.jsonl and experts.jsonl. vocabulary, size: of the model. settings: the TOML from [pacing] on, with {engine},
    {seed}, {minutes}, {stop_at}, {processors}, {usual}, {expert}; where `workflow` says what plays, {workflow},
    {in_flight} and {deadline_s} too, and an agent may play instead. suite: the evals that are reported. measure: what a
    person calls them. stop_at: success that ends the run. lanes: of each control there is, the weights of the lanes
    usual and expert. engines: those it runs on, the usual one first. minutes: how long tasks are issued by default.
    workflow: what plays, "" for the usual one.

    Example: DemoTask(name="arithmetic", ..., suite="held-out", measure="held-out accuracy", lanes={"none": (1.0, 0.0)})
    """

    name: str
    about: str
    write: str
    vocabulary: Vocabulary
    size: Size
    settings: str
    suite: str
    measure: str
    stop_at: float
    lanes: Mapping[str, tuple[float, float]]
    engines: tuple[str, ...] = ("vllm", "torch")
    minutes: float = 4.0
    workflow: str = ""
