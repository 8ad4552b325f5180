"""`forget`: destroys a user's keys, and reports the steps and versions that have learned from the user's data.

    keys destroyed ─> Directive(forget) in the log ─> keys of their sessions destroyed ─> report from the index

Feedback texts, and turns that named no user, are sealed under keys of their sessions. The log names the user's sessions, so
`forget` destroys these keys once it has read the log.

Guarantees: from the first step on no reader that looks the key up opens the user's data (see `infra.store.seal`): verify,
collect and the trainer drop the data that they still hold, with the reason "forgotten" and a counter; repeating `forget` is
harmless, and completes it if it was cut short. The weights stay unchanged: the report names the versions that have learned.
"""

import asyncio

import msgspec

from infra.ledger.index import LogIndex
from infra.log.log import Log
from infra.store.seal import Keys
from schemas import Directive, topics
from schemas.errors import StoreError
from schemas.ids import forgotten_mark, keyed_subject

WAIT_S = 600.0  # for another process that writes the index


class ForgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of forgetting a user. keys: destroyed now or earlier. groups: sealed under them, derived ones included.

    about: the user, as a keyed hash. steps: journaled on it and not taken back; replay cannot compute these again.
    first_version: the first published policy that learned from it; every one up to newest_version descends from it.
    replay_from: where a checkpoint can be replayed from. texts: sessions with unreadable feedback and unnamed turns.
    """

    about: str
    keys: tuple[str, ...]
    groups: int = 0
    steps: tuple[int, ...] = ()
    first_version: int | None = None
    newest_version: int = -1
    replay_from: int | None = None
    texts: int = 0


def destroy(keys: Keys, tenant: str, user: str) -> tuple[str, ...]:
    """Ids of all keys the user ever had, none of which opens anything any more. Blocks; raises StoreError."""
    return keys.destroy(keyed_subject(keys.app_secret(), tenant, user)) if user else ()


async def complete(
    log: Log, index: LogIndex, keys: Keys, about: str, key_ids: tuple[str, ...], wait_s: float = WAIT_S
) -> ForgetReport:
    """Bring the index up to date, destroy the keys of the user's sessions, and report. Raises StoreError; then repeat it."""
    if not await index.refresh(log, wait_s=wait_s):
        raise StoreError(
            f"{index.path} is behind the log, and another process keeps it (`headrace trace --keep-up` or `console`):"
            " repeat this command once that process has read the log, or end that process and repeat it"
        )
    of_sessions = [await asyncio.to_thread(keys.destroy, session) for session in index.sessions_under(key_ids)]
    all_ids = (*key_ids, *(key_id for some in of_sessions for key_id in some))
    steps = tuple(trained.step for trained in index.steps_under(all_ids) if not trained.undone)
    return ForgetReport(
        about=about,
        keys=key_ids,
        groups=index.num_groups_under(all_ids),
        steps=steps,
        first_version=index.first_version_after(steps[0]) if steps else None,
        newest_version=index.newest_version(),
        replay_from=steps[-1] if steps else None,
        texts=sum(map(bool, of_sessions)),
    )


async def tell(log: Log, tenant: str, user: str, *, secret: bytes, owner: str) -> str:
    """Append the event; returns whom it is about: a hash that can be compared only with the gateways' secret."""
    about = forgotten_mark(secret, keyed_subject(secret, tenant, user))
    await log.publish(topics.POLICIES, Directive(order="forget", owner=owner, about=about))
    return about
