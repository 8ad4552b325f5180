"""How long one turn of a long conversation holds the event loop: of an explorer, and of the gateway.

A conversation of 25 turns grows to 38,000 tokens of a vocabulary of 40,000 with Qwen's pattern. Each turn is asked as it is in
an episode and in the gateway; a heart beats on the same loop, and between two beats the loop's thread has done so much work:
processor time of that thread alone, which other programs on the machine do not lengthen. `turn` is what a turn takes in
all threads. `whole` is the same conversation tokenized anew on the loop.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.engines.engine import Sampling
from infra.cli.bench.serving.echo import EchoEngine
from infra.model.model import Tokenizer

BEAT_S = 0.001
TURNS = 25
WORDS = 810  # of a question: with these a conversation of 25 turns has 38,000 tokens
QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LAST = 5  # turns whose longest block counts: those of the longest conversation


def run() -> dict[str, float]:
    """Processor milliseconds of the loop's longest block and of the dearest turn at the end of the conversation."""
    from actors.gateway.http.listen import new_loop

    tokenizer, questions = made(random.Random(0))
    with TemporaryDirectory() as folder, asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_measured(tokenizer, questions, Path(folder)))


def made(source: random.Random) -> tuple[Tokenizer, list[str]]:
    """A tokenizer of 40,000 tokens, trained on made-up words, and questions of such words."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    words = ["".join(source.choices("etaoinshrdlucmfwypvbgkqjxz", k=source.randint(2, 9))) for _ in range(40_000)]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=40_000, special_tokens=special, show_progress=False, initial_alphabet=letters
    )
    backend.train_from_iterator([" ".join(source.choices(words, k=60_000))], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    questions = [" ".join(source.choices(words, k=WORDS)) for _ in range(TURNS)]
    return Tokenizer(fast, (int(fast.convert_tokens_to_ids("<|im_end|>")),)), questions


async def _measured(tokenizer: Tokenizer, questions: list[str], folder: Path) -> dict[str, float]:
    from actors.rollout.session import CachedTokenizer, Session
    from schemas import Message

    engine = EchoEngine((*tokenizer.encode("Yes, so it is."), tokenizer.eos_ids[0]), stopped=True)
    await engine.start()
    session = Session(engine, CachedTokenizer(tokenizer), Sampling(max_tokens=64, stop=tokenizer.eos_ids))
    said: list[Message] = []

    async def reply() -> None:
        said.append(await session.reply(said))

    spent = []
    for question in questions:
        said.append(Message(role="user", content=question))
        spent.append(await _spent(reply))
    figures = {"tokens": float(len(session.parts.all[0].tokens))} | _dearest("explorer", spent)
    figures |= _dearest("gateway", await _in_gateway(tokenizer, engine, questions, folder))
    rendered = tokenizer.wrapped.apply_chat_template(
        [{"role": one.role, "content": one.content} for one in said], tokenize=False
    )
    whole, _ = await _spent(lambda: _on_loop(lambda: tokenizer.wrapped.backend_tokenizer.encode(rendered)))
    return figures | {"whole_held_ms": whole}


def _dearest(where: str, spent: list[tuple[float, float]]) -> dict[str, float]:
    held, turn = (max(column) for column in zip(*spent[-LAST:], strict=True))
    return {f"{where}_held_ms": held, f"{where}_turn_ms": turn}


async def _in_gateway(
    tokenizer: Tokenizer, engine: Any, questions: list[str], folder: Path
) -> list[tuple[float, float]]:
    """The same conversation, asked of a gateway on this loop by a client in a thread."""
    import httpx

    from actors.gateway.access.keys import create_key
    from actors.gateway.config import GatewayConfig, GatewayLimits
    from actors.gateway.serve import run_gateway
    from infra.log.log import Log
    from infra.log.memory import MemoryBus
    from infra.observe.metrics import Metrics
    from infra.roles.role import Role
    from infra.settings.config import Floor
    from infra.store.memory import MemoryStore

    store, stop = MemoryStore(), asyncio.Event()
    _, key = create_key(store, tenant="bench", scopes=("serve",), train="yes", rpm=0, tpm=0)
    log = Log(MemoryBus(), "bench", store=store)
    await log.create_topics(partitions=1, keep_ms=3_600_000)
    role = Role(
        floor=Floor(app="bench", folder=folder),
        log=log,
        store=store,
        metrics=Metrics("serve"),
        instance="bench",
        stop=stop,
    )
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    config = GatewayConfig(
        listen="127.0.0.1:0",
        train_on="consented",
        limits=GatewayLimits(prompt_tokens=100_000, body_bytes=8 * 1024 * 1024),
    )
    serving = asyncio.create_task(run_gateway(role, config, engine, tokenizer, listening=port.set_result))
    headers = {"authorization": f"Bearer {key}", "x-session-id": "bench"}
    said: list[dict[str, str]] = []
    spent = []
    with httpx.Client(base_url=f"http://127.0.0.1:{await port}", headers=headers, timeout=120) as client:
        for question in questions:
            said.append({"role": "user", "content": question})
            answer: list[Any] = []

            def ask(answer: list[Any] = answer) -> None:
                answer.append(client.post("/v1/chat/completions", json={"model": "m", "messages": said}).json())

            spent.append(await _spent(lambda ask=ask: asyncio.to_thread(ask)))  # type: ignore[misc]
            said.append({"role": "assistant", "content": answer[0]["choices"][0]["message"]["content"]})
    stop.set()
    await serving
    return spent


async def _on_loop(work: Callable[[], object]) -> None:
    work()


async def _spent(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """The most processor time of this thread between two beats while something is awaited, and that of all threads, ms."""
    working = asyncio.ensure_future(work())
    longest, before_s, all_s = 0.0, time.thread_time(), time.process_time()
    while not working.done():
        await asyncio.sleep(BEAT_S)
        now_s = time.thread_time()
        longest, before_s = max(longest, now_s - before_s), now_s
    await working
    return 1000 * longest, 1000 * (time.process_time() - all_s)
