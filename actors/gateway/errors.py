"""The response to a request that cannot be served: the status and error object of the OpenAI API."""

from collections.abc import Mapping

import msgspec


class ApiError(Exception):
    """An answer that is an error. param: the field at fault. retry_after_s: when to come back, 0 for not saying."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        """A short constant phrase, for metrics."""
        return self.code or self.kind

    @property
    def headers(self) -> Mapping[str, str]:
        return {"retry-after": str(max(1, round(self.retry_after_s + 0.5)))} if self.retry_after_s else {}

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A mistake in the request."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str) -> ApiError:
    """Too many requests at once, of all clients together."""
    return ApiError(429, message, kind="requests", code="overloaded", retry_after_s=1.0)


def unavailable(message: str, retry_after_s: float = 2.0) -> ApiError:
    """A valid request that cannot be served now."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after_s=retry_after_s)


def server_error() -> ApiError:
    """A failure of the server's own, of which a client is told nothing."""
    return ApiError(500, "the server had an error while answering", kind="server_error")


def no_room(max_tokens: int, num_tokens: int) -> ApiError:
    message = f"This model's maximum context length is {max_tokens} tokens; the request has {num_tokens}, "
    return bad(message + "which leaves none for an answer", "messages", "context_length_exceeded")
