"""S3, MinIO and other servers that speak S3, as object store.

Atomic and durable by S3's own promises: an object is visible once its put (or multipart completion) is acknowledged. Parts of
an upload whose process was killed are removed a day later, by the next process that uploads in parts.
Settings come from the environment, so that no file of a run holds a secret:

    keys, or a role: see `infra.store.s3_keys`
    HEADRACE_S3_ENDPOINT or AWS_ENDPOINT_URL                        http(s)://host[:port]; without it: Amazon S3
    AWS_REGION or AWS_DEFAULT_REGION                                without it: asked for, or us-east-1 at an endpoint
    AWS_CA_BUNDLE or SSL_CERT_FILE                                  certificates to trust

Secrets appear in no error and no repr.
"""

import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from infra.store.digests import finished, hasher
from infra.store.pieces import Pieces, total_bytes
from infra.store.s3_bodies import READ_TIMEOUT_S, PiecesReader, body_of, join, place
from infra.store.s3_keys import S3Credentials, S3Keys, fixed_keys, keys_of
from infra.store.store import check_key, check_prefix
from infra.store.whole import Hashed
from schemas.errors import ConfigError, NotInStore, StoreError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
NUM_RETRIES = 3
RANGE_BYTES = 8 * 1024 * 1024  # of a download, so that an object of weights takes all connections
PART_BYTES = 8 * 1024 * 1024  # of an upload
MAX_PARTS = 10_000  # of an object, says S3
CONNECTIONS = 16  # at once, for the parts of one object
UNFINISHED_S = 24 * 3600.0  # after which an upload has no process any more

# The same call can never succeed until a setting is changed.
_FINAL_CODES = frozenset({
    "AccessDenied", "AuthorizationHeaderMalformed", "InvalidAccessKeyId", "InvalidBucketName", "NoSuchBucket",
    "SignatureDoesNotMatch",
})  # fmt: skip

T = TypeVar("T")
Taken = TypeVar("Taken", bytes, memoryview)
Take = Callable[[int, Iterator[bytes]], Taken]
"""What becomes of the bytes of a range that begins there, as they come."""


def open_s3(bucket: str, prefix: str, environment: Mapping[str, str] = os.environ) -> "S3Store":
    """The store of a bucket (below `prefix`) with settings from the environment, keys by `infra.store.s3_keys`. Raises
    ConfigError.
    """
    endpoint = environment.get("HEADRACE_S3_ENDPOINT") or environment.get("AWS_ENDPOINT_URL") or ""
    try:
        keys = keys_of(environment, is_amazon=not endpoint)
    except ConfigError as error:
        raise ConfigError(f"store s3://{bucket}: {error}") from None
    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=endpoint or "https://s3.amazonaws.com",
        credentials=keys,
        region=environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or ("us-east-1" if endpoint else None),
        ca_file=environment.get("AWS_CA_BUNDLE") or environment.get("SSL_CERT_FILE") or None,
    )


@contextmanager
def closing_response(response: Any) -> Iterator[Any]:
    """The response. It is closed and its connection given back in every case."""
    try:
        yield response
    finally:
        response.close()
        response.release_conn()


class S3Store:
    """Objects of one bucket below one prefix. The bucket must exist."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str,
        credentials: S3Credentials | S3Keys,
        prefix: str = "",
        region: str | None = None,
        ca_file: str | None = None,
        num_retries: int = NUM_RETRIES,
    ) -> None:
        import certifi
        import minio

        from infra.store.connections import connections

        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
            raise ConfigError("S3 endpoint: expected http(s)://host[:port], set in HEADRACE_S3_ENDPOINT")
        self._bucket = bucket
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._endpoint = f"{parts.scheme}://{parts.netloc}"
        self._num_retries = num_retries
        self._tidied = False
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._keys = fixed_keys(credentials) if isinstance(credentials, S3Credentials) else credentials
        pool = connections(
            most=CONNECTIONS,
            connect_s=CONNECT_TIMEOUT_S,
            answer_s=READ_TIMEOUT_S,
            num_retries=num_retries,
            ca_file=ca_file or certifi.where(),
        )
        try:
            self._client: Any = minio.Minio(
                parts.netloc,
                credentials=self._keys,
                secure=parts.scheme == "https",
                region=region,
                http_client=pool,
            )
        except ValueError as error:
            raise ConfigError(f"S3 endpoint {self._endpoint}: {self._clean(error)}") from None

    def __repr__(self) -> str:
        return f"S3Store(s3://{self._bucket}/{self._prefix} at {self._endpoint})"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing any other; a large one in parts over several connections. Raises StoreError.

        A part that fails is sent again, not the whole.
        """
        self.put_pieces(key, (data,))

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        """See PiecewiseStore."""
        name, num_bytes = self._name(key), total_bytes(pieces)
        part_bytes = max(PART_BYTES, -(-num_bytes // MAX_PARTS))

        if num_bytes > part_bytes and not self._tidied:
            self._tidied = True
            self.remove_unfinished()

        def upload() -> None:
            self._client.put_object(
                self._bucket,
                name,
                PiecesReader(pieces),
                num_bytes,
                part_size=part_bytes,
                num_parallel_uploads=CONNECTIONS,
            )

        self._call("put", key, upload)

    def get(self, key: str) -> bytes:
        """The whole object, a large one by ranges over several connections. Raises NotInStore, StoreError.

        A range that fails is read again, not the whole.
        """
        name = self._name(key)
        return self._call("get", key, lambda: b"".join(self._ranges(name, lambda num_bytes: join)))

    def get_hashed(self, key: str, algorithm: str) -> Hashed:
        """See HashingStore. Ranges go where they belong as they come, and are hashed in order meanwhile."""
        name = self._name(key)
        return self._call("get", key, lambda: self._read_hashed(name, algorithm))

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of the object from `start` on, fewer where it ends before. Raises NotInStore, StoreError."""
        name = self._name(key)
        return self._call("read", key, lambda: self._read_part(name, start, length))

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotInStore, StoreError."""
        name = self._name(key)
        return int(self._call("size", key, lambda: self._client.stat_object(self._bucket, name).size))

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted. Raises StoreError."""
        name = self._prefix + check_prefix(prefix)

        def names() -> list[str]:
            return [item.object_name for item in self._client.list_objects(self._bucket, prefix=name, recursive=True)]

        yield from sorted(name.removeprefix(self._prefix) for name in self._call("keys", prefix, names))

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine. Raises StoreError."""
        name = self._name(key)
        self._call("delete", key, lambda: self._client.remove_object(self._bucket, name))

    def remove_unfinished(self, older_than_s: float = UNFINISHED_S) -> int:
        """Remove parts of uploads that were never completed; of how many. None where that is not allowed, or not known there:
        MinIO does it by itself.
        """
        begun_before = datetime.now(UTC) - timedelta(seconds=older_than_s)

        def remove() -> int:
            uploads = self._client._list_multipart_uploads(self._bucket, prefix=self._prefix).uploads
            old = [one for one in uploads if one.initiated_time < begun_before]
            for one in old:
                self._client._abort_multipart_upload(self._bucket, one.object_name, one.upload_id)
            return len(old)

        try:
            return self._call("remove unfinished uploads", self._prefix, remove)
        except StoreError as error:
            log.warning("unfinished_uploads_kept error=%s", error)
            return 0

    def make_bucket(self) -> None:
        """Create the bucket; one that is there is fine. Raises StoreError."""

        def make() -> None:
            if not self._client.bucket_exists(self._bucket):
                self._client.make_bucket(self._bucket)

        self._call("make bucket", self._bucket, make)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read_part(self, name: str, start: int, length: int) -> bytes:
        return self._range(name, start, join, length=length) if length else b""

    def _read_hashed(self, name: str, algorithm: str) -> Hashed:
        made, rooms, num_bytes = hasher(algorithm), list[memoryview](), 0

        def begin(size: int) -> Take[memoryview]:
            rooms.append(memoryview(np.empty(size, np.uint8).data))
            return functools.partial(place, rooms[0])

        for part in self._ranges(name, begin):
            made.update(part)
            num_bytes += len(part)
        return rooms[0][:num_bytes].toreadonly(), finished(algorithm, made)

    def _ranges(self, name: str, begin: Callable[[int], Take[Taken]]) -> Iterator[Taken]:
        """What becomes of the ranges of an object, in order. The first says how large the object is before its bytes come; the
        others, of the same object, come beside. begin: called once, with the most bytes that may come.
        """
        found: list[_Whole] = []
        takes: list[Take[Taken]] = []
        rest: list[Future[Taken]] = []
        pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ranges")

        def ask_for_the_rest(whole: _Whole) -> None:
            if not found:  # not again where the first range is read again
                found.append(whole)
                takes.append(begin(whole.num_bytes if whole.num_bytes >= 0 else RANGE_BYTES))
                starts = range(RANGE_BYTES, whole.num_bytes, RANGE_BYTES)
                rest.extend(pool.submit(self._range, name, start, takes[0], whole.tag) for start in starts)
            elif found != [whole]:
                raise ValueError("the object was replaced while it was read")

        num_bytes = 0
        try:
            first = self._range(name, 0, lambda start, pieces: takes[0](start, pieces), begun=ask_for_the_rest)
            for part in itertools.chain([first], (one.result() for one in rest)):
                num_bytes += len(part)
                yield part
        finally:
            pool.shutdown(cancel_futures=True)
        if found[0].num_bytes not in (-1, num_bytes):
            raise ValueError(f"got {num_bytes} bytes, expected {found[0].num_bytes}")

    def _range(
        self,
        name: str,
        start: int,
        take: Take[Taken],
        tag: str = "",
        begun: Callable[["_Whole"], None] = lambda whole: None,
        length: int = RANGE_BYTES,
    ) -> Taken:
        """What becomes of some bytes of an object, which are read again where the connection breaks. tag: of the object they
        must be of. begun: called with the size and the tag of the object before its bytes are read.
        """
        from minio.error import S3Error
        from urllib3.exceptions import ProtocolError, ReadTimeoutError

        headers = {"If-Match": tag} if tag else None
        for tries_left in range(self._num_retries, -1, -1):
            try:
                with (
                    self._slots,
                    closing_response(self._client.get_object(self._bucket, name, start, length, headers)) as answer,
                ):
                    begun(_whole_of(answer.headers))
                    return take(start, body_of(answer, length))
            except S3Error as error:
                if error.code == "InvalidRange":  # it begins at or after the end
                    begun(_Whole(0, ""))
                    return take(start, iter(()))
                raise
            except (ProtocolError, ReadTimeoutError, TimeoutError):
                if not tries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _call(self, verb: str, key: str, action: Callable[[], T]) -> T:
        """Run one request. The errors it raises carry no cause: a library's own could quote a header."""
        from minio.error import MinioException, S3Error
        from urllib3.exceptions import HTTPError

        try:
            return action()
        except S3Error as error:
            failure = self._failure(verb, key, error.code or "", self._clean(error.message or error.code))
        except (MinioException, HTTPError, OSError, ValueError) as error:
            failure = StoreError(f"{verb} {key!r} in {self!r}: {type(error).__name__}: {self._clean(error)}")
        raise failure

    def _failure(self, verb: str, key: str, code: str, message: str) -> StoreError:
        if code in ("NoSuchKey", "NoSuchObject", "ResourceNotFound"):
            return NotInStore(f"{verb} {key!r}: not in {self!r}")
        if code == "RequestTimeTooSkewed":
            message += ": this machine's clock is off"
        failure = StoreError(f"{verb} {key!r} in {self!r}: {code}: {message}")
        failure.retriable = code not in _FINAL_CODES
        return failure

    def _clean(self, error: object) -> str:
        text = str(error)
        for secret in self._keys.secrets:
            text = text.replace(secret, "[secret]")
        return text


class _Whole(msgspec.Struct, frozen=True):
    """What the answer to a range says of its object. num_bytes: -1 where it does not say."""

    num_bytes: int
    tag: str


def _whole_of(headers: Mapping[str, str]) -> _Whole:
    said = headers.get("Content-Range", "").rpartition("/")[2]
    return _Whole(int(said) if said.isdigit() else -1, headers.get("ETag", ""))
