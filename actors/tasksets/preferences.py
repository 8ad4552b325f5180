"""Preference pairs as experiences: two answers to one prompt, in one group of the human lane, one chosen, one rejected."""

import hashlib
from collections.abc import Iterable, Iterator

from actors.tasksets.files import Broken, OnBroken
from actors.tasksets.taskset import Preference
from infra.model.model import Tokenizer
from schemas import Block, Message, Span, make_experience
from schemas.experience import CHOSEN, REJECTED
from schemas.ids import experience_id, group_id

ORIGIN = "load"


def pair_block(row: Preference, tokenizer: Tokenizer) -> Block:
    """Both sides, ended by the end token, as not sampled."""
    prompt = tokenizer.encode_chat(row.messages)
    group = pair_group(row)
    return Block(
        tuple(
            make_experience(
                tokens=(tokens := [*prompt, *tokenizer.encode(text), tokenizer.eos_ids[0]]),
                logprobs=[0.0] * (len(tokens) - len(prompt)),
                messages=(*row.messages, Message(role="assistant", content=text)),
                id=experience_id(group, attempt=0, episode=episode),
                group=group,
                episode=episode,
                group_size=2,
                lane="human",
                origin=ORIGIN,
                subject=row.subject,
                spans=(Span(start=len(prompt), stop=len(tokens), version=-1, ratio=False),),
                kind=side,
                task=row.id,
                meta=row.meta,
            )
            for episode, (side, text) in enumerate(((CHOSEN, row.chosen), (REJECTED, row.rejected)))
        )
    )


def pair_group(row: Preference) -> str:
    """Group of a pair; two pairs of one prompt have each their own."""
    sides = hashlib.blake2b(f"{row.chosen}\x00{row.rejected}".encode(), digest_size=6).hexdigest()
    return group_id(f"pair-{row.id}-{sides}", 0)


def different(rows: Iterable[Preference], on_broken: OnBroken) -> Iterator[Preference]:
    """The rows whose sides differ; the others are handed to `on_broken`, named by their id."""
    for row in rows:
        if row.chosen == row.rejected:
            on_broken(Broken(f"pair {row.id}", "got equal sides, expected one that is preferred to the other"))
        else:
            yield row
