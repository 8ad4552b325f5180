"""`headrace peek TOPIC`: records as a person reads them."""

import json
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from infra.bus.log import Log, Message
from infra.cli.connect import connected
from infra.cli.settings import load_settings
from schemas import Batch, Block, Experience, topics
from schemas.errors import ConfigError

SHOWN = 8  # members of a block; the rest is counted
MAX_TEXT = 160


async def run_peek(topic: str, config: Path, sets: list[str], *, last: int, follow: bool, as_json: bool) -> int:
    """Print the newest records of a topic, and go on with `follow`."""
    settings = load_settings(config, sets)
    try:
        chosen = topics.by_name(topic.removeprefix(f"{settings.app}."))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    console = Console(highlight=False)
    async with connected(settings, deadline_s=10.0) as log:
        messages = await newest(log, chosen, last)
        for message in messages:
            show(console, message, as_json)
        if not messages and not follow and not as_json:
            console.print(f"{log.name(chosen)} is empty", style="dim")
        if follow:
            reader = await log.assigned(chosen, "end")
            while True:
                for message in await log.read(reader, timeout_s=1.0):
                    show(console, message, as_json)
    return 0


async def newest(log: Log, topic: topics.Topic, last: int) -> list[Message]:
    """The `last` newest records over all partitions, oldest first."""
    name = log.name(topic)
    beginnings = await log.bus.beginning_offsets(name)
    ends = await log.bus.end_offsets(name)
    starts = {one.index: max(beginnings[one], end - last) for one, end in ends.items()}
    wanted = sum(end - starts[one.index] for one, end in ends.items())
    reader = await log.assigned(topic, starts)
    found: list[Message] = []
    try:
        while len(found) < wanted:
            batch = await log.read(reader, timeout_s=2.0)
            if not batch:
                break
            found += batch
    finally:
        await reader.close()
    found.sort(key=lambda message: (message.timestamp_ms, message.partition, message.offset))
    return found[-last:] if last else []


def show(console: Console, message: Message, as_json: bool) -> None:
    """One record: where it lies and what it says."""
    if as_json:
        where = {"partition": message.partition, "offset": message.offset, "timestamp_ms": message.timestamp_ms}
        console.print_json(json.dumps({**where, "record": plain(message)}, default=str))
        return
    clock = time.strftime("%H:%M:%S", time.localtime(message.timestamp_ms / 1000))
    head = Text(f"{message.partition}/{message.offset} {clock}  ", style="dim")
    if message.error is not None:
        console.print(head + Text(f"unreadable: {message.error}", style="red"))
    elif isinstance(message.value, Block):
        show_block(console, head, message.value)
    else:
        console.print(head + Text(one_line(message.value)))


def show_block(console: Console, head: Text, block: Block) -> None:
    """A group: its question once, then a line per answer."""
    first = block.experiences[0]
    prompt = " ".join(one.content for one in first.messages if one.role != "assistant")
    title = f"{block.group}  attempt {first.attempt}  lane {first.lane}  {len(block.experiences)} of {first.group_size}"
    console.print(head + Text(f"{title}  ", style="bold") + Text(cut(prompt), style="cyan"))
    for one in block.experiences[:SHOWN]:
        console.print(Text("    ") + answer_line(one))
    if len(block.experiences) > SHOWN:
        console.print(Text(f"    … and {len(block.experiences) - SHOWN} more", style="dim"))


def answer_line(one: Experience) -> Text:
    """One answer: what was said, by which version, and what was thought of it."""
    versions = f"v{one.min_version}" if one.min_version == one.max_version else f"v{one.min_version}–{one.max_version}"
    line = (
        Text(f"{one.episode:>3} ", style="dim") + Text(f"{cut(one.response)!r:<16}") + Text(f" {versions}", style="dim")
    )
    for score in one.scores:
        line.append(f"  {score.name} {score.value:g}", style="green" if score.value > 0 else "yellow")
    if one.reward is not None:
        line.append(f"  reward {one.reward:g}")
    if one.advantage is not None:
        line.append(f"  advantage {one.advantage:+.2f}")
    return line.append(f"  {one.num_sampled} tokens  {one.end}", style="dim")


def one_line(record: object) -> str:
    """A control record as `kind field=value …`; long fields are cut."""
    assert isinstance(record, msgspec.Struct)
    if isinstance(record, Batch):
        lanes: dict[str, int] = {}
        for item in record.items:
            lanes[item.lane] = lanes.get(item.lane, 0) + 1
        counts = " ".join(f"{lane}={count}" for lane, count in lanes.items())
        return f"batch step={record.step} version={record.version} phase={record.phase} token={record.token} {counts}"
    fields = msgspec.to_builtins(record)
    kind = fields.pop("kind", type(record).__name__)
    return f"{kind} " + " ".join(f"{name}={cut(str(value))}" for name, value in fields.items())


def plain(message: Message) -> object:
    """A record as plain data, blocks without their token arrays."""
    if message.error is not None:
        return {"error": str(message.error)}
    if not isinstance(message.value, Block):
        return msgspec.to_builtins(message.value, enc_hook=str)
    fields = [name for name in Experience.__struct_fields__ if name != "bulk"]
    return [
        {name: msgspec.to_builtins(getattr(one, name)) for name in fields} | {"response": one.response}
        for one in message.value.experiences
    ]


def cut(text: str) -> str:
    """Text short enough for a line."""
    text = text.replace("\n", "⏎")
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
