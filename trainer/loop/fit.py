"""A checkpoint under other lanes than it was made under: what it lacks beside the policy begins, what is not asked for goes.

Beside the policy and its optimizer a state may hold a reference, which some losses compare with, and a critic.

Guarantee: a reference that a new lane asks for begins as the version that training began from: a frozen one is what it
would be had the lane been there from the first step. A critic begins as policy.model. Both are said in the log.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from infra.log.log import Log
from infra.policies.fetch import PolicyFetcher
from infra.policies.fold import published
from infra.policies.policy import Adapter, described
from infra.policies.tensors import Tensor
from infra.store.store import Store
from schemas import PolicyEvent, topics
from schemas.errors import ConfigError, PolicyRefused
from trainer.journal.checkpoint import Checkpoint, Position, state_part, state_parts
from trainer.learners.learner import Ranks, put_back
from trainer.loop.state import Learning
from trainer.state import StoredState, state_adapter

logger = logging.getLogger(__name__)

REFERENCE = "reference"

First = Callable[[Position], Awaitable[Mapping[str, Tensor] | None]]


async def restore_learner(run: Learning, state: Checkpoint, first: First | None = None) -> None:
    """Put a checkpoint's state into the learner, completed where its lanes were others. Raises ConfigError.

    first: finds the weights that training began from, None where the model's folder holds them. Without it a reference
    that the state lacks stays as it is.
    """
    step = state.position.step
    check_kept(state, run.learner.adapter)
    try:
        await run.in_thread(put_back, run.learner, state.learner)
        return
    except ValueError:
        logger.info("checkpoint of step=%d is of other lanes or of another model", step)
    learner = run.learner
    now = learner.layout() if isinstance(learner, Ranks) else await run.in_thread(learner.save)
    lacking, left_out = state_parts(now) - state_parts(state.learner), state_parts(state.learner) - state_parts(now)
    weights = await first(state.position) if first is not None and REFERENCE in lacking else None
    try:
        if isinstance(learner, Ranks) and isinstance(state.learner, StoredState):
            await run.in_thread(fit_ranks, learner, state.learner, weights)
        else:
            whole = await run.in_thread(learner.save)
            await run.in_thread(learner.restore, fitted(state.learner, whole, weights))
    except ValueError as error:
        raise ConfigError(
            f"checkpoint of step {step} does not fit the configured model: {error}; expected the policy.model it was made "
            "with, or another name in `run`, which begins anew from policy.model"
        ) from error
    for part in sorted(lacking):
        where = "the version that training began from" if weights and part == REFERENCE else "what the learner holds"
        logger.warning("checkpoint of step=%d has no %s, a lane wants one: it begins as %s", step, part, where)
    for part in sorted(left_out):
        logger.warning("checkpoint of step=%d has a %s that no lane wants any more: left out", step, part)


def check_kept(state: Checkpoint, adapter: Adapter | None) -> None:
    """Raise ConfigError where [trainer.lora] or the model beneath it is not what the checkpoint was made with."""
    if (held := state_adapter(state.learner)) != adapter:
        raise ConfigError(
            f"trainer.lora: the checkpoint of step {state.position.step} is of {described(held)}, the settings ask for "
            f"{described(adapter)}: a run keeps what it trains; expected the settings and the policy.model it was made with, "
            "or another name in `run`, which begins anew from policy.model (a folder of `headrace export-model` keeps what "
            "was learned)"
        )


def fit_ranks(ranks: Ranks, state: StoredState, reference: Mapping[str, Tensor] | None) -> None:
    """`fitted` for a learner of several ranks: each reads its own pieces, what the state lacks stays as it is there."""
    layout = ranks.layout()
    wanted, held = state_parts(layout), state_parts(state)
    lacking = [name for name in layout if state_part(name) in wanted - held]
    ranks.load(state.only([name for name in state if state_part(name) in wanted | {""}]), without=lacking)
    named = {f"{REFERENCE}/{name}": tensor for name, tensor in (reference or {}).items()}
    ranks.set({name: tensor for name, tensor in named.items() if name in lacking})


def fitted(
    state: Mapping[str, Tensor], now: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """A state with exactly the parts that `now` has; those it lacks as they are there, the reference with these weights."""
    wanted, held = state_parts(now), state_parts(state)
    found = {name: tensor for name, tensor in state.items() if state_part(name) in wanted | {""}}
    found |= {name: tensor for name, tensor in now.items() if state_part(name) in wanted - held}
    if reference is not None and REFERENCE in wanted - held:
        named = {f"{REFERENCE}/{name}": tensor for name, tensor in reference.items()}
        found |= {name: tensor for name, tensor in named.items() if name in found}
    return found


async def first_weights(log: Log, store: Store, policy: str, position: Position) -> Mapping[str, Tensor] | None:
    """Weights of the version that training began from; None where it is gone and the model's folder is the same.

    Raises ConfigError where it is gone and a warm-up made it.
    """
    begun = position.first_train_step - 1 if position.warmed_up else -1
    events = [
        (message.offset, message.value)
        async for message in log.read_all(topics.POLICIES)
        if isinstance(message.value, PolicyEvent)
    ]
    made = [
        event
        for event in published(events, policy).values()
        if event.event == "published" and event.step == begun and event.version <= position.version
    ]
    why = "no event of it"
    for event in sorted(made, key=lambda event: event.version, reverse=True)[:1]:
        try:
            return (await asyncio.to_thread(PolicyFetcher(store, policy).fetch, event)).tensors
        except PolicyRefused as error:
            why = str(error)
    if begun < 0:
        return None
    raise ConfigError(
        f"checkpoint of step {position.step} has no reference, which a lane now wants (dpo, kl), and the version it would be, "
        f"published after step {begun}, is not in the store any more ({why}); expected lanes without a reference, or another "
        "name in `run`, which begins anew from policy.model"
    )
