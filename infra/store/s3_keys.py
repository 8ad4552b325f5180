"""Credentials for a bucket: those in the environment or in a file, or a role's, which the platform changes by itself.

The first of these that is there:

    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN)    keys
    AWS_SHARED_CREDENTIALS_FILE (AWS_PROFILE)                          keys in a file, read again when it changes
    AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN                       a role for a token, as a Kubernetes service account has
    AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or ..._FULL_URI             a role of the container
    none of them, at Amazon itself                                     a role of the machine

AWS_ENDPOINT_URL_STS and AWS_EC2_METADATA_SERVICE_ENDPOINT name other servers to ask for a role. Guarantee: no error shows a
key or a token.
"""

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from minio.credentials import Credentials, Provider
    from urllib3 import PoolManager

ANSWER_S = 5.0  # for a server that gives roles
REMEMBERED = 4  # keys of a role that an error may still quote

_STATUS = re.compile(r"HTTP status code (\d+)")


class S3Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that stay. access_key: the public half. secret_key: the other one. session_token: of temporary credentials."""

    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return "S3Credentials([secret])"


class S3Keys:
    """Provider that the client asks for its keys before each request. Thread-safe.

    retrieve_now: the keys as they are now; may block. what: where they come from, for errors.
    """

    def __init__(self, retrieve_now: "Callable[[], Credentials]", what: str) -> None:
        self._retrieve_now = retrieve_now
        self._what = what
        self._lock = threading.Lock()
        self._given: list[str] = []

    def __repr__(self) -> str:
        return f"S3Keys({self._what})"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Secrets that must not be shown, the newest last."""
        return tuple(self._given)

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
                new = [
                    secret for secret in (keys.secret_key, keys.session_token) if secret and secret not in self._given
                ]
                self._given = [*self._given, *new][-2 * REMEMBERED :]
                return keys
        raise ValueError(fault)


def fixed_keys(given: S3Credentials) -> S3Keys:
    """Keys that stay."""
    from minio.credentials import Credentials

    keys = Credentials(given.access_key, given.secret_key, given.session_token)
    found = S3Keys(lambda: keys, "the environment")
    found.retrieve()
    return found


def keys_of(environment: Mapping[str, str], *, is_amazon: bool) -> S3Keys:
    """The keys that the environment names. is_amazon: no other server is named. Raises ConfigError where there are none."""
    access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if access_key and secret_key:
        token = environment.get("AWS_SESSION_TOKEN") or None
        return fixed_keys(S3Credentials(access_key=access_key, secret_key=secret_key, session_token=token))
    if access_key or secret_key:
        raise ConfigError("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; keys are both")
    if file := environment.get("AWS_SHARED_CREDENTIALS_FILE"):
        return _keys_in_file(Path(file), environment.get("AWS_PROFILE") or "default")
    if token_file := environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return _keys_for_token(Path(token_file), environment)
    container = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    if named := next((name for name in container if environment.get(name)), None):
        return _keys_of_platform(None, f"the container's role ({named})")
    metadata = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if (is_amazon or metadata) and environment.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        return _keys_of_platform(
            metadata, "the machine's role; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set"
        )
    raise ConfigError(
        "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or name a role there"
    )


def _keys_in_file(path: Path, profile: str) -> S3Keys:
    from minio.credentials import AWSConfigProvider

    provider = AWSConfigProvider(str(path), profile)
    held: list[tuple[int, Credentials]] = []

    def read() -> "Credentials":
        changed_ns = path.stat().st_mtime_ns
        if not held or held[0][0] != changed_ns:
            held[:] = [(changed_ns, provider.retrieve())]
        return held[0][1]

    return S3Keys(read, f"AWS_SHARED_CREDENTIALS_FILE {path}, profile {profile}")


def _keys_for_token(path: Path, environment: Mapping[str, str]) -> S3Keys:
    from minio.credentials import WebIdentityProvider

    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    at_amazon = f"https://sts.{region}.amazonaws.com" if region else "https://sts.amazonaws.com"
    server = environment.get("AWS_ENDPOINT_URL_STS") or at_amazon
    role = environment.get("AWS_ROLE_ARN")
    provider = WebIdentityProvider(
        jwt_provider_func=lambda: {"access_token": path.read_text("utf-8").strip(), "expires_in": "0"},
        sts_endpoint=server,
        role_arn=role,
        role_session_name=environment.get("AWS_ROLE_SESSION_NAME") or "headrace",
        http_client=_asking(),
    )
    return S3Keys(provider.retrieve, f"{server} for AWS_ROLE_ARN {role} with the token in {path}")


def _keys_of_platform(endpoint: str | None, what: str) -> S3Keys:
    from minio.credentials import IamAwsProvider

    provider: Provider = IamAwsProvider(custom_endpoint=endpoint, http_client=_asking())
    return S3Keys(provider.retrieve, what)


def _asking() -> "PoolManager":
    import certifi
    import urllib3

    # The store's caller tries again; a retry here would be logged with the URL, which holds the token.
    return urllib3.PoolManager(timeout=urllib3.Timeout(ANSWER_S), retries=False, ca_certs=certifi.where())
