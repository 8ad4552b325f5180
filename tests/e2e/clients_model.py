"""The model that the clients' tests train, and its engine: it samples, and recites the tool calls that no random model spells.

A call is recited token by token with the model's own log-probability of each; words are sampled.
"""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from actors.engines.engine import Chunk, Completion, OnChunk, Sampling
from actors.engines.torch import TorchEngine
from infra.cli.demo.char_model import CHARACTERS, Size, Vocabulary, build_char_model
from infra.model.model import Tokenizer
from infra.store.images import Pixels
from schemas import Span

CONTEXT = 16_384  # smolagents explains itself in five thousand characters
TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role + ':' + (message.content or '') }}{% for call in message.tool_calls %}
<tool_call>
{{ '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
ROW = re.compile(r"row (\d+)")
# What an answer is called that is a tool call too: pydantic-ai's, smolagents'.
FINAL = {"final_result": "row", "final_answer": "answer"}


def build_model(folder: Path) -> Path:
    """A Qwen3 of two layers with one token per character, whose template knows tools."""
    vocabulary = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=TEMPLATE)
    build_char_model(folder, 3, vocabulary, Size(hidden=64, layers=2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


class CallingEngine(TorchEngine):
    """Calls `look` where it is offered and was not called, with another row each time; then the final answer's tool, if there
    is one; else it samples. A prompt that a request forces the beginning of goes on from there.
    """

    def __init__(self, *, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(model=model, threads=1)
        self._tokenizer = tokenizer
        self._rows = itertools.count(1)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        call = self._call(self._tokenizer.decode(prompt))
        if not call:
            return await super().generate(prompt, sampling, on_chunk=on_chunk, images=images)
        tokens = (*self._tokenizer.encode(call), *self._tokenizer.eos_ids)
        version = -1
        while version != self.version:  # a reload in between: once more, under one policy
            version = self.version
            logprobs = (await self.score_tokens([*prompt, *tokens]))[-len(tokens) :]
        if on_chunk is not None:
            on_chunk(Chunk(tokens, logprobs, version))
        span = Span(0, len(tokens), version, sampling.temperature, sampling.temperature == 1.0)
        return Completion(tokens=tokens, logprobs=logprobs, spans=(span,), stopped=True)

    def _call(self, heard: str) -> str:
        tools, _, said = heard.partition("\n")
        if not tools.removeprefix("<bos>").startswith("["):
            return ""
        rows = ROW.findall(said)
        finals = [name for name in FINAL if f'"name": "{name}"' in tools]
        if rows and not finals:
            return ""
        name = finals[0] if rows else "look"
        argument = {FINAL[name]: int(rows[-1])} if rows else {"row": next(self._rows)}
        text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': argument})}\n</tool_call>"
        for cut in range(len(text), 0, -1):
            if heard.endswith(text[:cut]):
                return text[cut:]
        return text
