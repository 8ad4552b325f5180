"""Langfuse's scores over HTTP, version 3 of its public API as documented: Basic auth, filters, newest first, a cursor."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_endpoint import Reply, http_endpoint

PUBLIC, SECRET = "pk-lf-1", "sk-lf-2"
GROUPS = {
    "details": ("comment", "configId", "metadata"),
    "subject": ("subject",),
    "annotation": ("authorUserId", "queueId"),
}
CORE = ("id", "projectId", "name", "value", "dataType", "source", "timestamp", "environment", "createdAt", "updatedAt")


def ago(seconds: float) -> str:
    """A time before now, as Langfuse writes it."""
    moment = datetime.now(UTC) - timedelta(seconds=seconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class FakeLangfuse:
    """scores: by id. broken: what each of the next requests is answered with instead: a status, and a body. most: of a page."""

    def __init__(self) -> None:
        self.most = 100
        self.url = ""
        self.scores: dict[str, dict[str, Any]] = {}
        self.broken: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, str]] = []

    def score(self, id: str, value: object, *, seconds_ago: float = 10.0, **fields: Any) -> None:
        """Make or change a score."""
        now = ago(0)
        kind = "BOOLEAN" if isinstance(value, bool) else "CATEGORICAL" if isinstance(value, str) else "NUMERIC"
        self.scores[id] = {
            "id": id, "projectId": "p", "name": "user-feedback", "value": value, "dataType": kind, "source": "API",
            "timestamp": ago(seconds_ago), "environment": "default", "createdAt": now, "updatedAt": now, "comment": None,
            "configId": None, "metadata": {}, "subject": {"kind": "trace", "id": "0af7"}, "authorUserId": None,
            "queueId": None, **fields,
        }  # fmt: skip

    def answer(self, query: dict[str, str], authorization: str) -> tuple[int, bytes]:
        """What one request is answered with."""
        self.asked.append(query)
        if self.broken:
            return self.broken.pop(0)
        if authorization != "Basic " + base64.b64encode(f"{PUBLIC}:{SECRET}".encode()).decode():
            return 401, b'{"message": "Invalid credentials"}'
        groups, limit = query.get("fields", "").split(","), int(query.get("limit", "50"))
        if not 1 <= limit <= 100 or set(groups) - {*GROUPS, ""}:
            return 400, b'{"message": "Invalid request data"}'
        limit = min(limit, self.most)
        found = sorted(self.scores.values(), key=lambda one: (one["timestamp"], one["id"]), reverse=True)
        found = [one for one in found if one["name"] in query.get("name", one["name"]).split(",")]
        found = [
            one for one in found if query.get("fromTimestamp", "") <= one["timestamp"] < query.get("toTimestamp", "z")
        ]
        if "cursor" in query:
            last = tuple(json.loads(base64.urlsafe_b64decode(query["cursor"])))
            found = [one for one in found if (one["timestamp"], one["id"]) < last]
        page, meta = found[:limit], {"limit": limit}
        if len(found) > limit:
            key = json.dumps([page[-1]["timestamp"], page[-1]["id"]])
            meta["cursor"] = base64.urlsafe_b64encode(key.encode()).decode()  # type: ignore[assignment]
        shown = [*CORE, *(name for group in groups for name in GROUPS.get(group, ()))]
        return 200, json.dumps({"data": [{name: one[name] for name in shown} for one in page], "meta": meta}).encode()


@contextmanager
def fake_langfuse() -> Iterator[FakeLangfuse]:
    """One that listens until the block ends."""
    fake = FakeLangfuse()

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        known = parts.path == "/api/public/v3/scores"
        return fake.answer(query, headers.get("Authorization", "")) if known else (404, b"{}")

    with http_endpoint(answer) as fake.url:
        yield fake
