"""S3, MinIO and other servers that speak S3, as object store.

Atomic and durable by S3's own promises: an object is visible once its put (or multipart completion) is acknowledged. Parts of
an upload whose process was killed are removed a day later, by the next process that uploads in parts.
Settings come from the environment, so that no file of a run holds a secret:

    HEADRACE_S3_ENDPOINT or AWS_ENDPOINT_URL                        http(s)://host[:port]; without it: Amazon S3
    AWS_REGION or AWS_DEFAULT_REGION                                without it: asked for, or us-east-1 at an endpoint
    AWS_CA_BUNDLE or SSL_CERT_FILE                                  certificates to trust

Credentials are the first of these that is there; a role's keys are asked for again as they end:

    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN)    keys
    AWS_SHARED_CREDENTIALS_FILE (AWS_PROFILE)                          keys in a file, read again when it changes
    AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN                       a role for a token, as a Kubernetes service account has
    AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or ..._FULL_URI             a role of the container
    AWS_EC2_METADATA_SERVICE_ENDPOINT, or nothing at Amazon itself      a role of the machine

The client asks for a role by `minio.credentials.IamAwsProvider`; AWS_ENDPOINT_URL_STS and AWS_EC2_METADATA_SERVICE_ENDPOINT
name other servers to ask. Guarantee: no error and no repr shows a key or a token.
"""

import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from infra.store.store import Store, check_key, check_prefix
from schemas.errors import ConfigError, NotInStore, StoreError

if TYPE_CHECKING:
    from minio.credentials import Credentials


ANSWER_S = 5.0  # for a server that gives roles
REMEMBERED = 4  # keys of a role that an error may still quote
METADATA = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
# Each names a role that the platform gives.
PLATFORM = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", METADATA,
)  # fmt: skip

_STATUS = re.compile(r"HTTP status code (\d+)")


class S3Keys:
    """Provider that the client asks for its keys before each request. Thread-safe.

    retrieve_now: the keys as they are now; may block. what: source of the keys, for errors.
    """

    def __init__(self, retrieve_now: "Callable[[], Credentials]", what: str) -> None:
        self._retrieve_now = retrieve_now
        self._what = what
        self._lock = threading.Lock()
        self.secrets: tuple[str, ...] = ()  # which must not be shown, the newest last

    def __repr__(self) -> str:
        return f"S3Keys({self._what})"

    def retrieve(self) -> "Credentials":
        """The keys. Raises ValueError in one line that shows none of them."""
        from configparser import Error as FileError

        from urllib3.exceptions import HTTPError

        with self._lock:
            try:
                keys = self._retrieve_now()
            except (ValueError, KeyError, SyntaxError, OSError, HTTPError, FileError) as error:
                status = _STATUS.search(str(error))
                said = f"refused with HTTP status {status[1]}" if status else type(error).__name__
                fault = f"no keys from {self._what}: {said}"
            else:
                given = (secret for secret in (keys.secret_key, keys.session_token) if secret)
                self.secrets = tuple(dict.fromkeys([*self.secrets, *given]))[-2 * REMEMBERED :]
                return keys
        raise ValueError(fault)


def fixed_keys(access_key: str, secret_key: str, session_token: str | None = None) -> S3Keys:
    """Keys that stay. session_token: of temporary credentials."""
    from minio.credentials import Credentials

    keys = Credentials(access_key, secret_key, session_token)
    found = S3Keys(lambda: keys, "the environment")
    found.retrieve()
    return found


def keys_of(environment: Mapping[str, str], *, is_amazon: bool) -> S3Keys:
    """The keys that the environment names. is_amazon: no other server is named. Raises ConfigError where there are none."""
    import certifi
    import urllib3
    from minio.credentials import AWSConfigProvider, IamAwsProvider

    access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if access_key and secret_key:
        return fixed_keys(access_key, secret_key, environment.get("AWS_SESSION_TOKEN") or None)
    if access_key or secret_key:
        raise ConfigError("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both")
    if file := environment.get("AWS_SHARED_CREDENTIALS_FILE"):
        profile = environment.get("AWS_PROFILE") or "default"
        what = f"AWS_SHARED_CREDENTIALS_FILE {file}, profile {profile}"
        return S3Keys(AWSConfigProvider(file, profile).retrieve, what)
    named = next((name for name in PLATFORM if environment.get(name)), "")
    if not named and not is_amazon:
        raise ConfigError(
            "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or name a role there"
        )
    server = {"AWS_WEB_IDENTITY_TOKEN_FILE": "AWS_ENDPOINT_URL_STS", METADATA: METADATA}.get(named, "")
    role = IamAwsProvider(
        custom_endpoint=environment.get(server) or None,
        token_file=environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"),
        role_arn=environment.get("AWS_ROLE_ARN"),
        role_session_name="headrace",
        # The store's caller tries again; a retry here would be logged with the URL, which holds the token.
        http_client=urllib3.PoolManager(timeout=urllib3.Timeout(ANSWER_S), retries=False, ca_certs=certifi.where()),
    )
    return S3Keys(role.retrieve, f"a role ({named or 'of the machine; AWS_ACCESS_KEY_ID is not set'})")


log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 20.0  # also for all of the first body that a new connection sends: 400 kB/s for a part
READ_TIMEOUT_S = 60.0
NUM_RETRIES = 3
PART_BYTES = 8 * 1024 * 1024  # of an upload
MAX_PARTS = 10_000  # of an object, says S3
CONNECTIONS = 16  # at once, of an upload and of all threads
UNFINISHED_S = 24 * 3600.0  # after which an upload has no process any more

# The same call can never succeed until a setting is changed.
_FINAL_CODES = frozenset({
    "AccessDenied", "AuthorizationHeaderMalformed", "InvalidAccessKeyId", "InvalidBucketName", "NoSuchBucket",
    "SignatureDoesNotMatch",
})  # fmt: skip

T = TypeVar("T")


def open_s3(bucket: str, prefix: str, environment: Mapping[str, str] = os.environ) -> "S3Store":
    """The store of a bucket (below `prefix`) with settings and keys from the environment. Raises ConfigError."""
    endpoint = environment.get("HEADRACE_S3_ENDPOINT") or environment.get("AWS_ENDPOINT_URL") or ""
    try:
        keys = keys_of(environment, is_amazon=not endpoint)
    except ConfigError as error:
        raise ConfigError(f"store s3://{bucket}: {error}") from None
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=endpoint or "https://s3.amazonaws.com",
        credentials=keys,
        region=region or ("us-east-1" if endpoint else None),
        ca_file=environment.get("AWS_CA_BUNDLE") or environment.get("SSL_CERT_FILE") or None,
    )


class S3Store(Store):
    """Objects of one bucket below one prefix. The bucket must exist."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str,
        credentials: S3Keys,
        prefix: str = "",
        region: str | None = None,
        ca_file: str | None = None,
        num_retries: int = NUM_RETRIES,
    ) -> None:
        import certifi
        import minio
        import urllib3

        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or "@" in parts.netloc:
            raise ConfigError("S3 endpoint: expected http(s)://host[:port], set in HEADRACE_S3_ENDPOINT")
        self._bucket = bucket
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._endpoint = f"{parts.scheme}://{parts.netloc}"
        self._num_retries = num_retries
        self._tidied = False
        self._keys = credentials
        pool = urllib3.PoolManager(
            maxsize=CONNECTIONS,
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            retries=urllib3.Retry(total=num_retries, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
            cert_reqs="CERT_REQUIRED",
            ca_certs=ca_file or certifi.where(),
        )
        try:
            is_secure = parts.scheme == "https"
            self._client: Any = minio.Minio(
                parts.netloc, credentials=self._keys, secure=is_secure, region=region, http_client=pool
            )
        except ValueError as error:
            raise ConfigError(f"S3 endpoint {self._endpoint}: {self._clean(error)}") from None

    def __repr__(self) -> str:
        return f"S3Store(s3://{self._bucket}/{self._prefix} at {self._endpoint})"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Upload a large object in parts over several connections; a part that fails is sent again alone."""
        name, num_bytes = self._name(key), len(data)
        part_bytes = max(PART_BYTES, -(-num_bytes // MAX_PARTS))

        if num_bytes > part_bytes and not self._tidied:
            self._tidied = True
            self._remove_unfinished()

        def upload() -> None:
            body = io.BytesIO(data)
            self._client.put_object(
                self._bucket, name, body, num_bytes, part_size=part_bytes, num_parallel_uploads=CONNECTIONS
            )

        self._call("put", key, upload)

    def get(self, key: str) -> bytes:
        name = self._name(key)
        return self._call("get", key, lambda: self._read(name))

    def read(self, key: str, start: int, length: int) -> bytes:
        name = self._name(key)
        return self._call("read", key, lambda: self._read(name, start, length)) if length else b""

    def size(self, key: str) -> int:
        name = self._name(key)
        return int(self._call("size", key, lambda: self._client.stat_object(self._bucket, name).size))

    def keys(self, prefix: str) -> Iterator[str]:
        name = self._prefix + check_prefix(prefix)

        def names() -> list[str]:
            return [item.object_name for item in self._client.list_objects(self._bucket, prefix=name, recursive=True)]

        found = (name for name in self._call("keys", prefix, names) if not name.endswith("/"))  # a console's folder
        yield from sorted(name.removeprefix(self._prefix) for name in found)

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._call("delete", key, lambda: self._client.remove_object(self._bucket, name))

    def _remove_unfinished(self) -> None:
        """Remove parts of uploads that were never completed, where the bucket's policy allows it. MinIO does so by itself."""
        begun_before = datetime.now(UTC) - timedelta(seconds=UNFINISHED_S)

        def remove() -> None:
            for upload in self._client._list_multipart_uploads(self._bucket, prefix=self._prefix).uploads:
                if upload.initiated_time < begun_before:
                    self._client._abort_multipart_upload(self._bucket, upload.object_name, upload.upload_id)

        try:
            self._call("remove unfinished uploads", self._prefix, remove)
        except StoreError as error:
            log.warning("unfinished_uploads_kept error=%s", error)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, name: str, start: int = 0, length: int = 0) -> bytes:
        """Bytes of an object from `start` on, 0 for all; asked for again where the connection breaks."""
        from minio.error import S3Error
        from urllib3.exceptions import ProtocolError, ReadTimeoutError

        for tries_left in range(self._num_retries, -1, -1):
            try:
                with closing(self._client.get_object(self._bucket, name, start, length)) as answer:
                    data: bytes = answer.read()
                    return data
            except S3Error as error:
                if error.code == "InvalidRange":  # it begins at or after the end
                    return b""
                raise
            except (ProtocolError, ReadTimeoutError):
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
