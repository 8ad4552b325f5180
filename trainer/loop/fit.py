"""Restores a checkpoint whose lanes differ from the settings: initializes missing parts, drops unused parts.

The parts are the reference, which some losses need, and the critic, next to the policy and its optimizer.

Guarantee: a missing reference starts as the policy of the checkpoint, a missing critic as policy.model. The trainer logs both.
"""

import logging

from infra.policies.policy import Adapter, described
from schemas.errors import ConfigError
from trainer.journal.checkpoint import Checkpoint, state_part, state_parts
from trainer.loop.state import Learning
from trainer.state import state_adapter

logger = logging.getLogger(__name__)

POLICY, REFERENCE = "model/", "reference/"


async def restore_learner(run: Learning, state: Checkpoint) -> None:
    """Put a checkpoint's state into the learner, completed where its lanes were others. Raises ConfigError."""
    step = state.position.step
    check_kept(state, run.learner.adapter)
    try:
        await run.in_thread(run.learner.restore, state.learner)
        return
    except ValueError:
        logger.info("checkpoint of step=%d is of other lanes or of another model", step)
    learner = run.learner
    now = await run.in_thread(learner.save)
    wanted, held = state_parts(now), state_parts(state.learner)
    lacking = [name for name in now if state_part(name) in wanted - held]
    begun = {name: POLICY + name.removeprefix(REFERENCE) for name in lacking if name.startswith(REFERENCE)}
    kept = {name for name in state.learner if state_part(name) in wanted | {""}}
    try:
        policy = {name: state.learner[source] for name, source in begun.items() if source in state.learner}
        found = {name: state.learner[name] for name in kept} | {name: now[name] for name in lacking}
        await run.in_thread(learner.restore, found | policy)
    except ValueError as error:
        raise ConfigError(
            f"checkpoint of step {step} does not fit the configured model: {error}; expected the policy.model it was made "
            "with, or another name in `run`, which begins from policy.model"
        ) from error
    for part in sorted(wanted - held):
        where = "the policy of the checkpoint" if policy and part == "reference" else "policy.model"
        logger.warning("checkpoint of step=%d has no %s, a lane wants one: it begins as %s", step, part, where)
    for part in sorted(held - wanted):
        logger.warning("checkpoint of step=%d has a %s that no lane wants any more: left out", step, part)


def check_kept(state: Checkpoint, adapter: Adapter | None) -> None:
    """Raise ConfigError where the checkpoint was made with another [trainer.lora] or another model beneath it."""
    if (held := state_adapter(state.learner)) != adapter:
        raise ConfigError(
            f"trainer.lora: the checkpoint of step {state.position.step} is of {described(held)}, the settings ask for "
            f"{described(adapter)}: expected the settings and the policy.model of its first start, "
            "or another name in `run`, which begins from policy.model (a folder of `headrace export-model` keeps what "
            "was learned)"
        )
