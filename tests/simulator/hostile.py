"""Bytes from outside that would run code in whoever unpickles them: I7 says that nobody does."""

import pickle

STRUCK: list[str] = []  # what ran is known to the whole process, whoever read the bytes


def strike() -> None:
    """What the bytes want to run."""
    STRUCK.append("ran")


class Bomb:
    """Unpickled, it strikes."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return strike, ()


BOMB = pickle.dumps(Bomb())
JUNK = (b"HR\x01", b"HR\x01\x00\xff\xff\xff\xff", b"nothing", BOMB, b"HR\x01\x00" + BOMB)
