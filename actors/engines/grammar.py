"""Grammars: which tokens may come next, so that a text becomes JSON of a schema. A matcher walks along with each answer.

Guarantee: a schema that the vocabulary cannot spell, or that does not compile in time (`actors.engines.judge`), is refused
before a token is sampled.

llguidance compiles the same schemas faster. It is not used: it spells some numbers of a schema one digit off (an example of
`test_what_is_drawn_under_a_rewritten_schema_is_an_instance_of_the_one_that_was_sent`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from actors.engines.engine import Sampling
from actors.engines.judge import DEADLINE_S, SchemaCompiler
from actors.engines.once_per_schema import OncePerSchema
from actors.engines.token_spellings import TokenSpellings, make_compiler

STUCK = "the grammar of the schema led to where no token may come next"


class Matcher:
    """One answer's way through its grammar. stuck: it left the grammar, so the answer is worth nothing."""

    def __init__(self, compiled: Any, num_tokens: int, stop: Sequence[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop))
        self._stop = list(stop)
        self._num_tokens = num_tokens
        self._bits = np.zeros((1, -(-num_tokens // 32)), np.int32)
        self.stuck = False

    def allowed(self) -> np.ndarray:
        """Whether each token may come next, [V] bool. Where none may, all are and the answer is stuck."""
        self._bits[:] = -1
        self._matcher.fill_next_token_bitmask(self._bits)
        allowed = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")[: self._num_tokens].astype(bool)
        if not self._matcher.is_completed():
            allowed[self._stop] = False  # one that also spells something ends nothing yet
        if not allowed.any():
            self.stuck, allowed[:] = True, True
        return allowed

    def take(self, token: int) -> None:
        """Go on by one token; one that was not allowed (rounding can draw what has no probability) leaves it stuck."""
        self.stuck = self.stuck or not self._matcher.accept_token(token)


class Grammars:
    """Compiled schemas over one vocabulary, which is read when the first is needed. deadline_s: for one to compile."""

    def __init__(self, vocabulary: Callable[[], TokenSpellings], deadline_s: float = DEADLINE_S) -> None:
        self._read = vocabulary
        self._deadline_s = deadline_s
        self._compiler: Callable[[str], Any] | None = None
        self._judge: SchemaCompiler | None = None
        self._vocabulary = TokenSpellings(())
        self._compiled = OncePerSchema(self._compile, lambda compiled: int(compiled.memory_size_bytes))

    def close(self) -> None:
        """Compile no more."""
        self._compiled.close()
        if self._judge is not None:
            self._judge.close()

    async def compiled(self, json_schema: str) -> Any:
        """The grammar of a schema. Raises SchemaRefused."""
        return await self._compiled.of(json_schema)

    async def matcher(self, sampling: Sampling) -> Matcher | None:
        """What holds an answer to its schema; None where it has none."""
        if not sampling.json_schema:
            return None
        compiled = await self.compiled(sampling.json_schema)
        return Matcher(compiled, len(self._vocabulary.spellings), sampling.stop)

    def _compile(self, json_schema: str) -> Any:
        if self._compiler is None or self._judge is None:
            self._vocabulary = self._read()
            self._compiler = make_compiler(self._vocabulary)
            self._judge = SchemaCompiler(self._vocabulary.spellings, self._deadline_s)
        self._judge.check(json_schema)
        self._vocabulary.check(json_schema)
        return self._compiler(json_schema)
