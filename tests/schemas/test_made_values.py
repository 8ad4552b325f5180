"""Values of an experience, from lists and arrays of any kind: what is kept of them, and what is refused."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import Block, Experience, Span, decode, encode, make_experience
from schemas.bulk.bulk import MANY, LogprobValues, TokenValues, logprob_array

SIZES = st.sampled_from([0, 1, MANY - 1, MANY, MANY + 1, 3 * MANY])
LOGPROB = st.floats(max_value=0.0, min_value=-1e30, width=64)


def made(tokens: TokenValues, logprobs: LogprobValues, *, prompt: int = 1, episode: int = 0) -> Experience:
    return make_experience(
        id=f"t-1.0-{episode}-0",
        group="t-1.0",
        episode=episode,
        group_size=8,
        spans=(Span(prompt, prompt + len(logprobs), 0),),
        tokens=tokens,
        logprobs=logprobs,
        messages=(),
    )


def members_of(block: Block) -> tuple[Experience, ...]:
    """Those of the block that its bytes say."""
    back = decode(bytes(encode(block)))
    assert isinstance(back, Block)
    return back.experiences


@given(SIZES, st.lists(LOGPROB, min_size=1, max_size=8))
def test_logprobs_of_a_list_are_those_of_an_array_however_many(size: int, some: list[float]) -> None:
    values = (some * size)[:size]
    assert logprob_array(values).tobytes() == np.asarray(values, np.float64).astype(np.float32).tobytes()


@pytest.mark.parametrize("size", [3, MANY, 2 * MANY])
@pytest.mark.parametrize("odd", [-1, -0.0, np.float64(-0.5), np.float32(-0.5), -(2**70), False])
def test_numbers_of_other_kinds_are_taken_among_floats(size: int, odd: float) -> None:
    values = [-0.25] * size
    values[size // 2] = odd
    found = logprob_array(values)
    assert len(found) == size and found[size // 2] == np.float32(odd) and (found == -0.25).sum() == size - 1


@pytest.mark.parametrize("size", [3, MANY, 2 * MANY])
@pytest.mark.parametrize(
    "odd", [float("nan"), float("-inf"), -1e300, 0.5, "x", "12345678", None, b"12345678", 1j, "\ud800"]
)
def test_what_is_no_logprob_is_refused_among_floats(size: int, odd: object) -> None:
    values = [-0.25] * size
    values[-1] = odd  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="logprobs: "):
        made(list(range(size + 1)), values)


@pytest.mark.parametrize("odd", [-1, 2**32, 0.5, "1", None])
def test_what_is_no_token_id_is_refused(odd: object) -> None:
    with pytest.raises(ValueError, match="tokens: "):
        made([1, odd, 3], [-0.5])  # type: ignore[list-item]


def test_arrays_of_an_experience_are_copies_and_read_only() -> None:
    tokens: npt.NDArray[np.uint32] = np.arange(8, dtype=np.uint32)[::-2]  # not in one piece
    logprobs: npt.NDArray[np.float32] = np.full(3, -0.5, np.float32)
    one, two = made(tokens, logprobs), made([1] * (MANY + 1), [-0.5] * MANY, episode=1)
    tokens[0], logprobs[0] = 9, -9.0
    assert [*one.tokens] == [7, 5, 3, 1] and [*one.logprobs] == [-0.5] * 3
    members = members_of(Block((one, two)))
    assert [*members[0].tokens] == [7, 5, 3, 1] and members[1] == two
    for member in (one, two, *members):
        assert not member.tokens.flags.writeable and not member.logprobs.flags.writeable


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_each_prompt_is_stored_once_in_whatever_order_members_come(order: list[int]) -> None:
    prompts = [[7, 8, 9], [7, 8, 10], [1]]
    members = tuple(
        made([*prompts[which], 100 + at], [-0.5], prompt=len(prompts[which]), episode=at)
        for at, which in enumerate(order)
    )
    found = members_of(Block(members))
    assert found == members
    sections = found[0].held().sections
    assert sections is not None
    assert sections.columns[0].items == len(order) + sum(len(prompts[which]) for which in set(order))
