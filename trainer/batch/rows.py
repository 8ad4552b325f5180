"""Which trees share a row, and which rows a microbatch."""

from collections.abc import Iterator, Sequence

import numpy as np

from trainer.batch.tree import Tree

SHARED_ROW_TOKENS = 512  # short trees share rows of at most this width
ATTENTION_TOKENS = 1024  # row width at which attention costs about what the rest of a small model does


def fill_rows(trees: Sequence[Tree], lanes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Trees, by their indexes, into rows of the width that costs least: wide rows cost attention, narrow ones padding."""
    size = np.array([tree.size for tree in trees])
    fitting = size[size <= max_tokens]  # a tree that does not fit gets a row, and a microbatch, alone
    widest = int(fitting.max()) if len(fitting) else max_tokens
    widths = {widest} | {widest * i // 2 for i in (3, 4, 6) if widest * i // 2 <= min(SHARED_ROW_TOKENS, max_tokens)}
    choices = [_first_fit(size, lanes, width) for width in sorted(widths)]

    def cost(rows: list[list[int]]) -> float:
        width = max(int(size[row].sum()) for row in rows)
        return len(rows) * width * (1 + width / ATTENTION_TOKENS)

    return min(choices, key=cost)


def chunk(rows: list[list[int]], trees: Sequence[Tree], max_tokens: int) -> Iterator[list[list[int]]]:
    """Rows of like width into microbatches."""
    used = {id(row): sum(trees[tree].size for tree in row) for row in rows}
    rows = sorted(rows, key=lambda row: -used[id(row)])
    while rows:
        count = max(1, max_tokens // used[id(rows[0])])
        yield rows[:count]
        rows = rows[count:]


def _first_fit(size: np.ndarray, lanes: Sequence[int], width: int) -> list[list[int]]:
    """Trees, largest first, into the first row with room; a row holds one lane."""
    rows: list[list[int]] = []
    room: list[int] = []
    sizes = size.tolist()
    for tree in np.argsort(-size, kind="stable").tolist():
        for r, free in enumerate(room):
            if free >= sizes[tree] and lanes[rows[r][0]] == lanes[tree]:
                rows[r].append(tree)
                room[r] -= sizes[tree]
                break
        else:
            rows.append([tree])
            room.append(width - sizes[tree])
    return rows
