"""Bodies of the gateway's own replies; answers and errors are spelled by the API that was asked."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class FeedbackReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of feedback. id: of what was said, "" where nothing was recorded and none was given. answer_id: the
    answer it is about. recorded: whether the log or the disk has it. note: what else there is to know. object: what
    this is, as in every reply of this API.
    """

    object: Literal["feedback"] = "feedback"
    id: str
    answer_id: str
    recorded: bool
    note: str | UnsetType = UNSET


class FeedbackTokenReply(msgspec.Struct, frozen=True, kw_only=True):
    """A token for a browser. object: what this is. token: to be sent instead of a key. answer_id: the only answer
    it is for. expires_at: seconds of the epoch.
    """

    object: Literal["feedback.token"] = "feedback.token"
    token: str
    answer_id: str
    expires_at: int


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a prompt has. input_tokens: as the template writes it."""

    input_tokens: int


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A served policy. version: of its weights now. id: what a request calls it. object: what this is. created: 0, it
    is always there. owned_by: the same for all.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "headrace"
    version: int


class ServedModels(msgspec.Struct, frozen=True, kw_only=True):
    """The served policies. object: what this is. data: one for each."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is. status: "ok", or why it cannot serve. version: of the policy that it serves. channel: which
    that follows.
    """

    status: str
    version: int
    channel: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with the fields that its API names. id: what feedback names."""

    id: str
