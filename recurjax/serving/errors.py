"""Errors of requests, in the JSON that OpenAI's clients expect."""

from typing import Any


class RequestError(Exception):
    """Ends a request with an HTTP status and one sentence."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.code = code

    def body(self) -> dict[str, Any]:
        """Returns the response's JSON."""
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, "invalid_request_error"),
                "param": self.field,
                "code": self.code,
            }
        }


_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
