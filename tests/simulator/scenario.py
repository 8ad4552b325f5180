"""The scenario of a seed: the sizes of everything and the settings of the roles, small enough for thousands of runs."""

import functools
from random import Random

import msgspec

from actors.config import EvalSuite, ExploreConfig, GateConfig, GateSuite, MasterConfig
from actors.gateway.config import GatewayConfig
from infra.chain.chain import Step
from infra.settings.config import Floor, Pacing
from schemas import Lane
from streams.config import (
    FEEDBACK_PATH,
    CollectConfig,
    FeedbackConfig,
    From,
    ProcessorConfig,
    RewardConfig,
    ScoreConfig,
    StreamsConfig,
)
from streams.stages.chain_builder import build_collect, build_verify
from trainer.batch.assemble import step_seed
from trainer.config import LaneConfig, TrainerConfig, WarmupConfig

APP = "sim"
EVENTS = "outside.csat"
PARTITIONS = 2
DEADLINE_S = 4.0
WINDOW_S = 2.5
SESSION_S = 1.5
FAULTS_S = 10.0  # of virtual time during which things go wrong
LIVE_S = 5.0  # of it, customers come
MAX_SKIPS = 3
ANSWER_TOKENS = 4  # of a gateway's answer, at most
TOKEN_S = 0.03
SUITE = "dev"
MAX_DROP = 0.1  # of a suite's accuracy
MAX_USES: dict[Lane, int] = {"usual": 1, "live": 1, "human": 1, "expert": 2}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one seed. late: effect of feedback after its window.

    num_suite: tasks that versions are evaluated on. num_moves, num_trials: moves of the stable and canary channel, by hand; a
    trial needs a canary. num_customers: of the gateway, without which there is none. fail_at, poison_at: seeds of steps whose
    loss is not finite, and of steps that leave weights that are not finite.
    """

    seed: int
    groups_per_step: int
    max_staleness: int
    steps_per_version: int
    checkpoint_every: int
    warmup: bool
    late: str
    picky: bool
    num_explorers: int
    num_workers: int
    num_live: int
    num_tasks: int = 5
    num_experts: int = 3
    num_suite: int = 0
    num_moves: int = 0
    num_customers: int = 0
    num_trials: int = 0
    fail_at: tuple[int, ...] = ()
    poison_at: tuple[int, ...] = ()
    groups_in_flight: int = 0

    @property
    def floor(self) -> Floor:
        """Settings every role reads."""
        return Floor(
            app=APP,
            pacing=Pacing(
                groups_per_step=self.groups_per_step,
                max_staleness=self.max_staleness,
                steps_per_version=self.steps_per_version,
                straggler_s=1.0,
                reissue_s=5.0,
                groups_in_flight=self.groups_in_flight,
            ),
        )

    @property
    def master(self) -> MasterConfig:
        suite = EvalSuite(suite=SUITE, every=2, tasks=max(1, self.num_suite), score="parity")
        return MasterConfig(
            num_episodes=2,
            max_tokens=3,
            report_s=1.5,
            snapshot_s=2.0,
            first_version=1 if self.warmup else 0,
            drain="300s",
            eval_lead=1,
            evals=(suite,) if self.num_suite else (),
            # At this `alpha` a drop of both tasks is more than chance, a drop of a single task is not.
            gate=GateConfig(
                suites={SUITE: GateSuite(max_drop=MAX_DROP, alpha=0.6, window=1000)} if self.num_suite else {}
            ),
        )

    @property
    def explore(self) -> ExploreConfig:
        return ExploreConfig(report_s=1.5, linger_s=0.3, drain_s=2.0, eval_hold_s=1.0)

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            lanes={
                "usual": LaneConfig(),
                "live": LaneConfig(share=8.0, optional=True),
                "human": LaneConfig(share=8.0, optional=True),
                "expert": LaneConfig(loss="sft", share=0.5, max_uses=MAX_USES["expert"], optional=True),
            },
            warmup=WarmupConfig(every=5, max_steps=2, min_experiences=2, batch=2) if self.warmup else None,
            checkpoint_every=self.checkpoint_every,
            max_skips=MAX_SKIPS,
        )

    @property
    def streams(self) -> StreamsConfig:
        return _streams(self.late, self.picky, bool(self.num_customers))

    @property
    def gateway(self) -> GatewayConfig:
        return GatewayConfig(
            listen="127.0.0.1:0", train_on="consented", send_s=1.0, keys_reload_s=0.5, report_s=1.5, drain_s=2.0
        )


@functools.cache
def _streams(late: str, picky: bool, serves: bool) -> StreamsConfig:
    window = f"{WINDOW_S:g}s"
    feedback = [
        FeedbackConfig(
            name="csat", use="tests.simulator.plugins:csat", from_=From(topic=EVENTS), window=window, late=late
        )  # type: ignore[arg-type]
    ]
    if serves:
        rating, said = "streams.sources.received:rating", From(webhook=FEEDBACK_PATH)
        feedback.append(FeedbackConfig(name="user", use=rating, from_=said, window=window, late=late))  # type: ignore[arg-type]
    return StreamsConfig(
        feedback=tuple(feedback),
        score=(ScoreConfig(name="parity", use="tests.simulator.plugins:parity"),),
        reward=RewardConfig(blend={"parity": 1.0, "csat": 1.0}),
        processor=(ProcessorConfig(use="tests.simulator.plugins:picky"),) if picky else (),
        collect=CollectConfig(deadline_s=DEADLINE_S, session_s=SESSION_S),
    )


@functools.cache
def chains(late: str, picky: bool, serves: bool) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Steps of verify and of collect, called in the event loop: threads would bring their own time."""
    config = _streams(late, picky, serves)
    both = build_verify(config), build_collect(config)
    for step in (*both[0], *both[1]):
        step.inline = True
    return both


def draw_scenario(seed: int) -> Scenario:
    """The sizes of a seed."""
    random = Random(f"scenario/{seed}")
    scenario = Scenario(
        seed=seed, groups_per_step=random.choice((1, 2, 2)), max_staleness=random.choice((1, 1, 2)),
        steps_per_version=random.choice((1, 1, 2)), checkpoint_every=random.choice((1, 2, 3)),
        warmup=random.random() < 0.3, late=random.choice(("amend", "amend", "retrain", "drop")),
        picky=random.random() < 0.5, num_explorers=random.choice((1, 1, 2)), num_workers=random.choice((1, 1, 2)),
        num_live=random.choice((2, 4, 6)),
    )  # fmt: skip
    illness, first = random.choice(("", "", "", "failing", "poisoned")), random.randint(2, 6)
    seeds = tuple(step_seed(seed, step) for step in range(first, first + MAX_SKIPS))
    scenario = msgspec.structs.replace(
        scenario,
        num_suite=random.choice((0, 0, 2)),
        num_moves=random.choice((0, 0, 1, 3)),
        num_customers=random.choice((0, 3)),
        fail_at=seeds if illness == "failing" else (),
        poison_at=seeds[:1] if illness == "poisoned" else (),
    )
    scenario = msgspec.structs.replace(scenario, num_trials=random.choice((0, 3)) if scenario.num_customers else 0)
    return msgspec.structs.replace(scenario, groups_in_flight=random.choice((0, 0, 8)))
