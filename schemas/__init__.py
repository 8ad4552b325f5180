"""Records of the log, and their bytes: what every other part of headrace speaks."""

from schemas.errors import BadFrame, UnknownMajor
from schemas.experience import Experience, make_experience
from schemas.fields import End, Kind, Lane, Meta
from schemas.journal import Batch, BatchItem, Fence, Rollback, Saved, Skip
from schemas.parts import Edit, Join, Score, Span, Stretch
from schemas.records import (
    MAJOR,
    Closure,
    Control,
    DeadLetter,
    Directive,
    Drawn,
    DropMarker,
    EvalResult,
    Feedback,
    Image,
    Issued,
    Message,
    PolicyEvent,
    Rating,
    Received,
    Task,
    Tick,
)
from schemas.reports import Answered, Client, FeedbackWait, MasterState, Progress
from schemas.wire.block import Block
from schemas.wire.frame import decode, encode, kafka_headers, kind_of

__all__ = [
    "MAJOR",
    "Answered",
    "BadFrame",
    "Batch",
    "BatchItem",
    "Block",
    "Client",
    "Closure",
    "Control",
    "DeadLetter",
    "Directive",
    "Drawn",
    "DropMarker",
    "Edit",
    "End",
    "EvalResult",
    "Experience",
    "Feedback",
    "FeedbackWait",
    "Fence",
    "Image",
    "Issued",
    "Join",
    "Kind",
    "Lane",
    "MasterState",
    "Message",
    "Meta",
    "PolicyEvent",
    "Progress",
    "Rating",
    "Received",
    "Rollback",
    "Saved",
    "Score",
    "Skip",
    "Span",
    "Stretch",
    "Task",
    "Tick",
    "UnknownMajor",
    "decode",
    "encode",
    "kafka_headers",
    "kind_of",
    "make_experience",
]
