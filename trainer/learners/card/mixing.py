"""The kernel that mixes XXH3's sums block by block, one program a tensor (see `trainer.learners.card.xxh3`)."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from trainer.learners.card.xxh3 import FIRST_SUMS, LANES, PRIME32_1, mixing_keys, signed

AHEAD = tl.constexpr(16)  # blocks whose sums are asked of memory before the first of them is mixed
WORDS = tl.constexpr(LANES)
PRIME = tl.constexpr(PRIME32_1)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(sums, first, count, start, keys, out):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, WORDS)
    tensor = tl.program_id(0)
    total = tl.load(start + lane).to(tl.uint64, bitcast=True)
    key = tl.load(keys + lane).to(tl.uint64, bitcast=True)
    at = sums + tl.load(first + tensor) * WORDS + lane
    blocks = tl.load(count + tensor)
    together = blocks // AHEAD
    for _ in range(together):
        for step in tl.static_range(AHEAD):
            total += tl.load(at + step * WORDS).to(tl.uint64, bitcast=True)
            total = (total ^ (total >> 47) ^ key) * PRIME
        at += AHEAD * WORDS
    for _ in range(blocks - together * AHEAD):
        total += tl.load(at).to(tl.uint64, bitcast=True)
        total = (total ^ (total >> 47) ^ key) * PRIME
        at += WORDS
    tl.store(out + tensor * WORDS + lane, total.to(tl.int64, bitcast=True))


def mix_on_card(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """`trainer.learners.card.xxh3.Mix` as a kernel."""
    device = sums[0].device

    def words(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    counts = [len(part) for part in sums]
    firsts = [0, *accumulate(counts[:-1])]
    out = torch.empty(len(sums), LANES, dtype=torch.int64, device=device)
    start = [signed(word) for word in FIRST_SUMS]
    given = torch.cat(list(sums)), words(firsts), words(counts), words(start), words(mixing_keys()), out
    _mix[(len(sums),)](*given, num_warps=1)
    return out
