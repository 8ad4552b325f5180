"""What may become a step of a chain."""

from typing import Any

import pytest

from infra.chain.chain import make_step
from infra.chain.processor import Memory, feedback, processor
from schemas import Experience
from schemas.errors import ConfigError


def test_what_fits_no_kind_of_step_is_a_config_error() -> None:
    @feedback(version=1)
    def event(ticket: dict[str, Any]) -> None: ...

    @processor(version=1)
    def other(ticket: Experience) -> Experience:
        return ticket

    @processor(version=1)
    def undeclared(experience: Experience, *, memory: Memory) -> Experience:
        return experience

    @processor(version=1, memory=3)
    async def late(experience: Experience, *, memory: Memory) -> Experience:
        return experience

    for function, message in [
        (event, "got a @feedback function"),
        (other, 'first parameter is "ticket"'),
        (undeclared, "go together"),
        (late, "async processor with memory"),
        (len, "not marked"),
    ]:
        with pytest.raises(ConfigError, match=f"step: .*{message}"):
            make_step("step", function)


def test_a_processor_takes_what_its_decorator_says_whatever_its_parameter_is_called() -> None:
    @processor(version=1, of="group", inline=True)
    def of_members(members: tuple[Experience, ...]) -> tuple[Experience, ...]:
        return members

    @processor(version=1, of="experience", inline=True)
    def of_one(group: Experience) -> Experience:
        return group

    assert (make_step("a", of_members).kind, make_step("b", of_one).kind) == ("group", "experience")
