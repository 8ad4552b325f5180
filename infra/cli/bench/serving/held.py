"""How long one request holds the gateway's event loop: a heart that beats every millisecond, and the longest it waited.

The work is done as the gateway does it, in a thread of its process: the longest prompt that is tokenized at all, one full of
names of control tokens, texts that are slow to redact, and a body's worth of JSON. On a machine that does other work too, the
heart waits for that as well: `idle` says how long, with nothing to do.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infra.chain.redact import Redactor
from infra.cli.demo.char_model import build_char_model
from infra.model.model import Tokenizer, load_tokenizer

BEAT_S = 0.001
PROMPT_CHARS = 512 * 1024  # 32,768 tokens of 16 characters
TEXT_CHARS = 1024 * 1024
HOSTILE = {"letters": "a", "digits": "1 ", "addresses": "a" * 63 + "@", "keys": "sk-", "cards": "4111 1111 1111 1111 "}


def run() -> dict[str, float]:
    """Milliseconds that the heart waited at most, by what was done meanwhile, and what that took."""
    from actors.gateway.http.listen import new_loop

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=new_loop) as runner:
        tokenizer = load_tokenizer(build_char_model(Path(folder) / "model", seed=0))
        return runner.run(_measured(tokenizer))


async def _measured(tokenizer: Tokenizer) -> dict[str, float]:
    redactor = Redactor()
    prompt, strange = "How much is 37+45? " * PROMPT_CHARS, "<eos> and <bos>, <eo" * PROMPT_CHARS

    def idle() -> None:
        time.sleep(1.0)

    def ask(text: str) -> Callable[[], object]:
        return lambda: tokenizer.encode_request([{"role": "user", "content": text[:PROMPT_CHARS]}])

    def mask(text: str) -> Callable[[], object]:
        return lambda: redactor.mask((text * TEXT_CHARS)[:TEXT_CHARS])

    works: dict[str, Callable[[], object]] = {"idle": idle, "prompt": ask(prompt), "control_tokens": ask(strange)}
    works |= {f"redact_{name}": mask(text) for name, text in HOSTILE.items()}
    works["decode"] = lambda: tokenizer.decode(list(range(3, 99)) * 340)
    # One after the other, three times: the least of three says most about the work, and least about the machine.
    figures: dict[str, float] = {}
    for name, work in works.items():
        await asyncio.to_thread(work)  # warmed up
        measured = [await _held(work) for _ in range(3)]
        figures[f"{name}_held_ms"], figures[f"{name}_s"] = map(min, zip(*measured, strict=True))
    return figures


async def _held(work: Callable[[], object]) -> tuple[float, float]:
    """The longest wait of the heart beyond its beat, ms, while the work is done in a thread; and what that took, s."""
    loop = asyncio.get_running_loop()
    working = asyncio.create_task(asyncio.to_thread(work))
    begin = last = loop.time()
    longest = 0.0
    while not working.done():
        await asyncio.sleep(BEAT_S)
        now = loop.time()
        longest, last = max(longest, now - last - BEAT_S), now
    return 1000 * longest, last - begin
