"""A low-rank adapter (LoRA, arXiv:2106.09685): W' = W + alpha / rank · B A, of which A and B alone are trained."""

import msgspec


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an adapter. A policy keeps them for life.

    rank: of its two matrices. alpha: its output is scaled by alpha / rank. targets: names of the adapted modules, each
    the end of one or more module names; sorted. base: hash of the folder's tensors that it is an adapter of, see
    `infra.model.adapter.base_hash`. within: name of the module that alone is adapted (the text model of one that takes
    pictures), "" for the whole.

    Example: Adapter(rank=16, alpha=32, targets=("q_proj", "v_proj"), base="9f…")
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    base: str
    within: str = ""

    def __str__(self) -> str:
        where = f" within {self.within}" if self.within else ""
        return (
            f"rank {self.rank}, alpha {self.alpha}, targets {', '.join(self.targets)}{where}, on base {self.base[:12]}"
        )


def described(adapter: Adapter | None) -> str:
    """In words, for messages that compare two."""
    return "full weights" if adapter is None else f"an adapter of {adapter}"
