"""Grammars: which tokens may come next, so that a text becomes JSON of a schema. A matcher walks along with each answer.

    schema ──short─────────────────────────────────────────> compiled here, once, in a thread of its own
       └────long──> process, the same vocabulary ──in time──┘
                       └── not in time: ended, and the schema is refused

A thread that compiles cannot be ended, a process can. It takes some 500 MB and seconds to start, so it is started when the
first long schema comes.

Guarantees: a schema that the vocabulary cannot spell, or that does not compile in time, is refused before a token is sampled;
a refusal is kept like a grammar, so a schema that takes too long costs that time once; kept grammars and refusals are bounded.

llguidance compiles the same schemas faster. It is not used: it spells some numbers of a schema one digit off (an example of
`test_what_is_drawn_under_a_rewritten_schema_is_an_instance_of_the_one_that_was_sent`).
"""

import asyncio
import os
import re
import resource
import select
import string
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np

from actors.engines.engine import Sampling, SchemaNotTried, SchemaRefused
from infra.model.model import load_tokenizer
from infra.newest import Newest

STUCK = "the grammar of the schema led to where no token may come next"
# JSON between the values is spelled in one way, as json.dumps does: free whitespace is where a weak policy gets lost.
ONE_SPELLING = {"any_whitespace": False}
# A grammar looks at one token at a time: without one of these it can be led to where nothing may come next.
NEEDED = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")
MAX_KEPT = 64
MAX_KEPT_BYTES = 256 * 1024 * 1024
SHORT_CHARS = 512  # a shorter schema without SLOW takes a second or two of a processor, over 150,000 tokens too
SLOW = re.compile(r'"(?:pattern|patternProperties|format|m(?:in|ax)(?:Length|Items|Properties))"')
MAX_MORE_BYTES = 2 * 1024**3  # of memory, that a schema may take
DEADLINE_S = 10.0
START_S = 120.0
_SIZE = struct.Struct("<I")
_DONE = b"."


class TokenSpellings:
    """Bytes of each token, b"" for special tokens and for ids without a token. special: ids of special tokens."""

    def __init__(self, spellings: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.spellings = tuple(b"" if token in special else spelled for token, spelled in enumerate(spellings))
        self.special = special
        self._spelled = frozenset(self.spellings)

    def check(self, json_schema: str) -> None:
        """Raise SchemaRefused for text that is not a schema, or that the vocabulary cannot spell."""
        import xgrammar

        missing = sorted(character for character in NEEDED.union(json_schema) if not self._spells(character))
        if missing:
            shown = ", ".join(map(repr, missing[:5]))
            raise SchemaRefused(f"this model's vocabulary cannot spell it: {shown} missing ({len(missing)} characters)")
        try:
            xgrammar.Grammar.from_json_schema(json_schema, **ONE_SPELLING)
        except RuntimeError as error:  # all that the library raises
            reason = re.sub(r"^\[[^]]*\] \S+ ", "", str(error))  # a time and a line of its source
            raise SchemaRefused(f"not a schema that answers can be held to: {reason[:300]}") from error

    def _spells(self, character: str) -> bool:
        encoded = character.encode()
        return encoded in self._spelled or all(bytes([byte]) in self._spelled for byte in encoded)


def byte_vocabulary(num_tokens: int) -> TokenSpellings:
    """The first 256 tokens are the bytes; further ones have no text."""
    return TokenSpellings([bytes([token]) if token < 256 else b"" for token in range(num_tokens)])


def folder_vocabulary(folder: str, num_tokens: int) -> TokenSpellings:
    """The vocabulary of a model folder. num_tokens: of the model, which may have more than its tokenizer."""
    import xgrammar

    tokenizer = load_tokenizer(folder)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.wrapped, vocab_size=num_tokens)
    return TokenSpellings(info.decoded_vocab, frozenset(token for token in tokenizer.special_ids if token < num_tokens))


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
        """Mask of the tokens that may come next, [V] bool. Where none may, all are True and the answer is stuck."""
        self._bits[:] = -1
        self._matcher.fill_next_token_bitmask(self._bits)
        allowed = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")[: self._num_tokens].astype(bool)
        if not self._matcher.is_completed():
            allowed[self._stop] = False  # no stop token, even with a text, may come yet
        if not allowed.any():
            self.stuck, allowed[:] = True, True
        return allowed

    def take(self, token: int) -> None:
        """Advance by one token; a forbidden token (rounding can draw a token of probability 0) leaves the matcher stuck."""
        self.stuck = self.stuck or not self._matcher.accept_token(token)


class Grammars:
    """Compiled schemas over one vocabulary; the first schema reads it.

    deadline_s: for one schema to compile. keeps: True to compile in this process too, False to check only that they compile.
    """

    def __init__(
        self, vocabulary: Callable[[], TokenSpellings], deadline_s: float = DEADLINE_S, *, keeps: bool = True
    ) -> None:
        self._read = vocabulary
        self._deadline_s = deadline_s
        self._keeps = keeps
        self._compile_schema: Callable[[str], Any] | None = None
        self._process: CompilerProcess | None = None
        self._compiling: dict[str, asyncio.Future[Any]] = {}
        self._compiled: Newest[str, Any] = Newest(MAX_KEPT, max_size=MAX_KEPT_BYTES, size=_num_bytes)
        self._thread = ThreadPoolExecutor(1, "schemas")
        self.vocabulary = TokenSpellings(())

    def close(self) -> None:
        """Compile no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    async def compiled(self, json_schema: str) -> Any:
        """The grammar of a schema. Raises SchemaRefused."""
        found = self._compiled.get(json_schema)
        if found is None:
            running = self._compiling.get(json_schema)
            if running is None:
                running = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, json_schema)
                self._compiling[json_schema] = running
                running.add_done_callback(lambda ended: self._ended(json_schema, ended))
            found = await asyncio.shield(running)  # others may wait for it
        if isinstance(found, SchemaRefused):
            raise found
        return found

    async def matcher(self, sampling: Sampling) -> Matcher | None:
        """The matcher that holds an answer to its schema, None without a schema."""
        if not sampling.json_schema:
            return None
        compiled = await self.compiled(sampling.json_schema)
        return Matcher(compiled, len(self.vocabulary.spellings), sampling.stop)

    def _ended(self, json_schema: str, ended: asyncio.Future[Any]) -> None:
        del self._compiling[json_schema]
        if not ended.cancelled() and ended.exception() is None:
            self._compiled.put(json_schema, ended.result())

    def _compile(self, json_schema: str) -> Any:
        if self._compile_schema is None or self._process is None:
            self.vocabulary = self._read()
            self._compile_schema = make_compiler(self.vocabulary.spellings)
            self._process = CompilerProcess(self.vocabulary.spellings, self._deadline_s)
        try:
            self._process.check(json_schema)
            self.vocabulary.check(json_schema)
        except SchemaNotTried:
            raise
        except SchemaRefused as refused:
            return refused
        return self._compile_schema(json_schema) if self._keeps else True


def make_compiler(spellings: Sequence[bytes]) -> Callable[[str], Any]:
    """The function that makes a schema's grammar. It raises RuntimeError for text that is not a schema."""
    import xgrammar

    info = xgrammar.TokenizerInfo(list(spellings), vocab_size=len(spellings), stop_token_ids=[])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda json_schema: compiler.compile_json_schema(json_schema, **ONE_SPELLING)


class CompilerProcess:
    """Checks which schemas compile in time. Guarantee: it answers within the deadline, and the next schema finds a
    process. spellings: of the vocabulary. deadline_s: for one schema.
    """

    def __init__(self, spellings: Sequence[bytes], deadline_s: float = DEADLINE_S) -> None:
        self._spellings = list(spellings)
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def check(self, json_schema: str) -> None:
        """Return once it has compiled. Raises SchemaRefused where it takes too long. Blocks; one at a time."""
        if len(json_schema) <= SHORT_CHARS and not SLOW.search(json_schema):
            return
        with self._lock:
            for _ in range(2):  # one that ended for reasons of its own is started again
                process = self._process or self._started()
                end = _answer(process, json_schema.encode(), self._deadline_s)
                if end == "done":
                    return
                _end(process)
                self._process = None
                if end == "late":
                    reason = f"it takes longer than {self._deadline_s:g} s to compile"
                    raise SchemaRefused(f"{reason}; a smaller schema does not")
        raise SchemaNotTried("the process that compiles it has ended")

    def close(self) -> None:
        """End the process; a schema that waits for it is refused."""
        self._closed = True
        if (process := self._process) is not None:
            _end(process)

    def _started(self) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-P", "-m", "actors.engines.grammar"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._process = process
        if self._closed or _answer(process, msgspec.msgpack.encode(self._spellings), START_S) != "done":
            _end(process)
            self._process = None
            raise SchemaNotTried("there is no process to compile it in")
        return process


def _answer(process: "subprocess.Popen[bytes]", payload: bytes, wait_s: float) -> Literal["done", "late", "gone"]:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(_SIZE.pack(len(payload)) + payload)
        process.stdin.flush()
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(1000 * wait_s):
            return "late"
        return "done" if process.stdout.read(len(_DONE)) == _DONE else "gone"
    except (OSError, ValueError):
        return "gone"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # closing flushes unsent bytes, and their reader is gone
            if pipe is not None:
                pipe.close()


def _num_bytes(compiled: Any) -> int:
    return int(getattr(compiled, "memory_size_bytes", 0))


def _received(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_SIZE.size)
    return stream.read(_SIZE.unpack(head)[0]) if len(head) == _SIZE.size else None


def main() -> None:
    """The process: the vocabulary, then schemas, until its parent closes the pipe."""
    os.nice(5)  # below the processes that serve
    given = _received(sys.stdin.buffer)
    compile_schema = make_compiler(msgspec.msgpack.decode(given or b"\x90", type=list[bytes]))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_MORE_BYTES,) * 2)
    while given is not None:
        sys.stdout.buffer.write(_DONE)
        sys.stdout.buffer.flush()
        given = _received(sys.stdin.buffer)
        with suppress(RuntimeError, MemoryError):  # no schema: said where it is compiled for use
            compile_schema((given or b"{}").decode())


if __name__ == "__main__":
    main()
