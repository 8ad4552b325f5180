"""What plugins import: `from headrace import Drop, Experience, Feedback, processor, …`. Re-exports only."""

from infra.chain.processor import Drop, Memory, Verdict, feedback, processor, score
from schemas import Experience, Feedback, Message, Score, Span, Task

__all__ = [
    "Drop",
    "Experience",
    "Feedback",
    "Memory",
    "Message",
    "Score",
    "Span",
    "Task",
    "Verdict",
    "feedback",
    "processor",
    "score",
]
