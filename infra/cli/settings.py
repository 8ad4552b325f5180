"""The whole TOML file as one struct: the floor's sections and each wing's own."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from actors.config import ExploreConfig, MasterConfig, ReloadConfig
from actors.gateway.config import GatewayConfig
from infra.chain.insert import ProcessorConfig
from infra.cli.console.config import ConsoleConfig
from infra.cli.look.expected import Expect
from infra.observe.release import release
from infra.settings.config import Floor, UnknownKey, Use, decode, duration_s
from infra.settings.toml import read_toml
from schemas.errors import ConfigError
from streams.config import (
    CollectConfig,
    FeedbackConfig,
    RewardConfig,
    ScoreConfig,
    StreamsConfig,
    TasksConfig,
    VerifyConfig,
)
from trainer.config import TrainerConfig

DEFAULT_FILE = "headrace.toml"


class Settings(Floor, frozen=True):
    """Every table of the file.

    engine: what explorers and the gateway sample with.

    Example: Settings(app="support-bot")
    """

    engine: Use = Use(use="actors.engines.vllm.engine:VllmEngine")
    explore: ExploreConfig = ExploreConfig()
    reload: ReloadConfig = ReloadConfig()
    master: MasterConfig = MasterConfig()
    gateway: GatewayConfig | None = None
    feedback: tuple[FeedbackConfig, ...] = ()
    processor: tuple[ProcessorConfig, ...] = ()
    score: tuple[ScoreConfig, ...] = ()
    reward: RewardConfig = RewardConfig()
    tasks: TasksConfig = TasksConfig()
    verify: VerifyConfig = VerifyConfig()
    collect: CollectConfig = CollectConfig()
    trainer: TrainerConfig = TrainerConfig()
    expect: Expect = Expect()
    console: ConsoleConfig = ConsoleConfig()

    def gate(self) -> MasterConfig:
        """The master's part, where a word of people counts as long as feedback and the rest of a session are waited for."""
        people = self.master.gate.people
        longest_s = max((duration_s(one.window) for one in self.feedback), default=0.0)
        waited = f"{round(1000 * (longest_s + self.collect.session_s))}ms" if longest_s else "0s"
        people = msgspec.structs.replace(people, mature=people.mature or waited)
        return msgspec.structs.replace(self.master, gate=msgspec.structs.replace(self.master.gate, people=people))

    def streams(self) -> StreamsConfig:
        """The streams wing's part."""
        return StreamsConfig(
            **{field.name: getattr(self, field.name) for field in msgspec.structs.fields(StreamsConfig)}
        )


def load_settings(path: Path, sets: Iterable[str] = ()) -> Settings:
    """Read, override and check the file; raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file; expected a {DEFAULT_FILE} here, or --config FILE")
    try:
        settings = decode(read_toml(path, sets), Settings, str(path))
    except UnknownKey as error:
        raise ConfigError(f"{error} (this is release {release()}; a later one may know it)") from error
    return msgspec.structs.replace(settings, folder=path.resolve().parent)
