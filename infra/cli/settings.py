"""The whole TOML file as a struct: sections of infra, of each role's folder, and of the commands."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from actors.config import ExploreConfig, MasterConfig, ReloadConfig
from actors.gateway.config import GatewayConfig
from infra.chain.insert import ProcessorConfig
from infra.settings.config import Floor, NonNegative, Section, Use, decode, duration_s, read_toml
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
    """[expect]: number of processes that `headrace status` expects of each role. Default 0: at least one."""

    explore: NonNegative = 0
    """Expected explorers."""
    process: NonNegative = 0
    """Expected stream workers."""
    serve: NonNegative = 0
    """Expected gateways, if the file has a [gateway] table."""


class ConsoleConfig(Section, frozen=True):
    """[console]: web console, started by `headrace console` and `headrace up`."""

    listen: str = "127.0.0.1:8400"
    """Address of the console, host:port."""
    up: bool = True
    """Whether `headrace up` starts the console."""
    url: str = ""
    """Public address behind a proxy that ends TLS, such as https://console.example.org, without a path. Links use it, cookies
    require TLS, and the console accepts forms only from its pages. Default "": none. The console ignores proxy headers such as
    X-Forwarded-Proto."""
    hosts: tuple[str, ...] = ()
    """Host names of the console in addition to those of `url`, `listen` and localhost, for a proxy without TLS. The console
    refuses requests for other names."""

    def __post_init__(self) -> None:
        if self.url and _URL.fullmatch(self.url) is None:
            raise ValueError(
                f'got url = "{without_secrets(self.url)}", expected a URL such as "https://console.example.org", without a path'
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
        """Hosts that a request may name, in addition to that of `listen` and localhost."""
        parts = _URL.fullmatch(self.url)
        return self.hosts if parts is None else (parts[1].lower(), *self.hosts)

    def opened_at(self, address: str) -> str:
        """URL for browsers. address: host:port at which it listens."""
        return self.origin or f"http://{address}"


class Settings(Floor, frozen=True):
    """All tables of the file."""

    engine: Use = Use(use="actors.engines.vllm.engine:VllmEngine")
    """Engine of explorers and gateways."""
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
        """Groups that a step waits for: groups of the lane usual, or without that lane, single answers of the others."""
        lanes = {lane: config for lane, config in self.trainer.lanes.items() if config.weight and not config.optional}
        least = max((self.trainer.min_sequences(lane) for lane in lanes), default=0)
        return self.pacing.groups_per_step if "usual" in self.trainer.lanes else least

    def gate(self) -> MasterConfig:
        """The master's settings, with the default of `rating_window` filled in from the feedback windows and `session_s`."""
        people = self.master.gate.people
        longest_s = max((duration_s(source.window) for source in self.feedback), default=0.0)
        waited = f"{round(1000 * (longest_s + self.collect.session_s))}ms" if longest_s else "0s"
        people = msgspec.structs.replace(people, rating_window=people.rating_window or waited)
        return msgspec.structs.replace(self.master, gate=msgspec.structs.replace(self.master.gate, people=people))

    def streams(self) -> StreamsConfig:
        """The settings of the stream workers."""
        return StreamsConfig(
            **{field.name: getattr(self, field.name) for field in msgspec.structs.fields(StreamsConfig)}
        )


def load_settings(path: Path, sets: Iterable[str] = ()) -> Settings:
    """Read, override and check the file; raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file; expected a {DEFAULT_FILE} here, or --config FILE")
    settings = decode(read_toml(path, sets), Settings, str(path))
    return msgspec.structs.replace(typed(settings), folder=path.resolve().parent)


def usual_dtype(cpuinfo: Path = Path("/proc/cpuinfo"), card: Path = Path("/dev/nvidiactl")) -> str:
    """bfloat16 with an NVIDIA GPU, AMX or AMD's AVX512-BF16 (Intel's is no faster than float32), else float32."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        flags = set()
    fast = card.exists() or "amx_bf16" in flags or {"avx512_bf16", "AuthenticAMD"} <= flags
    return "bfloat16" if fast else "float32"


def typed(settings: Settings) -> Settings:
    """The settings with `usual_dtype` in place of each "auto" of the trainer and of engines."""

    def with_dtype(use: Use) -> Use:
        is_auto = use.options.get("dtype") == "auto"
        return msgspec.structs.replace(use, options={**use.options, "dtype": usual_dtype()}) if is_auto else use

    trainer, gateway = settings.trainer, settings.gateway
    if trainer.dtype == "auto":
        trainer = msgspec.structs.replace(trainer, dtype=usual_dtype())
    if gateway is not None and gateway.engine is not None:
        gateway = msgspec.structs.replace(gateway, engine=with_dtype(gateway.engine))
    return msgspec.structs.replace(settings, engine=with_dtype(settings.engine), gateway=gateway, trainer=trainer)
