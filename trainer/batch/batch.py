"""Packs the items of a step into rows, so that a forward pass computes shared prefixes of a group once.

Guarantees: in a packed forward pass every sampled token has the logprob of its own sequence; each sampled token appears exactly
once; the order of items decides the result, nothing is random.

The sequences of a group form a tree of shared prefixes, laid out depth first: a token is followed by all its descendants.
`reach` is one past the last of them, so position i may attend to j exactly if j <= i < reach[j], and several trees can share a
row. The last token of a sequence is only a target, never an input.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from schemas import BatchItem, Experience
from schemas.experience import CHOSEN, pair_side
from schemas.fields import LANES, Lane
from schemas.wire.teacher import teacher_logprobs
from trainer.batch.tree import (
    Branch,
    Gallery,
    Pictures,
    Tree,
    grow,
    hang,
    in_order,
    no_pixels,
    no_places,
    picture_fields,
)


class TrainItem(msgspec.Struct, frozen=True):
    """One experience with the numbers the journal gave it, and its pictures.

    experience: its tokens are read when it is packed. item: as journaled. pictures: None for text alone.
    """

    experience: Experience
    item: BatchItem
    pictures: Pictures | None = None


class Microbatch(msgspec.Struct, frozen=True, kw_only=True):
    """One forward. B rows of T input tokens; N sampled tokens, each read at its predecessor. Indexes are int64.

    tokens_BT, positions_BT: int64. reach_BT: one past the last index of the row that may attend here. predecessor_N: index
    into B*T. target_N: id of the sampled token. behaviour_N: float32, log μ as recorded. advantage_N, weight_N, temperature_N:
    float32. version_N: behaviour version. ratio_N: bool, μ is the policy's own. exact_N: bool, μ is exactly that version's,
    not sampled with keys and values of older ones (`Span.kv`). lane_N: index into LANES. sequence_N: index into the packed
    items. pair_N: 2p for the chosen, 2p + 1 for the rejected side of the step's pair p, -1 for a token outside any pair.
    teacher_N: float32, the teacher's logprob, NaN without a teacher. reward_N: float32, the sequence's reward at its last
    sampled token (NaN where it has none), 0 elsewhere and where it is bootstrapped. bootstrap_N: index into B*T where the
    critic values the state after the last sampled token of such a sequence, -1 elsewhere. pixels_I3HW: float32, its pictures.
    places_P: indexes into B*T of their tokens, picture after picture, equally many each.
    """

    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    reach_BT: np.ndarray
    predecessor_N: np.ndarray
    target_N: np.ndarray
    behaviour_N: np.ndarray
    advantage_N: np.ndarray
    weight_N: np.ndarray
    temperature_N: np.ndarray
    version_N: np.ndarray
    ratio_N: np.ndarray
    exact_N: np.ndarray
    lane_N: np.ndarray
    sequence_N: np.ndarray
    pair_N: np.ndarray
    teacher_N: np.ndarray
    reward_N: np.ndarray
    bootstrap_N: np.ndarray
    pixels_I3HW: np.ndarray = msgspec.field(default_factory=no_pixels)
    places_P: np.ndarray = msgspec.field(default_factory=no_places)


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The input of an optimizer step.

    microbatches: microbatches of this process. lane_tokens: sampled tokens of each lane in the step over all ranks, the
    denominator of means over tokens. lane_sequences: likewise for sequences. lane_gains: for lanes with a teacher, the mean of
    log π_T - log μ over these tokens. num_sequences: sequences of all lanes. version: policy version before the step. exact:
    True if the weights before the step are that version's, so that its tokens measure engine against trainer. max_tokens:
    maximum positions of a microbatch, 0 for the size of the largest.
    """

    microbatches: tuple[Microbatch, ...]
    lane_tokens: Mapping[Lane, int]
    num_sequences: int
    lane_sequences: Mapping[Lane, int] = {}
    lane_gains: Mapping[Lane, float] = {}
    version: int = 0
    exact: bool = True
    max_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(rows.target_N) for rows in self.microbatches)


def pack(
    items: Sequence[TrainItem], *, max_tokens: int, version: int = 0, exact: bool = True, bootstrap: bool = False
) -> PackedBatch:
    """Pack whole groups, and joined turns of a session, into rows, and rows into microbatches of at most `max_tokens` positions
    including padding.

    A larger group is cut between sequences, never within a pair; a larger sequence is packed alone. bootstrap: whether the last
    part of a truncated episode gets a place for the critic's value in place of its reward. Packing proceeds group by group, so
    other threads can run. Raises ValueError for an experience that cannot be trained (no sampled token, or no token before the
    first).
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected 1 or more")
    if not items:
        return PackedBatch(microbatches=(), lane_tokens={}, num_sequences=0, version=version, exact=exact)
    given = _given(items, bootstrap)
    groups: dict[tuple[object, ...], list[int]] = {}
    for s, item in enumerate(items):  # equal tokens are the same only where they show the same
        names = item.pictures.names if item.pictures is not None else ()
        groups.setdefault((shared_by(item.experience), item.item.lane, names), []).append(s)
    trees = [
        tree
        for members in groups.values()
        for tree in grow(in_order([_branch(items, given, s) for s in members]), max_tokens)
    ]
    rows = fill_rows(trees, [LANES.index(items[tree.sequences[0]].item.lane) for tree in trees], max_tokens)
    microbatches = tuple(_assemble(items, given, trees, some) for some in chunk(rows, trees, max_tokens))
    return PackedBatch(
        microbatches=microbatches,
        lane_tokens=count_lanes(microbatches),
        lane_sequences=count_sequences(microbatches),
        lane_gains=mean_gains(microbatches),
        num_sequences=len(items),
        version=version,
        exact=exact,
        max_tokens=max_tokens,
    )


def shared_by(experience: Experience) -> str:
    """Name of the sequences that share a prompt: the group, or the turns of a session that were closed together."""
    return experience.group if experience.join is None else experience.join.name


class _Given(NamedTuple):
    """Arrays of all sequences before they are laid out. at: of each, indexes of its sampled tokens.

    pair_S: pair and side. bootstrap_S bool: its end is valued. start_S: where it begins in the gallery's numbers.
    """

    at: list[np.ndarray]
    pair_S: np.ndarray
    bootstrap_S: np.ndarray
    start_S: np.ndarray
    gallery: Gallery


def _given(items: Sequence[TrainItem], bootstrap: bool) -> _Given:
    for item in items:
        if not item.experience.spans or item.experience.num_prompt < 1:
            got = item.experience.spans[:1]
            raise ValueError(
                f"{item.experience.id}: spans: got {got}, expected sampled tokens after at least one token"
            )
        if len(item.experience.logprobs) != item.experience.num_sampled:
            got_num = len(item.experience.logprobs)
            raise ValueError(
                f"{item.experience.id}: logprobs: got {got_num}, expected {item.experience.num_sampled} as the spans say"
            )
    shown = any(item.pictures is not None for item in items)
    length_S = np.array([item.experience.num_tokens if shown else 0 for item in items])
    start_S = np.cumsum(length_S) - length_S
    return _Given(
        at=[np.concatenate([np.arange(span.start, span.stop) for span in item.experience.spans]) for item in items],
        pair_S=_pairs(items),
        bootstrap_S=np.array(
            [bootstrap and item.experience.end == "truncated" and item.experience.last for item in items]
        ),
        start_S=start_S,
        gallery=hang([item.pictures for item in items], start_S, int(length_S.sum())),
    )


def _branch(items: Sequence[TrainItem], given: _Given, s: int) -> Branch:
    """The inputs of a sequence: all but its last token, which only a bootstrapped value is read at."""
    experience = items[s].experience
    num = experience.spans[-1].stop - 1 + int(given.bootstrap_S[s])
    numbers = given.gallery.number[given.start_S[s] :][:num]
    return Branch(
        s,
        experience.tokens[:num],
        given.at[s],
        bool(given.pair_S[s] >= 0),
        numbers,
        is_turn=experience.join is not None,
    )


def _pairs(items: Sequence[TrainItem]) -> np.ndarray:
    """Pair and side of each sequence, [S]: pairs are numbered as their groups come."""
    numbers: dict[tuple[str, Lane], int] = {}
    found = np.full(len(items), -1)
    for s, item in enumerate(items):
        if side := pair_side(item.experience):
            number = numbers.setdefault((item.experience.group, item.item.lane), len(numbers))
            found[s] = 2 * number + (side != CHOSEN)
    return found


def _advantages(item: TrainItem) -> np.ndarray:
    """The item's advantage for each sampled token, plus the difference of its turn's from the experience's."""
    found = np.full(item.experience.num_sampled, item.item.advantage, np.float32)
    if item.experience.advantages and item.experience.advantage is not None:
        stops = [stretch.stop for stretch in item.experience.advantages]
        values = np.array([stretch.advantage for stretch in item.experience.advantages])
        at = np.concatenate([np.arange(span.start, span.stop) for span in item.experience.spans])
        of_turn = values[np.minimum(np.searchsorted(stops, at, side="right"), len(stops) - 1)]
        found += (of_turn - item.experience.advantage).astype(np.float32)
    return found


def _teacher(experience: Experience) -> np.ndarray:
    found = teacher_logprobs(experience)
    return np.full(experience.num_sampled, np.nan, np.float32) if found is None else found


def _rewards(items: Sequence[TrainItem], sequence_N: np.ndarray, bootstrap_S: np.ndarray) -> np.ndarray:
    rewards_N = np.zeros(len(sequence_N), np.float32)
    last_S = np.flatnonzero(np.append(sequence_N[1:] != sequence_N[:-1], True))
    rewards = [item.experience.reward for item in items]
    rewards_N[last_S] = np.where(bootstrap_S, 0.0, [np.nan if reward is None else reward for reward in rewards])
    return rewards_N


def _per_token(items: Sequence[TrainItem], given: _Given, chosen: Sequence[int]) -> dict[str, np.ndarray]:
    mine = [items[s] for s in chosen]
    num_S = np.array([len(given.at[s]) for s in chosen])
    spans = [span for item in mine for span in item.experience.spans]
    num_L = np.array([span.stop - span.start for span in spans])
    temperatures = np.array([span.temperature if span.temperature > 0 else 1.0 for span in spans], np.float32)
    sequence_N = np.repeat(np.array(chosen), num_S)
    return {
        "target_N": np.concatenate([items[s].experience.tokens[given.at[s]] for s in chosen]).astype(np.int64),
        "behaviour_N": np.concatenate([item.experience.logprobs for item in mine]).astype(np.float32),
        "advantage_N": np.concatenate([_advantages(item) for item in mine]),
        "weight_N": np.repeat(np.array([item.item.weight for item in mine], np.float32), num_S),
        "temperature_N": np.repeat(temperatures, num_L),
        "version_N": np.repeat(np.array([span.version for span in spans]), num_L),
        "ratio_N": np.repeat(np.array([span.ratio for span in spans]), num_L),
        "exact_N": np.repeat(np.array([span.kv < 0 for span in spans]), num_L),
        "lane_N": np.repeat(np.array([LANES.index(item.item.lane) for item in mine]), num_S),
        "sequence_N": sequence_N,
        "pair_N": np.repeat(given.pair_S[chosen], num_S),
        "teacher_N": np.concatenate([_teacher(item.experience) for item in mine]),
        "reward_N": _rewards(mine, sequence_N, given.bootstrap_S[chosen]),
    }


def _assemble(
    items: Sequence[TrainItem], given: _Given, trees: Sequence[Tree], rows: Sequence[Sequence[int]]
) -> Microbatch:
    num_T = max(sum(trees[tree].size for tree in row) for row in rows)
    shape = (len(rows), num_T)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    reach = np.tile(np.arange(1, num_T + 1), (len(rows), 1))  # padding is seen by itself only
    nodes: dict[int, tuple[np.ndarray, int]] = {}  # of each sequence: its sampled tokens' predecessors, its end
    numbers, indexes = [], []
    for r, row in enumerate(rows):
        begin = 0
        for tree in (trees[index] for index in row):
            place = slice(begin, begin + tree.size)
            tokens[r, place], positions[r, place], reach[r, place] = tree.token, tree.position, tree.reach + begin
            first = r * num_T + begin
            for s, predecessor_N, end in zip(tree.sequences, tree.predecessors, tree.ends, strict=True):
                nodes[s] = (first + predecessor_N, first + end)
            numbers.append(tree.number)
            indexes.append(first + np.arange(len(tree.number)))
            begin += tree.size
    chosen = sorted(nodes)
    bootstraps = [np.full(len(given.at[s]), -1) for s in chosen]
    for s, bootstrap_N in zip(chosen, bootstraps, strict=True):
        if given.bootstrap_S[s]:
            bootstrap_N[-1] = nodes[s][1]
    return Microbatch(
        tokens_BT=tokens,
        positions_BT=positions,
        reach_BT=reach,
        predecessor_N=np.concatenate([nodes[s][0] for s in chosen]),
        bootstrap_N=np.concatenate(bootstraps),
        **_per_token(items, given, chosen),
        **picture_fields(given.gallery, np.concatenate(numbers), np.concatenate(indexes)),
    )


def count_lanes(microbatches: Sequence[Microbatch]) -> dict[Lane, int]:
    counts = sum((np.bincount(rows.lane_N, minlength=len(LANES)) for rows in microbatches), np.zeros(len(LANES), int))
    return {lane: int(count) for lane, count in zip(LANES, counts, strict=True) if count}


def mean_gains(microbatches: Sequence[Microbatch]) -> dict[Lane, float]:
    """Mean log π_T - log μ of the tokens of each lane whose tokens all have a teacher and a ratio."""
    found = {}
    for index, lane in enumerate(LANES):
        gains = [(rows.teacher_N - rows.behaviour_N)[rows.lane_N == index] for rows in microbatches]
        mean = np.concatenate(gains).mean(dtype=np.float64) if sum(map(len, gains)) else np.nan
        if np.isfinite(mean):
            found[lane] = float(mean)
    return found


def count_sequences(microbatches: Sequence[Microbatch]) -> dict[Lane, int]:
    counts: dict[Lane, int] = {}
    for rows in microbatches:
        for index in np.unique(rows.lane_N):
            num = len(np.unique(rows.sequence_N[rows.lane_N == index]))
            counts[LANES[index]] = counts.get(LANES[index], 0) + num
    return counts


SHARED_ROW_TOKENS = 512  # short trees share rows of at most this width
ATTENTION_TOKENS = 1024  # row width at which attention costs about as much as the rest of a small model


def fill_rows(trees: Sequence[Tree], lanes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Arrange trees, by index, into rows of the cheapest width: wide rows cost attention, narrow rows padding."""
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
