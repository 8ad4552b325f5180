"""What a browser is handed to say something about one answer: signed, short-lived, good for nothing else. Pure.

<payload>.<HMAC-SHA256 of the payload>, both base64url
"""

import base64
import binascii
import hashlib
import hmac

import msgspec

from actors.gateway.errors import ApiError

MAX_LIFE_S = 30 * 24 * 3600


class FeedbackToken(msgspec.Struct, frozen=True, array_like=True):
    """The right to rate one answer. answer: its id. key: id of the key that asked for the token, which ends with it. expires_s:
    seconds of the epoch.

    Example: FeedbackToken("hr-mddrffqvmjcncqrrjhvnrntq.7-3.0-0-0", "abcdefghijklmnop", 1763715600.0)
    """

    answer: str
    key: str
    expires_s: float


def sign(claims: FeedbackToken, secret: bytes) -> str:
    """The token."""
    payload = msgspec.json.encode(claims)
    return f"{_text(payload)}.{_text(_mac(payload, secret))}"


def read(token: str, secret: bytes, now_s: float) -> FeedbackToken:
    """Verify a token. Raises ApiError if it is forged, damaged or expired."""
    payload, _, signature = token.partition(".")
    try:
        body, mac = _bytes(payload), _bytes(signature)
    except (binascii.Error, ValueError) as error:
        raise _refused("invalid_token", "the feedback token is not one of ours") from error
    if not hmac.compare_digest(mac, _mac(body, secret)):
        raise _refused("invalid_token", "the feedback token is not one of ours")
    claims = msgspec.json.decode(body, type=FeedbackToken)
    if now_s >= claims.expires_s:
        raise _refused("expired_token", "the feedback token has expired")
    return claims


def _refused(code: str, message: str) -> ApiError:
    return ApiError(401, message, code=code)


def _mac(payload: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, b"feedback\x00" + payload, hashlib.sha256).digest()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
