"""`headrace serve` on a real broker, with the openai client: recorded, rated, killed and started again."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from infra.cli.demo.char_model import build_char_model
from infra.cli.run.up import child_environment
from infra.cli.settings import load_settings
from infra.local.broker import choose_address
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.model.model import load_tokenizer
from infra.policies.tensors import from_numpy, save_tensors
from infra.store.directory import DirectoryStore
from infra.store.seal import app_secret
from schemas import Block, Experience, Feedback
from schemas.ids import pseudonym
from schemas.topics import EXPERIENCES, VERIFIED, Topic

pytestmark = pytest.mark.slow

TOML = """
app = "{app}"
[kafka]
bootstrap_servers = "{bootstrap}"
partitions = 2
[policy]
model = "model"
[engine]
use = "actors.engines.scripted:ScriptedEngine"
options = {{ max_model_len = 2048 }}
[gateway]
listen = "127.0.0.1:{port}"
train_on = "consented"
keys_reload_s = 0.2
[gateway.limits]
max_tokens = 12
[[feedback]]
name = "user"
use = "streams.sources.received:rating"
from = {{ webhook = "/v1/feedback" }}
"""
ASK: Any = [{"role": "user", "content": "37+45="}]


def headrace(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "infra.cli.main", *arguments, "-c", str(folder / "headrace.toml")]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A role for the length of a block, in the environment `up` gives it, ended like a person would."""
    environment = os.environ | child_environment(load_settings(folder / "headrace.toml"))
    with (folder / f"{arguments[0]}.log").open("ab") as output:
        process = subprocess.Popen(
            headrace(folder, *arguments), stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def table_in(folder: Path) -> np.ndarray:
    """A model folder whose tokenizer is the demo's and whose model is a bigram table, which is returned."""
    build_char_model(folder / "model", seed=0)
    table = np.random.default_rng(4).normal(size=(128, 128)).astype(np.float32)
    (folder / "model" / "model.safetensors").write_bytes(save_tensors({"bigram.weight": from_numpy(table)}))
    wide = table.astype(np.float64)
    logprobs: np.ndarray = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return logprobs


def wait_until_served(client: openai.OpenAI, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)


def ask(client: openai.OpenAI, count: int) -> list[str]:
    answers = [client.chat.completions.create(model="m", messages=ASK) for _ in range(count)]
    return [answer.id.removeprefix("hr-") for answer in answers]


async def read(bootstrap: str, app: str, topic: Topic, until: int, ids: Collection[str] = ()) -> list[Any]:
    """Records of a topic, once there are so many, those of `ids` among them."""
    bus = KafkaBus(bootstrap)
    await bus.start()
    found = []
    try:
        async with asyncio.timeout(120):
            async for message in Log(bus, app).read_all(topic, until_end=False):
                value = message.value
                if topic is EXPERIENCES and isinstance(value, Block):
                    found += value.experiences
                elif isinstance(value, Feedback):
                    found.append(value)
                if len(found) >= until and {item.id for item in found}.issuperset(ids):
                    return found
    finally:
        await bus.close()
    return found


def check_exact(experiences: Sequence[Experience], logprobs: np.ndarray, prompt: list[int]) -> None:
    for experience in experiences:
        tokens = experience.tokens.tolist()
        assert tokens[: experience.num_prompt] == prompt
        expected = [logprobs[a, b] for a, b in itertools.pairwise(tokens)][experience.num_prompt - 1 :]
        np.testing.assert_allclose(experience.logprobs, expected, atol=1e-4)


def test_answers_are_served_recorded_and_rated_through_kafka_and_a_kill(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    logprobs = table_in(tmp_path)
    port = choose_address().port
    (tmp_path / "headrace.toml").write_text(TOML.format(app=app_name, bootstrap=kafka, port=port))
    subprocess.run(headrace(tmp_path, "check", "--create"), check=True, capture_output=True, timeout=120)
    made = subprocess.run(
        headrace(tmp_path, "keys", "create", "--train", "yes"), check=True, capture_output=True, text=True, timeout=120
    )
    key = made.stdout.strip()
    client = openai.OpenAI(api_key=key, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=60)
    log = tmp_path / "serve.log"
    with running(tmp_path, "serve") as process:
        wait_until_served(client, process, log)
        before = ask(client, 10)
        asyncio.run(read(kafka, app_name, EXPERIENCES, 10))
        streaming = client.chat.completions.create(model="m", messages=ASK, stream=True)
        next(iter(streaming))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with running(tmp_path, "serve") as process, running(tmp_path, "process"):
        wait_until_served(client, process, log)
        after = ask(client, 10)
        # The stream that the kill broke off may have been sampled to its end and recorded: then there are 21.
        recorded = asyncio.run(read(kafka, app_name, EXPERIENCES, 20, {*before, *after}))
        ids = [item.id for item in recorded]
        assert len(set(ids)) == len(ids) and {*before, *after} <= set(ids)
        prompt = load_tokenizer(tmp_path / "model").encode_request(ASK)
        check_exact(recorded, logprobs, prompt)
        for _ in range(2):  # a client that sends again says the same once
            said = {"answer_id": f"hr-{before[0]}", "id": "f-1", "value": 0.75, "rater": "ann"}
            told = json.loads(json.dumps(client.post("/feedback", cast_to=object, body=said)))
            assert told["recorded"] is True
        rater = pseudonym(app_secret(DirectoryStore(tmp_path / "store")), "rater", "default", "ann")
        (first, *_) = asyncio.run(read(kafka, app_name, VERIFIED, 1))
        assert first == Feedback(ref=f"hr-{before[0]}", id=told["id"], value=0.75, source="user", rater=rater)
