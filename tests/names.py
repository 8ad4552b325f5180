"""Names of sessions and users, as a gateway writes them whose app has the secret SECRET."""

from infra.store import seal
from infra.store.memory import MemoryStore
from schemas.ids import keyed_session, keyed_subject

SECRET = b"secret of the tests"


def session_name(tenant: str, session: str) -> str:
    return keyed_session(SECRET, tenant, session, "yes")


def subject_name(tenant: str, user: str) -> str:
    return keyed_subject(SECRET, tenant, user)


def secret_store() -> MemoryStore:
    """A store in memory with the app's secret."""
    store = MemoryStore()
    store.put(seal.SECRET, SECRET)
    return store
