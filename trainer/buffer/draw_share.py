"""How much of a batch one tenant or one user may make up. Pure, like `trainer.buffer.draw`.

Guarantee: where others have something to draw too, no tenant or user makes up more of a batch than the share allows, up to
one whole group; what is above it waits. Where a batch of `least` experiences does not come about at these shares, it is
filled up to `least` with what would have waited, so that a deployment with one large customer keeps learning.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from trainer.buffer.pool import Pool, enough


class ShareLimits(msgspec.Struct, frozen=True):
    """Shares of a batch in experiences, 1 for no limit.

    tenant: of one tenant at most. subject: of one user of a tenant at most. least: experiences to which a batch is filled up
    even past the shares, see the module.

    Data without a tenant or user ("") is never above its share; it counts as one of the others.

    Example: ShareLimits(tenant=0.5, subject=0.25, least=64)
    """

    tenant: float = 1.0
    subject: float = 1.0
    least: int = 1


NO_LIMITS = ShareLimits()
ANY = np.iinfo(np.int64).max
AHEAD = 4  # times as many are looked at first where some may be passed over


class Filled(msgspec.Struct, frozen=True):
    """What fits into a batch.

    taken: places in the order that was filled from. held_back: experiences that were passed over for a share.
    """

    taken: tuple[int, ...]
    held_back: int = 0


class Room(msgspec.Struct, frozen=True):
    """What a batch from a pool may hold.

    wanted: experiences asked for. size: those there is room for. allowed_C: experiences of each party, by code; None where no
    share can be reached. least: experiences that it is filled up to.
    """

    wanted: int
    size: int
    allowed_C: np.ndarray | None
    least: int = 0


def fill(order: Pool, room: Room) -> Filled:
    """Whole groups in order until the room is full, or all there are, within the shares."""
    size_N = order.column("num_experiences")
    if room.allowed_C is None:
        return Filled(tuple(range(first(size_N, room.size))))
    sums: dict[int, int] = {}
    taken: list[int] = []
    passed: list[int] = []
    total = 0
    rows = zip(*(order.column(name).tolist() for name in ("num_experiences", "tenant", "user")), strict=True)
    for place, (size, *parties) in enumerate(rows):
        if total >= room.size:
            break
        # A first group of a party is always let in.
        if any(party in sums and sums[party] + size > room.allowed_C[party] for party in parties):
            passed.append(place)
            continue
        for party in parties:
            sums[party] = sums.get(party, 0) + size
        taken.append(place)
        total += size
    if total < room.least:
        more = first(size_N[passed], room.least - total)
        taken = sorted([*taken, *passed[:more]])
        passed = passed[more:]
    return Filled(tuple(taken), int(size_N[passed].sum()) if passed else 0)


def filled_from(pool: Pool, ordered: Callable[[int], np.ndarray], room: Room) -> tuple[np.ndarray, Filled]:
    """Places of the pool in order, as far as a batch reaches, and which of these are taken.

    ordered: returns at least a number of places, in order.
    """
    num = enough(pool, room.wanted)
    place_F = ordered(num if room.allowed_C is None else AHEAD * num)
    filled = fill(pool.chosen(place_F), room)
    taken_F = place_F[list(filled.taken)]
    if len(place_F) == len(pool) or int(pool.column("num_experiences")[taken_F].sum()) >= room.size:
        return place_F, filled
    place_F = ordered(len(pool))
    return place_F, fill(pool.chosen(place_F), room)


def is_open(pool: Pool, limits: ShareLimits) -> bool:
    """Whether no share can be reached: nothing is limited, or all is of the same."""
    return not (
        (limits.tenant < 1.0 and _differ(pool.column("tenant")))
        or (limits.subject < 1.0 and _differ(pool.column("user")))
    )


def room_of(pool: Pool, wanted: int, limits: ShareLimits = NO_LIMITS) -> Room:
    """The largest batch of at most `wanted` experiences within the shares.

    A share below an even split among those present is that even split. What has no name may have any number.
    """
    if is_open(pool, limits):
        return Room(wanted, wanted, None)
    have = _have(pool)
    tenant = max(limits.tenant, 1 / len(have.tenant_T))
    subject = max(limits.subject, 1 / len(have.user_U))
    size = min(wanted, int(have.count_U.sum()))
    least = min(size, limits.least)
    while size > (possible := _possible(have, _of(size, tenant), _of(size, subject))):
        size = possible
    size = max(size, least)
    allowed_C = np.full(len(pool.codes), ANY)
    if tenant < 1.0:
        allowed_C[have.tenant_T[have.is_named_T]] = _of(size, tenant)
    if subject < 1.0:
        allowed_C[have.user_U[have.is_named_U]] = _of(size, subject)
    return Room(wanted, size, allowed_C, least)


def first(size_N: np.ndarray, num_experiences: int) -> int:
    """How many whole groups in order are worth at least `num_experiences`, or all there are."""
    return min(len(size_N), int(np.searchsorted(np.cumsum(size_N), num_experiences)) + 1)


def _differ(code_N: np.ndarray) -> bool:
    return bool((code_N != code_N[:1]).any())


class _Have(msgspec.Struct, frozen=True):
    """Who has something to draw. tenant_T, user_U: codes. owner_U: code of a user's tenant. count_U: experiences."""

    tenant_T: np.ndarray
    is_named_T: np.ndarray
    user_U: np.ndarray
    is_named_U: np.ndarray
    owner_U: np.ndarray
    count_U: np.ndarray


def _have(order: Pool) -> _Have:
    """Counts by code: linear in what waits, without a sort."""
    tenant_N, user_N = order.column("tenant"), order.column("user")
    num_codes = len(order.codes)
    count_C = np.bincount(user_N, weights=order.column("num_experiences")).astype(np.int64)
    is_named_C, owner_C = np.zeros(num_codes, bool), np.zeros(num_codes, np.int64)
    is_named_C[tenant_N] = order.column("has_tenant")
    is_named_C[user_N] = order.column("has_subject")
    owner_C[user_N] = tenant_N
    tenant_T = np.flatnonzero(np.bincount(tenant_N))
    user_U = np.flatnonzero(np.bincount(user_N))
    return _Have(tenant_T, is_named_C[tenant_T], user_U, is_named_C[user_U], owner_C[user_U], count_C[user_U])


def _of(size: int, share: float) -> int:
    return max(1, int(size * share + 1e-9))


def _possible(have: _Have, of_tenant: int, of_subject: int) -> int:
    """Experiences that can be drawn where a tenant and a user have so many each."""
    count_U = np.where(have.is_named_U, np.minimum(have.count_U, of_subject), have.count_U)
    sum_T = np.bincount(have.owner_U, weights=count_U)[have.tenant_T].astype(np.int64)
    return int(np.where(have.is_named_T, np.minimum(sum_T, of_tenant), sum_T).sum())
