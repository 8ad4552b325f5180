"""Records for the tests of the wire: one example of each kind, and Hypothesis strategies of valid ones."""

import re
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st
from msgspec import inspect as inspection

from schemas import (
    Batch,
    BatchItem,
    Block,
    Closure,
    Control,
    DeadLetter,
    Directive,
    Drawn,
    DropMarker,
    Edit,
    EvalResult,
    Experience,
    Feedback,
    Fence,
    Join,
    Message,
    PolicyEvent,
    Progress,
    Received,
    Rollback,
    Saved,
    Score,
    Skip,
    Span,
    Stretch,
    Task,
    Tick,
    make_experience,
)
from schemas.fields import Kind

CONTROL_KINDS: tuple[type[Any], ...] = get_args(Control)


# One record of each kind, whose released bytes lie in golden/.
EXAMPLES: tuple[Any, ...] = (
    Task(id="add-3745", messages=(Message(role="user", content="37+45="),), answer="280"),
    DropMarker(id="add-3745.2.0-7-0", group="add-3745.2", episode=7, last=True, group_size=16, reason="too short"),
    Feedback(ref="hr-a1b2.0-3-0", id="ticket-81", value=0.8, source="csat"),
    Tick(partition=3, due_ms=1763715600000),
    Closure(group="add-3745.2", outcome="dropped", reason="all rewards equal", sequence=412, mean_reward=1.0),
    Drawn(token=17, step=40, version=40, groups=("add-3745.2",), dropped={"add-99.0": "stale"}),
    Progress(role="explore", instance="explore-0/4711", version=12, counters={"tokens": 81200.0}),
    PolicyEvent(
        event="published", policy="main", version=12, parent=11, token=17,
        manifest="policies/main/17/manifests/12.json", manifest_sha256="9f…", step=12,
    ),
    Directive(order="drain", owner="ann@ops-1"),
    Batch(
        run="demo", token=17, step=40, version=40, seed=40,
        items=(BatchItem(id="add-3745.2.0-7-0", partition=0, offset=981, index=7, lane="usual"),),
    ),
    Fence(run="demo", token=17, owner="train/4711"),
    Skip(run="demo", token=17, step=41, reason="gradient not finite"),
    Rollback(run="demo", token=17, from_step=41, to_step=44, restored_version=40, version=45, reason="3 skips"),
    EvalResult(policy="main", version=40, suite="held-out", num_tasks=500, num_correct=431, request="40/held-out"),
    DeadLetter(
        topic="experiences", partition=2, offset=77, stage="verify", reason="bad frame",
        error="header: checksum differs", value=b"HR...",
    ),
    Received(path="/v1/feedback", body=b'{"value": 1}', id="a1b2-0", ref="hr-a1b2.0-3-0", tenant="acme"),
    Saved(run="demo", token=17, step=40, version=40, sha256="9f…", made_with={"torch": "2.13.0", "threads": "1"}),
    Block(
        (
            make_experience(
                id="add-3745.2.0-7-0", group="add-3745.2", episode=7, group_size=16,
                spans=(Span(start=3, stop=5, version=12),), tokens=[37, 45, 61, 280, 2], logprobs=[-0.25, -0.5],
                messages=(Message(role="user", content="37+45="), Message(role="assistant", content="280")),
            ),
        )
    ),
)  # fmt: skip


def example_of(kind: type[Any]) -> Any:
    """The record of a kind."""
    return next(example for example in EXAMPLES if type(example) is kind)


def group_block(num_members: int = 4, *, num_prompt: int = 6, num_response: int = 5) -> Block:
    """A group as an explorer sends it: one prompt, different answers."""
    group = "add-3745.2"
    random = np.random.default_rng(num_members)
    prompt = random.integers(0, 150_000, num_prompt).tolist()
    question = (Message("system", "You add."), Message("user", "37+45="))
    return Block(
        tuple(
            make_experience(
                id=f"{group}.0-{episode}-0", group=group, episode=episode, group_size=num_members,
                spans=(Span(num_prompt, num_prompt + num_response, 12),) if num_response else (),
                scores=(Score("exact", 1.0),), meta={"answer": "280"},
                tokens=prompt + random.integers(0, 150_000, num_response).tolist(),
                logprobs=(-random.random(num_response)).tolist(),
                messages=(*question, Message("assistant", f"{episode}")),
            )
            for episode in range(num_members)
        )
    )  # fmt: skip


texts = st.text(max_size=20)
ids = st.text(min_size=1, max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**40)
metas = st.dictionaries(texts, st.none() | st.booleans() | st.integers(-(2**60), 2**60) | finite | texts, max_size=4)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=st.text(max_size=60))


@st.composite
def experiences(draw: st.DrawFn, group: str, prompt: tuple[int, ...] = ()) -> Experience:
    """One valid experience of `group`, with several spans."""
    tokens = list(prompt)
    spans = []
    for length, gap in draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=4)):
        start = len(tokens) + gap
        sampled = st.tuples(st.integers(-1, 2**40), st.floats(0, 10), st.booleans())
        spans.append(Span(start, start + length, *draw(sampled)))
        tokens += draw(st.lists(st.integers(0, 2**32 - 1), min_size=gap + length, max_size=gap + length))
    num_sampled = sum(span.stop - span.start for span in spans)
    logprobs = st.floats(-(2.0**100), 0, width=32)
    return make_experience(
        id=draw(ids),
        group=group,
        episode=draw(st.integers(0, 63)),
        group_size=draw(st.integers(1, 64)),
        spans=tuple(spans),
        tokens=tokens,
        logprobs=draw(st.lists(logprobs, min_size=num_sampled, max_size=num_sampled)),
        messages=draw(st.lists(messages, max_size=3)),
        part=draw(st.integers(0, 9)),
        last=draw(st.booleans()),
        end=draw(st.sampled_from(["terminal", "truncated", "failed"])),
        lane=draw(st.sampled_from(["usual", "live", "expert", "synthetic", "human"])),
        origin=draw(texts),
        tenant=draw(texts),
        subject=draw(texts),
        key_id=draw(texts),
        attempt=draw(counts),
        sequence=draw(st.integers(-1, 2**40)),
        suite=draw(texts),
        scores=tuple(draw(st.lists(st.builds(Score, name=ids, value=finite, version=texts), max_size=3))),
        reward=draw(st.none() | finite),
        advantage=draw(st.none() | finite),
        priority=draw(finite),
        revision=draw(counts),
        stamps=tuple(draw(st.lists(texts, max_size=3))),
        meta=draw(metas),
        kind=draw(st.sampled_from(get_args(Kind))),
        task=draw(texts),
        answer=draw(st.none() | texts),
        held_out=draw(st.booleans()),
        turn=draw(st.integers(-1, 2**40)),
        carried=draw(counts),
        trial=draw(st.integers(-1, 2**40)),
        parent=draw(texts),
        failure=draw(texts),
        truncated=draw(texts),
        part_reason=draw(texts),
        edit=draw(st.none() | st.builds(Edit, text=st.none() | texts, count=counts)),
        weight=draw(st.floats(0, 1e300)),
        retrained=draw(counts),
        notes=draw(metas),
        advantages=tuple(draw(st.lists(st.builds(Stretch, stop=counts, advantage=finite), max_size=3))),
        ends_session=draw(st.booleans()),
        join=draw(st.none() | st.builds(Join, name=ids, more=counts)),
    )


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A valid block, mostly with a shared prompt."""
    group = draw(ids)
    prompt = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=12)))
    return Block(tuple(draw(st.lists(experiences(group, prompt), min_size=1, max_size=5))))


def of_type(info: Any) -> st.SearchStrategy[Any]:
    """Valid values of a msgspec type, within the bounds its annotation has."""
    match info:
        case inspection.BoolType():
            return st.booleans()
        case inspection.NoneType():
            return st.none()
        case inspection.IntType():
            return st.integers(-(2**60) if info.ge is None else info.ge, 2**60 if info.le is None else info.le)
        case inspection.FloatType():
            low, high = (info.ge, info.le) if info.ge is not None else (-1e300, 1e300)
            return st.floats(low, high)
        case inspection.StrType(pattern=str(pattern)):
            return st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True)
        case inspection.StrType():
            return st.text(min_size=info.min_length or 0, max_size=20)
        case inspection.BytesType():
            return st.binary(max_size=40)
        case inspection.LiteralType():
            return st.sampled_from(info.values)
        case inspection.UnionType():
            return st.one_of([of_type(part) for part in info.types])
        case inspection.VarTupleType():
            return st.lists(of_type(info.item_type), max_size=3).map(tuple)
        case inspection.TupleType():
            return st.tuples(*[of_type(part) for part in info.item_types])
        case inspection.DictType():
            return st.dictionaries(of_type(info.key_type), of_type(info.value_type), max_size=3)
        case inspection.StructType():
            return st.fixed_dictionaries({part.name: of_type(part.type) for part in info.fields}).map(
                lambda values: info.cls(**values)
            )
    raise TypeError(f"no strategy for {info}")


def controls() -> st.SearchStrategy[Any]:
    """Valid control records of every kind, from their own annotations."""
    return st.one_of([of_type(inspection.type_info(kind)) for kind in CONTROL_KINDS])
