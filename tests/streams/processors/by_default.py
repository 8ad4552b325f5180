"""Built-in processors with the options that the settings give them where nobody set any."""

from functools import partial

import msgspec

from streams import config
from streams.processors import advantage as advantages
from streams.processors import filter as filters
from streams.processors import reward as rewards
from streams.processors import synthesize as synthesis


def options(section: config.Section) -> dict[str, object]:
    every = msgspec.structs.asdict(section)
    return {name: value for name, value in every.items() if name not in ("on", "memory")}


advantage = partial(advantages.advantage, **options(config.AdvantageConfig()))
filter_answers = partial(filters.filter, **options(config.FilterConfig()))
redact = partial(filters.redact, **options(config.RedactConfig()))
synthesize = partial(synthesis.synthesize, **options(config.SynthesizeConfig()))
reward = partial(rewards.reward, blend=None, require=(), discount=1.0)
