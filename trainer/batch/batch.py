"""Pack what a step trains on into rows for one forward: what sequences of a group share is computed once.

Guarantees: a packed forward gives every sampled token the logprob it has in its own sequence; each sampled token
appears exactly once; the order of items decides everything, nothing is random.

The sequences of a group form a tree of shared prefixes, laid out depth first: a token is followed by all its
descendants. `reach` is one past the last of them, so position i may attend to j exactly where j <= i < reach[j], and
several trees share a row without seeing each other. The last token of a sequence is only ever a target, never an input.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from schemas import BatchItem, Experience
from schemas.fields import Lane
from schemas.pairs import CHOSEN, pair_side
from schemas.wire.teacher import teacher_logprobs
from trainer.batch.pictures import Gallery, Pictures, hang, no_pixels, no_places, of_nodes

LANES: tuple[Lane, ...] = get_args(Lane)
SHARED_ROW_TOKENS = 512  # short trees share rows of at most this width
ATTENTION_TOKENS = 1024  # row width at which attention costs about what the rest of a small model does


class TrainItem(msgspec.Struct, frozen=True):
    """One experience with the numbers the journal gave it, and what it shows.

    Example: TrainItem(experience=..., item=BatchItem(id="add-3745.2.0-7-0", ..., advantage=0.93))
    """

    experience: Experience
    item: BatchItem
    pictures: Pictures | None = None


class Microbatch(msgspec.Struct, frozen=True, kw_only=True):
    """One forward. B rows of T input tokens; N sampled tokens, each read at its predecessor.

    tokens_BT, positions_BT int64. reach_BT int64: one past the last index of the row that may attend here.
    predecessor_N int64: index into B*T. target_N int64. behaviour_N float32: log μ as recorded. advantage_N, weight_N,
    temperature_N float32. version_N int64: behaviour version. ratio_N bool: μ is the policy's own. lane_N int64: index
    into LANES. sequence_N int64: index into the packed items. pair_N int64: 2p for the chosen, 2p + 1 for the rejected
    side of the step's pair p, -1 for none. teacher_N float32: the teacher's logprob, NaN for none. reward_N float32: the
    sequence's reward at its last sampled token (NaN where it has none), 0 elsewhere and where it is bootstrapped.
    bootstrap_N int64: index into B*T where what follows the last sampled token of such a sequence is valued, -1
    elsewhere. pixels_I3HW float32: its pictures. places_P int64: indexes into B*T where they stand, picture after
    picture, equally many each.
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
    lane_N: np.ndarray
    sequence_N: np.ndarray
    pair_N: np.ndarray
    teacher_N: np.ndarray
    reward_N: np.ndarray
    bootstrap_N: np.ndarray
    pixels_I3HW: np.ndarray = msgspec.field(default_factory=no_pixels)
    places_P: np.ndarray = msgspec.field(default_factory=no_places)


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step trains on. lane_tokens, lane_sequences: sampled tokens and sequences of each lane in the
    whole step, over all ranks and microbatches: the denominators of the lanes' means.

    version: policy version before the step. exact: the weights before the step are that version's own (no optimizer
    step since it was published), so that tokens of this version measure engine against trainer.
    """

    microbatches: tuple[Microbatch, ...]
    lane_tokens: Mapping[Lane, int]
    num_sequences: int
    lane_sequences: Mapping[Lane, int] = {}
    version: int = 0
    exact: bool = True

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(one.target_N) for one in self.microbatches)

    @property
    def num_inputs(self) -> int:
        """Positions computed, padding included."""
        return sum(one.tokens_BT.size for one in self.microbatches)


class _Flat(NamedTuple):
    """All sequences end to end. S sequences, N sampled tokens in item order."""

    tokens: np.ndarray
    start_S: np.ndarray
    num_inputs_S: np.ndarray  # all but the last token, which only a bootstrapped value is read at
    bootstrap_S: np.ndarray  # bool: its end is valued
    num_sampled_S: np.ndarray
    at_N: np.ndarray  # index within its own sequence
    per_token: dict[str, np.ndarray]
    gallery: Gallery


class _Forest(NamedTuple):
    """Trees as flat node arrays; indexes are relative to their tree."""

    token: np.ndarray
    position: np.ndarray
    reach: np.ndarray
    tree: np.ndarray
    predecessor_N: np.ndarray
    bootstrap_N: np.ndarray
    tree_N: np.ndarray
    size: np.ndarray  # nodes of each tree
    lane: np.ndarray  # of each tree
    picture: np.ndarray  # number of the place in the gallery


def pack(
    items: Sequence[TrainItem], *, max_tokens: int, version: int = 0, exact: bool = True, bootstrap: bool = False
) -> PackedBatch:
    """Pack whole groups into rows and rows into microbatches of at most `max_tokens` positions, padding included.

    A group whose tree is larger is cut between sequences, a pair never; one sequence that is larger goes alone.
    bootstrap: the last part of a truncated episode has, in place of its reward, a place where what would follow is valued.
    ValueError names an experience that cannot be trained (no sampled token, or nothing before the first one).
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected 1 or more")
    if not items:
        return PackedBatch(microbatches=(), lane_tokens={}, num_sequences=0, version=version, exact=exact)
    flat = _flatten(items, bootstrap)
    forest = _grow(items, flat, max_tokens)
    rows = _fill_rows(forest, max_tokens)
    microbatches = tuple(_assemble(flat, forest, some) for some in _chunk(rows, forest, max_tokens))
    return PackedBatch(
        microbatches=microbatches,
        lane_tokens=count_lanes(microbatches),
        lane_sequences=count_sequences(microbatches),
        num_sequences=len(items),
        version=version,
        exact=exact,
    )


def _flatten(items: Sequence[TrainItem], bootstrap: bool) -> _Flat:
    for one in items:
        if not one.experience.spans or one.experience.num_prompt < 1:
            got = one.experience.spans[:1]
            raise ValueError(f"{one.experience.id}: spans: got {got}, expected sampled tokens after at least one token")
    sequences = [one.experience.tokens for one in items]
    stop_S = np.array([one.experience.spans[-1].stop for one in items])
    length_S = np.array([len(tokens) for tokens in sequences])
    start_S = np.cumsum(length_S) - length_S
    tokens = np.concatenate(sequences).astype(np.int64)
    spans = [(s, span) for s, one in enumerate(items) for span in one.experience.spans]
    num_L = np.array([span.stop - span.start for _, span in spans])
    sequence_N = np.repeat(np.array([s for s, _ in spans]), num_L)
    at_N = _ragged_arange(num_L) + np.repeat(np.array([span.start for _, span in spans]), num_L)
    behaviour_N = np.concatenate([one.experience.logprobs for one in items]).astype(np.float32)
    if len(behaviour_N) != len(at_N):
        raise ValueError(f"logprobs: got {len(behaviour_N)} in all, expected {len(at_N)} as the spans say")
    bootstrap_S = np.array([bootstrap and one.experience.end == "truncated" and one.experience.last for one in items])
    temperatures = np.array([span.temperature if span.temperature > 0 else 1.0 for _, span in spans], np.float32)
    per_token = {
        "target_N": tokens[start_S[sequence_N] + at_N],
        "behaviour_N": behaviour_N,
        "advantage_N": np.concatenate([_advantages(one) for one in items]),
        "weight_N": np.array([one.item.weight for one in items], np.float32)[sequence_N],
        "temperature_N": np.repeat(temperatures, num_L),
        "version_N": np.repeat(np.array([span.version for _, span in spans]), num_L),
        "ratio_N": np.repeat(np.array([span.ratio for _, span in spans]), num_L),
        "lane_N": np.array([LANES.index(one.item.lane) for one in items])[sequence_N],
        "sequence_N": sequence_N,
        "pair_N": _pairs(items)[sequence_N],
        "teacher_N": np.concatenate([_teacher(one.experience) for one in items]),
        "reward_N": _rewards(items, sequence_N, bootstrap_S),
    }
    num_sampled_S = np.bincount(sequence_N, minlength=len(items))
    gallery = hang([one.pictures for one in items], start_S, len(tokens))
    return _Flat(tokens, start_S, stop_S - 1 + bootstrap_S, bootstrap_S, num_sampled_S, at_N, per_token, gallery)


def _pairs(items: Sequence[TrainItem]) -> np.ndarray:
    """Pair and side of each sequence, [S]: pairs are numbered as their groups come."""
    numbers: dict[tuple[str, Lane], int] = {}
    found = np.full(len(items), -1)
    for s, one in enumerate(items):
        if side := pair_side(one.experience):
            number = numbers.setdefault((one.experience.group, one.item.lane), len(numbers))
            found[s] = 2 * number + (side != CHOSEN)
    return found


def _advantages(one: TrainItem) -> np.ndarray:
    """Of each sampled token: the item's, and by how much its turn's differs from the experience's."""
    found = np.full(one.experience.num_sampled, one.item.advantage, np.float32)
    if one.experience.advantages and one.experience.advantage is not None:
        stops = [stretch.stop for stretch in one.experience.advantages]
        values = np.array([stretch.advantage for stretch in one.experience.advantages])
        at = np.concatenate([np.arange(span.start, span.stop) for span in one.experience.spans])
        of_turn = values[np.minimum(np.searchsorted(stops, at, side="right"), len(stops) - 1)]
        found += (of_turn - one.experience.advantage).astype(np.float32)
    return found


def _teacher(experience: Experience) -> np.ndarray:
    found = teacher_logprobs(experience)
    return np.full(experience.num_sampled, np.nan, np.float32) if found is None else found


def _rewards(items: Sequence[TrainItem], sequence_N: np.ndarray, bootstrap_S: np.ndarray) -> np.ndarray:
    rewards_N = np.zeros(len(sequence_N), np.float32)
    last_S = np.flatnonzero(np.append(sequence_N[1:] != sequence_N[:-1], True))
    rewards = [one.experience.reward for one in items]
    rewards_N[last_S] = np.where(bootstrap_S, 0.0, [np.nan if reward is None else reward for reward in rewards])
    return rewards_N


def _grow(items: Sequence[TrainItem], flat: _Flat, max_tokens: int) -> _Forest:
    """Lay each group's tree of shared prefixes out depth first."""
    order, first_O, shared_O = _order(items, flat)
    num_nodes = int(flat.num_inputs_S.sum())  # an upper bound
    reach, source, depth, tree = (np.zeros(num_nodes, np.int64) for _ in range(4))
    predecessor_N, tree_N = np.zeros(len(flat.at_N), np.int64), np.zeros(len(flat.at_N), np.int64)
    bootstrap_N = np.full(len(flat.at_N), -1)
    path = np.zeros(int(flat.num_inputs_S.max()), np.int64)  # node at each depth of the sequence just laid out
    sampled_S = np.cumsum(flat.num_sampled_S) - flat.num_sampled_S
    node = base = open_depth = 0  # nodes so far, first node of this tree, depth of `path`
    lanes: list[int] = []
    bases: list[int] = []
    ranges = np.arange(num_nodes)
    for o, s in enumerate(order):
        num, shared = int(flat.num_inputs_S[s]), int(shared_O[o])
        is_pair = flat.per_token["pair_N"][sampled_S[s]] >= 0
        if first_O[o] or (node - base + num - shared > max_tokens and not is_pair):
            reach[path[:open_depth]] = node
            shared = 0
            base = node
            bases.append(base)
            lanes.append(LANES.index(items[s].item.lane))
        else:
            reach[path[shared:open_depth]] = node
        stop = node + num - shared
        path[shared:num] = ranges[node:stop]
        source[node:stop] = flat.start_S[s] + ranges[shared:num]
        depth[node:stop] = ranges[shared:num]
        tree[node:stop] = len(bases) - 1
        mine = slice(sampled_S[s], sampled_S[s] + flat.num_sampled_S[s])
        predecessor_N[mine] = path[flat.at_N[mine] - 1]
        tree_N[mine] = len(bases) - 1
        if flat.bootstrap_S[s]:
            bootstrap_N[mine.stop - 1] = path[num - 1]
        node, open_depth = stop, num
    reach[path[:open_depth]] = node
    base_F = np.array(bases)
    tree, of_tree = tree[:node], base_F[tree[:node]]
    size = np.diff(np.append(base_F, node))
    lane = np.array(lanes)
    bootstrap_N = np.where(bootstrap_N >= 0, bootstrap_N - base_F[tree_N], -1)
    return _Forest(
        flat.tokens[source[:node]], depth[:node], reach[:node] - of_tree, tree, predecessor_N - base_F[tree_N],
        bootstrap_N, tree_N, size, lane, flat.gallery.number[source[:node]],
    )  # fmt: skip


def _order(items: Sequence[TrainItem], flat: _Flat) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sequences by group, sorted within it; is each the first of its group; inputs it shares with the one before."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for s, one in enumerate(items):  # equal tokens are the same only where they show the same
        names = one.pictures.names if one.pictures is not None else ()
        groups.setdefault((one.experience.group, one.item.lane, names), []).append(s)
    big_endian = flat.tokens.astype(">u4")  # so that bytes sort as tokens do
    starts, nums = flat.start_S.tolist(), flat.num_inputs_S.tolist()
    order, first = [], []
    for members in groups.values():
        if len(members) > 1:
            members.sort(key=lambda s: (big_endian[starts[s] : starts[s] + nums[s]].tobytes(), s))
        order += members
        first += [True] + [False] * (len(members) - 1)
    order_O = np.array(order)
    previous_O = np.roll(order_O, 1)
    num_O = np.minimum(flat.num_inputs_S[order_O], flat.num_inputs_S[previous_O])
    within = _ragged_arange(num_O)
    same = (
        flat.tokens[np.repeat(flat.start_S[order_O], num_O) + within]
        == flat.tokens[np.repeat(flat.start_S[previous_O], num_O) + within]
    )
    ends = np.where(same, np.repeat(num_O, num_O), within)  # the first difference is the least of these
    shared_O = np.minimum.reduceat(ends, np.cumsum(num_O) - num_O)
    return order, np.array(first), shared_O


def _fill_rows(forest: _Forest, max_tokens: int) -> list[list[int]]:
    """Trees into rows of the width that costs least: wide rows cost attention, narrow ones padding."""
    fitting = forest.size[forest.size <= max_tokens]  # a tree that does not fit gets a row, and a microbatch, alone
    widest = int(fitting.max()) if len(fitting) else max_tokens
    widths = {widest} | {widest * i // 2 for i in (3, 4, 6) if widest * i // 2 <= min(SHARED_ROW_TOKENS, max_tokens)}
    choices = [_first_fit(forest, width) for width in sorted(widths)]

    def cost(rows: list[list[int]]) -> float:
        width = max(int(forest.size[row].sum()) for row in rows)
        return len(rows) * width * (1 + width / ATTENTION_TOKENS)

    return min(choices, key=cost)


def _first_fit(forest: _Forest, width: int) -> list[list[int]]:
    """Trees, largest first, into the first row with room; a row holds one lane."""
    rows: list[list[int]] = []
    room: list[int] = []
    sizes, lanes = forest.size.tolist(), forest.lane.tolist()
    for tree in np.argsort(-forest.size, kind="stable").tolist():
        for r, free in enumerate(room):
            if free >= sizes[tree] and lanes[rows[r][0]] == lanes[tree]:
                rows[r].append(tree)
                room[r] -= sizes[tree]
                break
        else:
            rows.append([tree])
            room.append(width - sizes[tree])
    return rows


def _chunk(rows: list[list[int]], forest: _Forest, max_tokens: int) -> Iterator[list[list[int]]]:
    """Rows of like width into microbatches."""
    used = {id(row): int(forest.size[row].sum()) for row in rows}
    rows = sorted(rows, key=lambda row: -used[id(row)])
    while rows:
        count = max(1, max_tokens // used[id(rows[0])])
        yield rows[:count]
        rows = rows[count:]


def _assemble(flat: _Flat, forest: _Forest, rows: list[list[int]]) -> Microbatch:
    trees = np.array([tree for row in rows for tree in row])
    row_of, offset_of = np.full(len(forest.size), -1), np.zeros(len(forest.size), np.int64)
    row_of[trees] = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    offset_of[trees] = np.concatenate([np.cumsum(forest.size[row]) - forest.size[row] for row in rows])
    num_T = max(int(forest.size[row].sum()) for row in rows)
    shape = (len(rows), num_T)
    nodes = np.flatnonzero(row_of[forest.tree] >= 0)
    tree = forest.tree[nodes]
    first = np.concatenate([[0], np.cumsum(forest.size)])[tree]
    index = row_of[tree] * num_T + offset_of[tree] + nodes - first
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    reach = np.tile(np.arange(1, num_T + 1), (len(rows), 1))  # padding is seen by itself only
    tokens.reshape(-1)[index] = forest.token[nodes]
    positions.reshape(-1)[index] = forest.position[nodes]
    reach.reshape(-1)[index] = forest.reach[nodes] + offset_of[tree]
    chosen = np.flatnonzero(row_of[forest.tree_N] >= 0)
    tree_N = forest.tree_N[chosen]
    begin_N = row_of[tree_N] * num_T + offset_of[tree_N]
    bootstrap_N = forest.bootstrap_N[chosen]
    return Microbatch(
        tokens_BT=tokens,
        positions_BT=positions,
        reach_BT=reach,
        predecessor_N=begin_N + forest.predecessor_N[chosen],
        bootstrap_N=np.where(bootstrap_N >= 0, begin_N + bootstrap_N, -1),
        **{name: values[chosen] for name, values in flat.per_token.items()},
        **of_nodes(flat.gallery, forest.picture[nodes], index),
    )


def count_lanes(microbatches: Sequence[Microbatch]) -> dict[Lane, int]:
    """Sampled tokens of each lane."""
    counts = sum((np.bincount(one.lane_N, minlength=len(LANES)) for one in microbatches), np.zeros(len(LANES), int))
    return {lane: int(count) for lane, count in zip(LANES, counts, strict=True) if count}


def count_sequences(microbatches: Sequence[Microbatch]) -> dict[Lane, int]:
    """Sequences of each lane."""
    counts: dict[Lane, int] = {}
    for one in microbatches:
        for index in np.unique(one.lane_N):
            num = len(np.unique(one.sequence_N[one.lane_N == index]))
            counts[LANES[index]] = counts.get(LANES[index], 0) + num
    return counts


def _ragged_arange(num: np.ndarray) -> np.ndarray:
    """0..num[0]-1, 0..num[1]-1, and so on, end to end."""
    offsets: np.ndarray = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
    return offsets
