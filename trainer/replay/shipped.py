"""What of a trainer's settings would run code that headrace does not ship. For settings that came with data.

Guarantee: with no foreign name, opening the learner imports nothing but what is listed here and in `trainer.losses.loss`, and
passes it no option that names a path or an address.
"""

from trainer.config import LOSSES, TrainerConfig, loss_use
from trainer.learners.learner import LEARNERS


def foreign_names(config: TrainerConfig) -> tuple[str, ...]:
    """Every setting that names something else, as `path = "value"`; empty where all of it ships."""
    found = []
    options = LEARNERS.get(config.learner.use)
    if options is None:
        found.append(f'trainer.learner.use = "{config.learner.use}"')
    else:
        unknown = [name for name in config.learner.options if name not in options]
        found += [f"trainer.learner.options.{name} = {config.learner.options[name]!r}" for name in unknown]
    shipped = {*LOSSES, *(loss_use(name) for name in LOSSES)}
    for lane, one in config.lanes.items():
        if one.loss not in shipped:
            found.append(f'trainer.lanes.{lane}.loss = "{one.loss}"')
    return tuple(found)
