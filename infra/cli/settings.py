"""The whole TOML file as one struct: the floor's sections, each wing's own, and sections of the commands."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from actors.config import ExploreConfig, MasterConfig, ReloadConfig
from actors.gateway.config import GatewayConfig
from infra.chain.insert import ProcessorConfig
from infra.observe.release import release
from infra.settings.config import Floor, NonNegative, Section, UnknownKey, Use, decode, duration_s, read_toml
from infra.settings.outside import without_secrets
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
TLS_PORT = 443
_URL = re.compile(r"https://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::([1-9][0-9]{0,4}))?/?")


class Expect(Section, frozen=True):
    """[expect]: how many of each role `headrace status` expects to run; 0 is as many as ran within the last hour and were not
    stopped in order, one at least.
    """

    explore: NonNegative = 0
    """Explorers."""
    process: NonNegative = 0
    """Stream workers."""
    serve: NonNegative = 0
    """Gateways, expected only where the file has a [gateway]."""


class ConsoleConfig(Section, frozen=True):
    """[console] of `headrace console`, which `headrace up` starts too."""

    listen: str = "127.0.0.1:8400"
    """Address (host:port) of the pages."""
    up: bool = True
    """Whether `headrace up` starts it."""
    url: str = ""
    """Address for browsers behind a proxy that ends TLS, such as https://console.example.org, without a path. Links name it,
    cookies are sent over TLS alone, and forms are accepted from pages of that address alone. By default there is none. Headers
    of a proxy, such as X-Forwarded-Proto, are ignored."""
    hosts: tuple[str, ...] = ()
    """Further names by which browsers reach it, next to `url`, `listen` and localhost, as behind a proxy without TLS; a request
    for any other name is refused."""
    beside: tuple[str, ...] = ()
    """Folders of other runs, relative to the TOML, whose curves are drawn with this run's; each needs an index, which
    `headrace console` on that run makes."""

    def __post_init__(self) -> None:
        if self.url and _URL.fullmatch(self.url) is None:
            raise ValueError(
                f'got url = "{without_secrets(self.url)}", expected one such as "https://console.example.org", without a path'
            )

    @property
    def origin(self) -> str:
        """The origin that browsers name in a form from `url`; "" without one."""
        parts = _URL.fullmatch(self.url)
        if parts is None:
            return ""
        port = int(parts[2] or TLS_PORT)
        return f"https://{parts[1].lower()}" + (f":{port}" if port != TLS_PORT else "")

    @property
    def names(self) -> tuple[str, ...]:
        """Hosts that a request may be for, besides that of `listen` and localhost."""
        parts = _URL.fullmatch(self.url)
        return self.hosts if parts is None else (parts[1].lower(), *self.hosts)

    def opened_at(self, address: str) -> str:
        """URL for browsers. address: host:port at which it listens."""
        return self.origin or f"http://{address}"


class Settings(Floor, frozen=True):
    """Every table of the file."""

    engine: Use = Use(use="actors.engines.vllm.engine:VllmEngine")
    """Engine that explorers and the gateway sample with."""
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

    @property
    def groups_awaited(self) -> int:
        """Groups that a step waits for: of the lane usual, or where there is none, single answers of the others."""
        lanes = {lane: config for lane, config in self.trainer.lanes.items() if config.weight and not config.optional}
        least = max((self.trainer.min_sequences(lane) for lane in lanes), default=0)
        return self.pacing.groups_per_step if "usual" in self.trainer.lanes else least

    def gate(self) -> MasterConfig:
        """The master's part, where a rating counts as long as feedback and the rest of a session are waited for."""
        people = self.master.gate.people
        longest_s = max((duration_s(source.window) for source in self.feedback), default=0.0)
        waited = f"{round(1000 * (longest_s + self.collect.session_s))}ms" if longest_s else "0s"
        people = msgspec.structs.replace(people, rating_window=people.rating_window or waited)
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
    return msgspec.structs.replace(typed(settings), folder=path.resolve().parent)


def usual_dtype(cpuinfo: Path = Path("/proc/cpuinfo"), card: Path = Path("/dev/nvidiactl")) -> str:
    """bfloat16 on a machine with an NVIDIA GPU or a CPU that multiplies it in hardware (AVX512-BF16, AMX), else float32."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        flags = set()
    return "bfloat16" if card.exists() or flags & {"avx512_bf16", "amx_bf16"} else "float32"


def typed(settings: Settings) -> Settings:
    """The settings with `usual_dtype` in place of each "auto" of the trainer and of engines."""
    trainer, gateway = settings.trainer, settings.gateway
    if trainer.dtype == "auto":
        trainer = msgspec.structs.replace(trainer, dtype=usual_dtype())
    if gateway is not None and gateway.engine is not None:
        gateway = msgspec.structs.replace(gateway, engine=_typed_engine(gateway.engine))
    return msgspec.structs.replace(settings, engine=_typed_engine(settings.engine), gateway=gateway, trainer=trainer)


def _typed_engine(engine: Use) -> Use:
    if engine.options.get("dtype") != "auto":
        return engine
    return msgspec.structs.replace(engine, options={**engine.options, "dtype": usual_dtype()})
