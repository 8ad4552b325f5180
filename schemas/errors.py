"""Errors of bytes and records, and whether trying again can help.

    HeadraceError
    ├── BadFrame            bytes that are not a valid record: dead-letter them, never retry
    │   └── Sealed          sections whose key is not to be had, destroyed or never here: drop them, never retry
    ├── UnknownMajor        a record from a newer headrace: stop the reader before the ack, upgrade it first
    ├── ConfigError         a setting that cannot hold: fix the file
    ├── RecordTooLarge      a frame no topic takes: refused before it is sent
    ├── BrokerUnavailable   the log cannot be reached: retriable
    │   └── BrokerDenies    the broker does not let this user do it: retriable, once the right is granted
    ├── OffsetOutOfRange    a position that retention has trimmed: never skipped silently
    ├── NotInLog            the kept log holds nothing under that name
    ├── StoreError          the object store failed: retriable
    │   └── NotInStore      the key is not there
    ├── PolicyRefused       a policy that is incomplete, altered, unhealthy or not reproduced: keep serving the old one
    ├── BadImage            an image that is missing, altered, too large or no image: only a record that shows it fails
    ├── FencedOut           a newer lease exists: this process must end
    └── SandboxUnavailable  code cannot be confined here: refuse to run it

Callers' mistakes raise ValueError; a broken assumption of ours is an assert.
"""


class HeadraceError(Exception):
    """Anything headrace raises on purpose; `retriable` says whether the same call may succeed later."""

    retriable = False


class BadFrame(HeadraceError):
    """Bytes that do not decode to a valid record; the one error of the decoder."""


class Sealed(BadFrame):
    """Sealed sections that cannot be opened here; the header is as good as ever."""


class UnknownMajor(HeadraceError):
    """A frame of a newer major format. Stop before the ack and upgrade readers first."""


class ConfigError(HeadraceError):
    """A setting is wrong. The message has its path, the value and the expected values."""


class RecordTooLarge(HeadraceError):
    """A frame over the topic's size limit, refused before the send."""


class BrokerUnavailable(HeadraceError):
    """The log could not be reached within its deadline."""

    retriable = True


class BrokerDenies(BrokerUnavailable):
    """The broker does not let this user do it. It may pass: an administrator can grant the right."""


class OffsetOutOfRange(HeadraceError):
    """A position below the oldest kept record (or past the end) of its partition."""


class NotInLog(HeadraceError):
    """The kept log holds nothing under that name."""


class StoreError(HeadraceError):
    """The object store failed or timed out."""

    retriable = True


class NotInStore(StoreError):
    """The store has no object with this key."""

    retriable = False


class PolicyRefused(HeadraceError):
    """A version must not be served: incomplete, altered, not finite, or not reproduced by the engine."""


class BadImage(HeadraceError):
    """An image that cannot be shown. reason: a short constant phrase, used as a label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"image: {reason}: {detail}")
        self.reason = reason


class FencedOut(HeadraceError):
    """Another trainer holds a newer lease on this run."""


class SandboxUnavailable(HeadraceError):
    """Untrusted code cannot be confined on this machine, so it is not run."""


def causes(error: BaseException) -> list[BaseException]:
    """The errors of a group and of groups within it, in order, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes(inner)]
    return [error]
