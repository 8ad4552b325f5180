"""A chain whose steps may see all experiences at once, whatever their groups: that of the trainer's batches.

Guarantees: those of `infra.chain.chain`; a step that fails, or gives back another number than it got, drops what it was
asked about with a reason.
"""

from collections.abc import Sequence

from infra.chain.calls import Failure
from infra.chain.chain import ChainResult, Context, Dropped, Step, call_step, run_chain
from infra.chain.faults import accepted
from infra.chain.processor import Drop
from schemas import Experience

NONSENSE = "processor returned nonsense"


async def run_whole(steps: Sequence[Step], experiences: Sequence[Experience]) -> ChainResult:
    """Pass a batch through the steps, in their order. Never raises for what a step does."""
    kept: tuple[Experience, ...] = tuple(experiences)
    dropped: list[Dropped] = []
    for step in steps:
        if not kept:
            break
        outcome = await (_whole(step, kept) if step.kind == "batch" else run_chain((step,), kept, Context()))
        kept = outcome.kept
        dropped += outcome.dropped
    return ChainResult(kept=kept, dropped=tuple(dropped))


async def _whole(step: Step, members: tuple[Experience, ...]) -> ChainResult:
    (result,) = await call_step(step, [members], {})
    if isinstance(result, Failure):
        return _all_dropped(step, members, f"processor {result.kind}", result.detail)
    if not isinstance(result, tuple | list) or len(result) != len(members):
        got = len(result) if isinstance(result, tuple | list) else type(result).__name__
        return _all_dropped(step, members, NONSENSE, f"got {got}, expected {len(members)}: each member or a Drop")
    kept: list[Experience] = []
    dropped: list[Dropped] = []
    for member, replacement in zip(members, result, strict=True):
        if isinstance(replacement, Drop):
            dropped.append(Dropped(member, str(replacement.reason), str(replacement.detail), step.stamp))
            continue
        after = member if replacement is member else accepted(member, replacement)
        if isinstance(after, str):
            dropped.append(Dropped(member, NONSENSE, after, step.stamp))
        else:
            kept.append(after)
    return ChainResult(kept=tuple(kept), dropped=tuple(dropped))


def _all_dropped(step: Step, members: Sequence[Experience], reason: str, detail: str) -> ChainResult:
    return ChainResult(kept=(), dropped=tuple(Dropped(member, reason, detail, step.stamp) for member in members))
