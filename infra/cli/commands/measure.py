"""The benchmarks: figures of this machine beside what was aimed at. One function each, by the name of its command.

Bodies import what they need when they run: see `infra.cli.main`.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.cli.bench.found import Found, beside, command, one_of, some_of, tell
from infra.cli.commands.every import every_of
from infra.cli.commands.measure_whole import overlap, start, train
from infra.cli.commands.plan import plan
from infra.cli.commands.weights_bench import weights

DTYPES = ("float32", "bfloat16")
# Those without flags of their own, by their module in infra/cli/bench.
PLAIN = {
    "looking.console": "The console over an index of 1,000,000 experiences: pages, searches, memory; its first start. Minutes.",
    "weights.delta": "The weight delta of one reinforcement step in bfloat16, against all weights.",
    "learner.draw": "Draws by priority and even ones from a buffer of 100,000 experiences; by priority beside cpprb.",
    "records.feedback": "Feedback joined to 100,000 waiting answers, and their state rebuilt from the log.",
    "serving.gateway": "The gateway over the engine alone: what it adds to an answer, and how many it gives a second.",
    "serving.held": "How long one request holds the gateway's event loop: prompts, control tokens, redaction.",
    "learner.lora": "What a version of a LoRA run weighs beside full weights, of a Qwen3 of 103 M parameters.",
    "records.reprocess": "Verify and collect over 20,000 recorded experiences again, with and without comparing.",
    "serving.sandbox": "What it costs to confine untrusted code, over 1,000 runs; and that none of them leaves a process.",
    "growth.days": "What roles read at their start after one day and after thirty: records and CPU. A minute.",
    "growth.starts": "What roles read at their start, over logs of up to 1,000,000 reports and groups. Minutes.",
    "serving.stream": "Events that the gateway streams a second to 240 clients, and how long a stream pauses.",
    "serving.turn": "How long a turn of a conversation of 38,000 tokens holds the event loop: of an explorer, of the gateway.",
    "looking.trace": "Questions to a log of 1,000,000 experiences: the first, which builds the index, and later ones. Minutes.",
}
RepeatOption = Annotated[int, typer.Option(min=1, help="Rounds timed of each.")]


def commands() -> dict[str, Callable[..., None]]:
    """Every benchmark's command by its name."""
    own = {one.__name__.replace("_", "-"): one for one in BENCHES}
    benches = {module.rpartition(".")[2]: plain(module) for module in PLAIN} | own
    benches = {**benches, "all": every_of(benches)}
    return {name: command(name, bench) for name, bench in benches.items()}


def plain(module: str) -> Callable[[], Found]:
    """The benchmark of PLAIN."""

    def bench() -> Found:
        return Found(importlib.import_module(f"infra.cli.bench.{module}").run())

    bench.__doc__ = PLAIN[module]
    return bench


def codec(repeat: RepeatOption = 7) -> Found:
    """The experience block beside msgspec of packed bytes and of lists, pickle, orjson and protobuf."""
    from infra.cli.bench.records.codec import rows, run
    from infra.cli.bench.tables import shapes_table

    found = run(tell, rounds=repeat)
    return Found(found, lambda: [shapes_table("codec", rows(found))], width=170)


def hop(
    repeat: RepeatOption = 5,
    groups: Annotated[int, typer.Option(min=1, help="Of 16 answers, in each round.")] = 64,
) -> Found:
    """Verify and collect on a real broker beside a plain aiokafka loop and stock Faust, by processor time. Minutes."""
    from infra.cli.bench.records.hop import HopPlan, run

    return beside("hop", run(HopPlan(rounds=repeat, groups=groups), tell))


def transport(
    repeat: RepeatOption = 5,
    answers: Annotated[int, typer.Option(min=1, help="Of 500 tokens, in each round.")] = 1024,
) -> Found:
    """From an engine's lists to the trainer's arrays beside Redis streams and Ray's Queue: processor time of an answer.

    The peers come from an environment of their own, which `make bench-deps` makes, and redis-server from the machine; those
    that are missing are named and left out. Minutes.
    """
    from infra.cli.bench.records.transport import TransportPlan, run

    return beside("transport", run(TransportPlan(rounds=repeat, answers=answers), tell))


def gateway_peers(
    repeat: RepeatOption = 5,
    model: Annotated[bool, typer.Option(help="Also over vLLM, beside vLLM's own server.")] = True,
) -> Found:
    """The gateway, recording, beside bare uvicorn, Starlette and vLLM's own server at 1, 16 and 64 clients, plain and streamed.

    Processor time of an answer, and how many come a second. A peer that is missing is named and left out. Minutes.
    """
    from infra.cli.bench.serving.gateway_peers import PeersPlan, run

    return beside("gateway-peers", run(PeersPlan(rounds=repeat, model=model), tell))


def growth(
    sizes: Annotated[str, typer.Option(help="Of what it grows with, by commas.")] = "10000,100000,1000000",
    minutes: Annotated[
        float, typer.Option(min=0.1, help="A point that would take longer is named and left out.")
    ] = 10.0,
    only: Annotated[
        str, typer.Option(help="What grows, by commas, as in master,collect; all of it where left out.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for growth.json and growth.png.")] = Path("bench"),
) -> Found:
    """All that starts, answers or holds, over logs of 10,000 to 1,000,000: CPU, memory, and how they grow. Minutes."""
    from infra.cli.bench.growth.growth import WORKS, run
    from infra.cli.bench.tables import growth_table
    from schemas.errors import ConfigError

    try:
        wanted = sorted({int(size) for size in sizes.split(",")})
    except ValueError as error:
        raise ConfigError(f"--sizes: got {sizes!r}, expected whole numbers by commas, as in 10000,100000") from error
    if wanted[0] < 1:
        raise ConfigError(f"--sizes: got {wanted[0]}, expected 1 or more")
    found = run(wanted, out, tell, limit_s=60 * minutes, only=some_of("--only", only, WORKS))
    return Found(msgspec.to_builtins(found), lambda: [growth_table(found)], width=150)


def takeover(
    waiting: Annotated[int, typer.Option(help="Answers that wait for feedback.", min=1)] = 100_000,
    closed: Annotated[int, typer.Option(help="Answers that were joined and closed before.", min=0)] = 100_000,
    rebuild: Annotated[bool, typer.Option(help="Also from the log alone.")] = True,
) -> Found:
    """A worker takes a partition of waiting answers over: from the state in the store, and from the log alone."""
    from infra.cli.bench.records.takeover import TakeoverPlan, run

    return Found(run(TakeoverPlan(waiting=waiting, closed=closed, rebuild=rebuild), tell))


def audit(
    experiences: Annotated[int, typer.Option(help="In the log, which is made as it is read.", min=1)] = 1_000_000,
) -> Found:
    """Audit, and trace with its index built from nothing: the memory and the processor time of each. Minutes."""
    from infra.cli.bench.looking.audit import run

    return Found(run(experiences=experiences))


def console_load(
    pairs: Annotated[int, typer.Option(min=2, help="Pieces of the run with people and without.")] = 6,
    seconds: Annotated[float, typer.Option(min=20, help="Of each piece.")] = 60.0,
    people: Annotated[int, typer.Option(min=1, help="Who look at once.")] = 10,
) -> Found:
    """The demo's steps a second with browsers on its console and without, in pairs. A quarter of an hour."""
    from infra.cli.bench.looking.console_load import LoadPlan, run

    return Found(run(LoadPlan(pairs=pairs, piece_s=seconds, people=people), tell))


def fan_out(
    mb: Annotated[
        float, typer.Option(min=1, help="Weights in bfloat16, in 10⁶ bytes; three times as much a follower.")
    ] = 32,
    mb_per_s: Annotated[float, typer.Option(min=0.1, help="Of one connection, in 10⁶ bytes.")] = 2,
    hosts: Annotated[int, typer.Option(min=1, help="Each with a cache of its own.")] = 8,
    followers: Annotated[int, typer.Option(min=1, help="Processes of each host.")] = 8,
) -> Found:
    """Many followers of one version, from a MinIO server behind slow connections: bytes from the store, and speed. Minutes."""
    from infra.cli.bench.weights.fan_out import FanOutPlan, run

    return Found(run(FanOutPlan(mb=mb, mb_per_s=mb_per_s, hosts=hosts, followers=followers), tell))


def card(
    layers: Annotated[int, typer.Option(min=1, help="Of the random Qwen3-8B, which has 36.")] = 36,
) -> Found:
    """A version of 8B's shapes between two steps on one GPU: what is not finite, what changed, hashes. Needs 40 GB of it."""
    from infra.cli.bench.weights.card import CardPlan, run

    return Found(run(CardPlan(layers=layers), tell))


def families(
    only: Annotated[str, typer.Option(help="Families, by commas; all where left out.")] = "",
) -> Found:
    """Tiny models of every family through learner, publication and engine: how each is read, or why it is refused."""
    from infra.cli.bench.learner.families import run
    from infra.cli.bench.learner.tiny_models import FAMILIES
    from infra.cli.bench.tables import families_table
    from infra.cli.terminal import Screen

    found = []
    wanted = some_of("--only", only, FAMILIES)
    with Screen(stderr=True).status("opening families") as status:
        for one in run(wanted):
            status.update(f"{one.name} done")
            found.append(one)
    return Found([msgspec.structs.asdict(one) for one in found], lambda: [families_table(found)], width=150)


def reload(
    versions: Annotated[int, typer.Option(help="How many are loaded.", min=2)] = 300,
    lora_rank: Annotated[int, typer.Option(help="Of versions that are adapters; 0 for whole models.", min=0)] = 0,
    kv: Annotated[str, typer.Option(help="Modes of reload.kv, by commas.")] = "rebuild,keep",
) -> Found:
    """Hot reloads under load beside a trainer, in both modes of reload.kv: pause, memory per version, and how far logprobs
    after a reload are from exact ones. Minutes.
    """
    from infra.cli.bench.weights.reload import MODES, run

    return Found(run(versions, lora_rank=lora_rank, modes=[one_of("--kv", mode, MODES) for mode in kv.split(",")]))


def offpolicy(
    out: Annotated[Path, typer.Option(help="Folder for offpolicy.json and offpolicy.png.")] = Path("bench"),
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 120,
    seeds: Annotated[int, typer.Option(help="Runs of each loss and lag.")] = 3,
    lags: Annotated[str, typer.Option(help="Versions between sampling and training, by commas.")] = "0,2,4,8,16",
    losses: Annotated[str, typer.Option(help="Losses, by commas.")] = "dppo,decoupled,grpo,reinforce",
) -> Found:
    """How much each objective loses on samples that are versions old, off the log. Runs in the folder are not run again."""
    from infra.cli.bench.learning.offpolicy import OffPolicyPlan, run
    from schemas.errors import ConfigError

    try:
        wanted = tuple(int(lag) for lag in lags.split(","))
    except ValueError as error:
        raise ConfigError(f"--lags: got {lags!r}, expected whole numbers by commas, as in 0,2,8") from error
    plan = OffPolicyPlan(losses=tuple(losses.split(",")), lags=wanted, seeds=tuple(range(seeds)), steps=steps)
    return Found(run(plan, out=out, say=tell))


def mix(
    out: Annotated[Path, typer.Option(help="Folder for mix.json and mix.png.")] = Path("bench"),
    seeds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 500,
) -> Found:
    """200 demonstrations alone, rewards alone, and both in one loss, off the log. Runs in the folder are not run again."""
    from infra.cli.bench.learning.mix import MixPlan, run

    return Found(run(MixPlan(seeds=tuple(range(seeds)), steps=steps), out=out, say=tell))


def gate(
    paths: Annotated[int, typer.Option(min=1, help="Deployments simulated a row.")] = 1000,
) -> Found:
    """How often the gate, its trials and its guard are wrong, in worlds of all kinds, and how often they find harm. Minutes."""
    from infra.cli.bench.learning.gate import run
    from infra.cli.bench.tables import gate_table

    found = run(paths)
    return Found([msgspec.to_builtins(one) for one in found], lambda: [gate_table(found)], width=150)


def learner(
    model: Annotated[str, typer.Option(help="Folder of a model; a random Qwen3 where left out.")] = "",
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 384,
    layers: Annotated[int, typer.Option(min=1, help="Its layers.")] = 7,
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16; bfloat16 on a GPU where left out, else float32.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a microbatch.")] = 16_384,
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again in the backward.")] = False,
    peak: Annotated[float, typer.Option(help="TFLOP/s of the device, for a card that is not known.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Steps timed of each.")] = 5,
) -> Found:
    """The learner's step beside a plain padded one on transformers: tokens a second, MFU, memory. Minutes on a CPU.

    On a GPU say --hidden 2048 --layers 16, or --model with a folder.
    """
    from infra.cli.bench.learner.learner import LearnerBenchPlan, run
    from infra.cli.bench.tables import learner_about, learner_table

    plan = LearnerBenchPlan(
        model=model,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
        max_tokens=max_tokens,
        checkpointing=checkpointing,
        peak=peak,
        repeat=repeat,
    )
    machine, found = run(plan, tell)
    figures = {"machine": msgspec.to_builtins(machine), "shapes": msgspec.to_builtins(found)}
    return Found(figures, lambda: [learner_about(plan, machine), learner_table(found)], width=150)


def life(
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: 13·hidden² parameters each.")] = 9,
    stage: Annotated[int, typer.Option(min=1, max=3, help="Of ZeRO.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    engine: Annotated[str, typer.Option(help="What loads the last version: torch or vllm.")] = "torch",
) -> Found:
    """Ten steps of `headrace train` on two CPU ranks, killed after a checkpoint and started again; then an engine loads the
    last version. Minutes.
    """
    from infra.cli.bench.learner.life import LifePlan, run
    from infra.cli.bench.weights.reload import ENGINES

    plan = LifePlan(
        hidden=hidden,
        layers=layers,
        stage=stage,
        engine=one_of("--engine", engine, ENGINES),
        dtype=one_of("--dtype", dtype, DTYPES),  # type: ignore[arg-type]
    )
    return Found(run(plan, say=tell))


def memory(
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: 13·hidden² parameters each.")] = 7,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again in the backward.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="CPU ranks of DeepSpeed; 1: the learner of one process.")] = 1,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO, of several ranks.")] = 3,
) -> Found:
    """What a learner holds, beside what `headrace check --size` says that it needs."""
    from infra.cli.bench.learner.memory import run
    from infra.cli.bench.learner.memory_held import MemoryPlan

    one_of("--dtype", dtype, DTYPES)
    plan = MemoryPlan(hidden=hidden, layers=layers, dtype=dtype, checkpointing=checkpointing, ranks=ranks, stage=stage)
    return Found(run(plan))


def outage(
    minutes: Annotated[float, typer.Option(help="How long the broker is away.")] = 10.0,
    per_s: Annotated[float, typer.Option("--rate", help="Requests a second.")] = 20.0,
) -> Found:
    """A broker killed under a gateway and started again: what clients notice, and what becomes of their answers."""
    from infra.cli.bench.serving.outage import run

    return Found(run(minutes, per_s=per_s))


def episodes(
    episodes: Annotated[int, typer.Option(help="In flight at once.", min=1)] = 2000,
    one_client: Annotated[bool, typer.Option("--one-client", help="Of HTTP, for all of them.")] = False,
) -> Found:
    """Many episodes of an agent with OpenAI's client at once, through one explorer: whether each is recorded as its own."""
    from infra.cli.bench.serving.episodes import run

    return Found(run(episodes, one_client=one_client))


def state(
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: 13·hidden² parameters each.")] = 9,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO.")] = 3,
    silence: Annotated[float, typer.Option(help="Seconds for which two idle ranks hear nothing.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="trainer.ranks_timeout, in seconds.")] = 600.0,
) -> Found:
    """A large learner's state saved by two ranks, killed, and read by one, two and three; about 30 bytes of memory a
    parameter, 12 of disk. Minutes.
    """
    from infra.cli.bench.learner.state import StatePlan, run

    return Found(run(StatePlan(hidden=hidden, layers=layers, stage=stage, silence_s=silence, timeout_s=timeout), tell))


BENCHES: Sequence[Callable[..., Found | list[Found]]] = (
    codec, hop, transport, gateway_peers, growth, overlap, start, train, weights, takeover, audit, console_load, fan_out, card,
    families, reload, offpolicy, mix, gate, learner, life, memory, outage, episodes, state, plan,
)  # fmt: skip
