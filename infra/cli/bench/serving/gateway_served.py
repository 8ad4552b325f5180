"""The gateway as its benchmark beside peers runs it: keys, tokens, redaction and recording into a log in memory.

python -m infra.cli.bench.serving.gateway_served echo|vllm FOLDER
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.engines.engine import Engine
    from infra.model.model import Tokenizer


async def serve(kind: str, folder: Path) -> None:
    """Say where, and serve until it is killed. folder: of the model, which is made where it is missing."""
    from actors.gateway.access.keys import create_key
    from actors.gateway.http.listen import forget_loaded
    from infra.cli.bench.serving.gateway import gateway_over
    from infra.cli.demo.char_model import build_char_model
    from infra.model.model import load_tokenizer
    from infra.store.memory import MemoryStore

    tokenizer, store = load_tokenizer(build_char_model(folder / "model", seed=0)), MemoryStore()
    _, key = create_key(store, tenant="bench", scopes=("serve", "admin"), train="yes", rpm=0, tpm=0)

    def listening(port: int) -> None:
        forget_loaded()
        print(json.dumps({"port": port, "key": key}), flush=True)

    engine = _engine(kind, folder / "model", tokenizer)
    await gateway_over(engine, tokenizer, store, folder / kind, listening, asyncio.Event())


def _engine(kind: str, model: Path, tokenizer: "Tokenizer") -> "Engine":
    from infra.cli.bench.serving.echo import EchoEngine
    from infra.cli.bench.serving.http_asking import ECHO
    from infra.cli.bench.weights.reload import open_engine

    if kind == "echo":
        return EchoEngine([tokenizer.encode(one)[0] for one in ECHO])
    return open_engine(kind, model, {})


if __name__ == "__main__":
    from actors.gateway.http.listen import new_loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(sys.argv[1], Path(sys.argv[2])))
