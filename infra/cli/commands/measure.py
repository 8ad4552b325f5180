"""The benchmarks: figures of this machine beside what was aimed at.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.options import JsonOption, exit_with

# Those without flags of their own: each is a module of that name in infra/cli/bench.
PLAIN = {
    "console": "The console over an index of 1,000,000 experiences: its first page, searches, memory. Minutes.",
    "delta": "The weight delta of one reinforcement step in bfloat16, against all weights.",
    "draw": "Draws by priority and even ones from a buffer of 100,000 experiences.",
    "feedback": "Feedback joined to 100,000 waiting answers, and their state rebuilt from the log.",
    "gateway": "The gateway over the engine alone: what it adds to an answer, and how many it gives a second.",
    "held": "How long one request holds the gateway's event loop: prompts, control tokens, redaction.",
    "lora": "What a version of a LoRA run weighs beside full weights, of a Qwen3 of 103 M parameters.",
    "reprocess": "Verify and collect over 20,000 recorded experiences again, with and without comparing.",
    "sandbox": "What it costs to confine untrusted code, over 1,000 runs; and that none of them leaves a process.",
    "days": "What roles read at their start after one day and after thirty: records and CPU. A minute.",
    "starts": "What roles read at their start, over logs of up to 1,000,000 reports and groups. Minutes.",
    "stream": "Events that the gateway streams a second to 240 clients, and how long a stream stands still.",
    "turn": "How long a turn of a conversation of 38,000 tokens holds the event loop of an explorer and of the gateway.",
    "trace": "Questions to a log of 1,000,000 experiences: the first, which builds the index, and those after it. Minutes.",
}


def plain(name: str) -> Callable[[bool], None]:
    """The command of a benchmark of PLAIN."""

    def bench(as_json: JsonOption = False) -> None:
        from infra.cli.benches import run_bench

        exit_with(lambda: run_bench(name, as_json))

    bench.__doc__ = PLAIN[name]
    return bench


RepeatOption = Annotated[int, typer.Option(min=1, help="Rounds timed of each.")]


def bench_codec(repeat: RepeatOption = 7, as_json: JsonOption = False) -> None:
    """The experience block beside msgspec of packed bytes and of lists, pickle, orjson and protobuf."""
    from infra.cli.benches_beside import run_codec

    exit_with(lambda: run_codec(repeat, as_json))


def bench_hop(
    repeat: RepeatOption = 5,
    groups: Annotated[int, typer.Option(min=1, help="Of 16 answers, in each round.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Verify and collect on a real broker beside a plain aiokafka loop and stock Faust, by processor time. Minutes."""
    from infra.cli.benches_beside import run_hop

    exit_with(lambda: run_hop(repeat, groups, as_json))


def bench_transport(
    repeat: RepeatOption = 5,
    answers: Annotated[int, typer.Option(min=1, help="Of 500 tokens, in each round.")] = 1024,
    as_json: JsonOption = False,
) -> None:
    """From an engine's lists to the trainer's arrays beside Redis streams and Ray's Queue: processor time of an answer.

    The peers come from an environment of their own, which `make bench-deps` makes, and redis-server from the machine; those
    that are missing are named and left out. Minutes.
    """
    from infra.cli.benches_beside import run_transport

    exit_with(lambda: run_transport(repeat, answers, as_json))


def bench_all(
    only: Annotated[
        str, typer.Option(help="Benchmarks, by commas; all that have a peer or a target where left out.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Every stage beside its peers, one benchmark after the other, and one table at the end. Half an hour on two cores."""
    from infra.cli.benches_beside import run_all

    exit_with(lambda: run_all(only, as_json))


def bench_weights(
    gb: Annotated[
        float, typer.Option(help="Weights in bfloat16, in 10⁹ bytes; about nine times as much memory.")
    ] = 0.5,
    share: Annotated[float, typer.Option(help="Of the values that a version moves.", min=0, max=1)] = 0.014,
    sizes: Annotated[
        str,
        typer.Option("--sweep", help="GB by commas, as in 0.1,0.5,2: one version at each size, and a picture of them."),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for weights.json and weights.png of a sweep.")] = Path("bench"),
    as_json: JsonOption = False,
) -> None:
    """The way of weights over 50 versions, from the trainer's copy to the file for an engine's workers, beside safetensors and
    xor. Minutes.
    """
    from infra.cli.benches import run_weights

    exit_with(lambda: run_weights(gb, share, sizes, out, as_json))


def bench_fan_out(
    mb: Annotated[
        float, typer.Option(min=1, help="Weights in bfloat16, in 10⁶ bytes; three times as much a follower.")
    ] = 32,
    mb_per_s: Annotated[float, typer.Option(min=0.1, help="Of one connection, in 10⁶ bytes.")] = 2,
    hosts: Annotated[int, typer.Option(min=1, help="Each with a cache of its own.")] = 8,
    followers: Annotated[int, typer.Option(min=1, help="Processes of each host.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Many followers of one version, from a MinIO server behind slow connections: bytes from the store, and speed. Minutes."""
    from infra.cli.bench.fan_out import FanOutPlan
    from infra.cli.benches import run_fan_out

    plan = FanOutPlan(mb=mb, mb_per_s=mb_per_s, hosts=hosts, followers=followers)
    exit_with(lambda: run_fan_out(plan, as_json))


def bench_takeover(
    waiting: Annotated[int, typer.Option(help="Answers that wait for feedback.", min=1)] = 100_000,
    closed: Annotated[int, typer.Option(help="Answers that were joined and closed before.", min=0)] = 100_000,
    rebuild: Annotated[bool, typer.Option(help="Also from the log alone.")] = True,
    as_json: JsonOption = False,
) -> None:
    """A worker takes a partition of waiting answers over: from the state in the store, and from the log alone."""
    from infra.cli.benches import run_takeover

    exit_with(lambda: run_takeover(waiting, closed, rebuild, as_json))


def bench_audit(
    experiences: Annotated[int, typer.Option(help="In the log, which is made as it is read.", min=1)] = 1_000_000,
    as_json: JsonOption = False,
) -> None:
    """Audit, and trace with its index built from nothing: the memory and the processor time of each. Minutes."""
    from infra.cli.benches import run_bench

    exit_with(lambda: run_bench("audit", as_json, experiences=experiences))


def bench_families(
    only: Annotated[str, typer.Option(help="Families, by commas; all where left out.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Tiny models of every family through learner, publication and engine: how each is read, or why it is refused."""
    from infra.cli.benches import run_families

    exit_with(lambda: run_families(only, as_json))


def bench_reload(
    versions: Annotated[int, typer.Option(help="How many are loaded.", min=2)] = 300,
    lora_rank: Annotated[int, typer.Option(help="Of versions that are adapters; 0 for whole models.", min=0)] = 0,
    kv: Annotated[str, typer.Option(help="Modes of reload.kv, by commas.")] = "rebuild,keep",
    as_json: JsonOption = False,
) -> None:
    """Hot reloads under load beside a trainer, in both modes of reload.kv: pause, memory per version, and how far logprobs
    after a reload are from exact ones. Minutes.
    """
    from infra.cli.benches import run_reload

    exit_with(lambda: run_reload(versions, lora_rank, kv, as_json))


def bench_offpolicy(
    out: Annotated[Path, typer.Option(help="Folder for offpolicy.json and offpolicy.png.")] = Path("bench"),
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 120,
    seeds: Annotated[int, typer.Option(help="Runs of each loss and lag.")] = 3,
    lags: Annotated[str, typer.Option(help="Versions between sampling and training, by commas.")] = "0,2,4,8,16",
    losses: Annotated[str, typer.Option(help="Losses, by commas.")] = "dppo,decoupled,grpo,reinforce",
    as_json: JsonOption = False,
) -> None:
    """How much each objective loses on samples that are versions old, off the log. Runs in the folder are not run again."""
    from infra.cli.benches import run_offpolicy

    exit_with(lambda: run_offpolicy(out, steps, seeds, lags, losses, as_json))


def bench_mix(
    out: Annotated[Path, typer.Option(help="Folder for mix.json and mix.png.")] = Path("bench"),
    seeds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 500,
    as_json: JsonOption = False,
) -> None:
    """200 demonstrations alone, rewards alone, and both in one loss, off the log. Runs in the folder are not run again."""
    from infra.cli.benches import run_mix

    exit_with(lambda: run_mix(out, seeds, steps, as_json))


def bench_gate(
    paths: Annotated[int, typer.Option(min=1, help="Deployments simulated a row.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """How often the gate, its trials and its guard are wrong, in worlds of all kinds, and how often they find harm. Minutes."""
    from infra.cli.benches import run_gate

    exit_with(lambda: run_gate(paths, as_json))


def bench_learner(
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
    as_json: JsonOption = False,
) -> None:
    """The learner's step beside a plain padded one on transformers: tokens a second, MFU, memory. Minutes on a CPU.

    On a GPU say --hidden 2048 --layers 16, or --model with a folder.
    """
    from infra.cli.bench.learner import LearnerPlan
    from infra.cli.benches import run_learner

    plan = LearnerPlan(
        model=model,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
        max_tokens=max_tokens,
        checkpointing=checkpointing,
        peak=peak,
        repeat=repeat,
    )
    exit_with(lambda: run_learner(plan, as_json))


def bench_life(
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: 13·hidden² parameters each.")] = 9,
    stage: Annotated[int, typer.Option(min=1, max=3, help="Of ZeRO.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    engine: Annotated[str, typer.Option(help="What loads the last version: torch or vllm.")] = "torch",
    as_json: JsonOption = False,
) -> None:
    """Ten steps of `headrace train` on two CPU ranks, killed after a checkpoint and started again; then an engine loads the
    last version. Minutes.
    """
    from infra.cli.benches import run_life

    exit_with(lambda: run_life(hidden, layers, stage, dtype, engine, as_json=as_json))


def bench_memory(
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: 13·hidden² parameters each.")] = 7,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again in the backward.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="CPU ranks of DeepSpeed; 1: the learner of one process.")] = 1,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO, of several ranks.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """What a learner holds, beside what `headrace check --size` says that it needs."""
    from infra.cli.bench.memory_held import MemoryPlan
    from infra.cli.benches import run_memory

    plan = MemoryPlan(hidden=hidden, layers=layers, dtype=dtype, checkpointing=checkpointing, ranks=ranks, stage=stage)
    exit_with(lambda: run_memory(plan, as_json))


def bench_state(
    hidden: Annotated[int, typer.Option(min=128, help="Width of the random Qwen3.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: 13·hidden² parameters each.")] = 9,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO.")] = 3,
    silence: Annotated[float, typer.Option(help="Seconds for which two idle ranks hear nothing.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="trainer.ranks_timeout, in seconds.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """A large learner's state saved by two ranks, killed, and read by one, two and three; about 30 bytes of memory a
    parameter, 12 of disk. Minutes.
    """
    from infra.cli.benches import run_state

    exit_with(lambda: run_state(hidden, layers, stage, silence, timeout, as_json=as_json))


def bench_outage(
    minutes: Annotated[float, typer.Option(help="How long the broker is away.")] = 10.0,
    per_s: Annotated[float, typer.Option("--rate", help="Requests a second.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """A broker killed under a gateway and started again: what clients notice, and what becomes of their answers."""
    from infra.cli.benches import run_outage

    exit_with(lambda: run_outage(minutes, per_s, as_json))


def bench_console_load(
    pairs: Annotated[int, typer.Option(min=2, help="Pieces of the run with people and without.")] = 6,
    seconds: Annotated[float, typer.Option(min=20, help="Of each piece.")] = 60.0,
    people: Annotated[int, typer.Option(min=1, help="Who look at once.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """The demo's steps a second while people look at its console and while nobody does, in pairs. A quarter of an hour."""
    from infra.cli.benches import run_console_load

    exit_with(lambda: run_console_load(pairs, seconds, people, as_json))


def bench_episodes(
    episodes: Annotated[int, typer.Option(help="In flight at once.", min=1)] = 2000,
    one_client: Annotated[bool, typer.Option("--one-client", help="Of HTTP, for all of them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Many episodes of an agent with OpenAI's client at once, through one explorer: whether each is recorded as its own."""
    from infra.cli.benches import run_bench

    exit_with(lambda: run_bench("episodes", as_json, episodes=episodes, one_client=one_client))
