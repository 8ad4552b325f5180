"""Grammars: which tokens may come next, so that a text becomes JSON of a schema. A matcher walks along with each answer.

Guarantees: a schema is compiled once, by a thread of its own and one at a time; how many are kept is bounded; a schema
that the vocabulary cannot spell, or that does not compile in time (`actors.engines.judge`), is refused before a token is
sampled.
"""

import asyncio
import re
import string
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from actors.engines.engine import Sampling, SchemaRefused
from actors.engines.judge import DEADLINE_S, SchemaCompiler
from infra.model.model import load_tokenizer

MAX_COMPILED = 64
MAX_COMPILED_BYTES = 256 * 1024 * 1024
# JSON between the values is spelled in one way, as json.dumps does: free whitespace is where a weak policy gets lost.
ONE_SPELLING = {"any_whitespace": False}
# A grammar looks at one token at a time: without one of these it can be led to where nothing may come next.
NEEDED = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")


class TokenSpellings:
    """What each token spells; nothing (b"") for special tokens and for ids without a token. special: those tokens."""

    def __init__(self, spellings: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.spellings = tuple(b"" if token in special else spelled for token, spelled in enumerate(spellings))
        self.special = special
        self._spelled = frozenset(self.spellings)

    def check(self, json_schema: str) -> None:
        """Raise SchemaRefused for what is no schema, or cannot be spelled."""
        import xgrammar

        missing = sorted(one for one in NEEDED.union(json_schema) if not _is_spelled(one, self._spelled))
        if missing:
            told = ", ".join(repr(one) for one in missing[:5])
            raise SchemaRefused(f"this model's vocabulary cannot spell it: {told} missing ({len(missing)} characters)")
        try:
            xgrammar.Grammar.from_json_schema(json_schema, **ONE_SPELLING)
        except RuntimeError as error:  # all that the library raises
            told = re.sub(r"^\[[^]]*\] \S+ ", "", str(error))  # a time and a line of its source
            raise SchemaRefused(f"not a schema that answers can be held to: {told[:300]}") from error


def byte_vocabulary(num_tokens: int) -> TokenSpellings:
    """The first 256 tokens are the bytes; further ones stand for no text."""
    return TokenSpellings([bytes([token]) if token < 256 else b"" for token in range(num_tokens)])


def folder_vocabulary(folder: str, num_tokens: int) -> TokenSpellings:
    """The vocabulary of a model folder. num_tokens: of the model, which may have more than its tokenizer."""
    import xgrammar

    tokenizer = load_tokenizer(folder)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.wrapped, vocab_size=num_tokens)
    return TokenSpellings(info.decoded_vocab, frozenset(token for token in tokenizer.special_ids if token < num_tokens))


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
        self._compiled: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")

    def close(self) -> None:
        """Compile no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._judge is not None:
            self._judge.close()

    async def compiled(self, json_schema: str) -> Any:
        """The grammar of a schema. Raises SchemaRefused."""
        found = self._compiled.get(json_schema)
        if found is None:
            found = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, json_schema)
            self._compiled[json_schema] = found
            found.add_done_callback(self._trim)
        self._compiled.move_to_end(json_schema)
        return await asyncio.shield(found)  # others may wait for it

    async def matcher(self, sampling: Sampling) -> Matcher | None:
        """What holds an answer to its schema; None where it has none."""
        if not sampling.json_schema:
            return None
        compiled = await self.compiled(sampling.json_schema)
        return Matcher(compiled, len(self._vocabulary.spellings), sampling.stop)

    def _trim(self, ended: asyncio.Future[Any]) -> None:
        """Let go of what was asked for longest ago; the newest stays."""
        sizes = [_num_bytes(one) for one in self._compiled.values()]
        while len(sizes) > 1 and (len(sizes) > MAX_COMPILED or sum(sizes) > MAX_COMPILED_BYTES):
            del sizes[0]
            self._compiled.popitem(last=False)

    def _compile(self, json_schema: str) -> Any:
        if self._compiler is None or self._judge is None:
            self._vocabulary = self._read()
            self._compiler = make_compiler(self._vocabulary)
            self._judge = SchemaCompiler(self._vocabulary.spellings, self._deadline_s)
        self._vocabulary.check(json_schema)
        self._judge.check(json_schema)
        return self._compiler(json_schema)


def make_compiler(vocabulary: TokenSpellings) -> Callable[[str], Any]:
    """What makes a schema's grammar. It raises RuntimeError for what is no schema."""
    import xgrammar

    spellings = list(vocabulary.spellings)
    info = xgrammar.TokenizerInfo(spellings, vocab_size=len(spellings), stop_token_ids=[])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda json_schema: compiler.compile_json_schema(json_schema, **ONE_SPELLING)


def _num_bytes(compiled: asyncio.Future[Any]) -> int:
    failed = not compiled.done() or compiled.cancelled() or compiled.exception() is not None
    return 0 if failed else int(compiled.result().memory_size_bytes)


def _is_spelled(character: str, spelled: frozenset[bytes]) -> bool:
    encoded = character.encode()
    return encoded in spelled or all(bytes([one]) in spelled for one in encoded)
