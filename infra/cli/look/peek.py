"""`headrace peek TOPIC`: records as a person reads them."""

import time
from collections import Counter
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from infra.cli.connect import reading
from infra.cli.look.reader import newest_and_next
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, printable_json
from infra.log.log import LogMessage
from schemas import Batch, Block, Experience, topics
from schemas.errors import BadFrame, ConfigError

SHOWN = 8  # members of a block; the rest is counted
MAX_TEXT = 160


@command
async def peek(
    chosen: SettingsFile,
    topic: Annotated[str, typer.Argument(help="Topic, with or without the app's prefix.")],
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Number of newest records.")] = 5,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new records.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show the newest records of a topic in readable form.

    Topics: taskset.raw, taskset, tasks, experiences, experts, feedback, verified, buffer, evals, batches,
    progress, reports, policies, dead-letters.
    With --json each record is a line.

    Example: [cyan]headrace peek buffer -n 3[/], [cyan]headrace peek dead-letters --follow[/]
    """
    settings = chosen.load()
    try:
        place = topics.by_name(topic.removeprefix(f"{settings.app}."))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # The terminal's width does not break records into lines.
    console = Screen(soft_wrap=True)
    async with reading(settings) as log:
        messages, following = await newest_and_next(log, place, last)
        for message in messages:
            show(console, message, as_json)
        if not messages and last and not follow and not as_json:
            console.print(f"{log.name(place)} is empty", style="dim")
        if follow:
            async for message in log.tail(place, following):
                show(console, message, as_json)
    return 0


def show(console: Console, message: LogMessage, as_json: bool) -> None:
    if as_json:
        where = {"partition": message.partition, "offset": message.offset, "timestamp_ms": message.timestamp_ms}
        line = msgspec.json.encode({**where, "record": plain(message)}, enc_hook=str).decode()
        print(printable_json(line), flush=True)
        return
    clock = time.strftime("%H:%M:%S", time.localtime(message.timestamp_ms / 1000))
    head = Text(f"{message.partition}/{message.offset} {clock}  ", style="dim")
    try:
        if message.error is not None:
            raise message.error
        if isinstance(message.value, Block):
            show_block(console, head, message.value)
        else:
            console.print(head + Text(one_line(message.value)))
    except BadFrame as error:  # of the record, or of a block's bulk, which is decoded here first
        console.print(head + Text(f"unreadable: {error}", style="red"))


def show_block(console: Console, head: Text, block: Block) -> None:
    first = block.experiences[0]
    prompt = " ".join(message.content for message in first.messages if message.role != "assistant")
    title = f"{block.group}  attempt {first.attempt}  lane {first.lane}  {len(block.experiences)} of {first.group_size}"
    console.print(head + Text(f"{title}  ", style="bold") + Text(cut(prompt), style="cyan"))
    for member in block.experiences[:SHOWN]:
        console.print(Text("    ") + answer_line(member))
    if more := block.experiences[SHOWN:]:
        console.print(Text(f"    … and {len(more)} more", style="dim"))


def answer_line(member: Experience) -> Text:
    low, high = member.min_version, member.max_version
    line = Text(f"{member.episode:>3} ", style="dim") + Text(f"{cut(member.response)!r:<16}")
    line.append(f" v{low}" + (f"–{high}" if high != low else ""), style="dim")
    for score in member.scores:
        line.append(f"  {score.name} {score.value:g}", style="green" if score.value > 0 else "yellow")
    if member.reward is not None:
        line.append(f"  reward {member.reward:g}")
    if member.advantage is not None:
        line.append(f"  advantage {member.advantage:+.2f}")
    return line.append(f"  {member.num_sampled} tokens  {member.end}", style="dim")


def one_line(record: object) -> str:
    """A control record as `kind field=value …`; long fields are cut, absent ones left out."""
    assert isinstance(record, msgspec.Struct)
    if isinstance(record, Batch):
        counts = "".join(f" {lane}={count}" for lane, count in Counter(item.lane for item in record.items).items())
        drops = "".join(f" dropped[{reason}]={count}" for reason, count in record.drops.items())
        return f"batch step={record.step} version={record.version} phase={record.phase} token={record.token}{counts}{drops}"
    fields = msgspec.to_builtins(record, builtin_types=(bytes,))
    kind = fields.pop("kind", type(record).__name__)
    texts = {
        name: repr(value) if isinstance(value, str) and " " in value else str(value) for name, value in fields.items()
    }
    return f"{kind} " + " ".join(f"{name}={cut(text)}" for name, text in texts.items())


def plain(message: LogMessage) -> Any:
    if message.error is not None:
        return {"error": str(message.error)}
    if not isinstance(message.value, Block):
        return message.value
    return [header(member) | {"response": response_text(member)} for member in message.value.experiences]


def header(answer: Experience) -> dict[str, object]:
    """An experience as plain data, without its tokens and texts."""
    return {name: getattr(answer, name) for name in Experience.__struct_fields__ if name != "bulk"}


def response_text(member: Experience) -> str | None:
    """Text of the answer; None if it cannot be decoded."""
    try:
        return member.response
    except BadFrame:
        return None


def cut(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
