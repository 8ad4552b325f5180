"""Penalty for answers near their token limit, for a negative weight."""

from infra.chain.processor import score
from schemas import Experience
from schemas.errors import ConfigError


@score(version=1, inline=True)
class Overlong:
    """0 up to max_tokens - margin sampled tokens, 1 from max_tokens on, linear in between. With weight -1 in `[reward] blend`
    it is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    In an episode of several parts each part is measured alone, and the last part counts. max_tokens: Sampled tokens at which
    the penalty is 1. margin: Number of tokens below max_tokens over which the penalty grows.

    Example: max_tokens = 16384, margin = 4096
    """

    def __init__(self, *, max_tokens: int, margin: int) -> None:
        if not 0 < margin <= max_tokens:
            raise ConfigError(f"got margin = {margin} and max_tokens = {max_tokens}, expected 0 < margin <= max_tokens")
        self.max_tokens = max_tokens
        self.margin = margin

    def __call__(self, experience: Experience) -> float:
        return min(1.0, max(0.0, (experience.num_sampled - self.max_tokens + self.margin) / self.margin))
