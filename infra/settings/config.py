"""Decodes a TOML file into frozen structs, and defines the sections that every role needs.

Guarantees: the error for an unknown key has its path and the nearest known name; the error for a wrong type has its path, the
value and the expected type; both name the file. Every setting has its default here or in the `config.py` of its folder.
"""

import difflib
import os
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from schemas.errors import ConfigError

Decoded = TypeVar("Decoded")
Table = dict[str, Any]
# Variables that headrace and transformers set for a chat template.
_OF_TEMPLATES = (
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict tokenizer_kwargs return_assistant_tokens_mask"
)
OF_TEMPLATES = frozenset(_OF_TEMPLATES.split())

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h|d|w)$")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

Duration = Annotated[
    str, msgspec.Meta(pattern=_DURATION.pattern, description='a duration such as "30d", "2h", "90s" or "500ms"')
]
OpenDuration = Annotated[
    str,
    msgspec.Meta(pattern=rf"^$|{_DURATION.pattern}", description='a duration such as "30d", or "" to leave it open'),
]
Name = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$", description="a name of letters, digits, - and _")
]
UsePath = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description='"module:name" of something importable')
]
OpenUsePath = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description='"module:name" of something importable, or "" for none',
    ),
]
Positive = Annotated[int, msgspec.Meta(ge=1, description="a whole number of 1 or more")]
NonNegative = Annotated[int, msgspec.Meta(ge=0, description="a whole number of 0 or more")]
Seconds = Annotated[float, msgspec.Meta(gt=0, description="seconds, above 0")]
Gigabytes = Annotated[float, msgspec.Meta(ge=0, description="10⁹ bytes, 0 or more")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the TOML: immutable (repeat `frozen=True` for mypy), and unknown keys are errors."""


class Use(Section, frozen=True):
    """A plugin and its options.

    use: Plugin, as `module:name`. options: Options of the plugin: keyword-only parameters of a function, or fields of a struct.

    Example: Use(use="actors.engines.torch:TorchEngine", options={"dtype": "float32"})
    """

    use: UsePath
    options: Table = {}


class Kafka(Section, frozen=True):
    """[kafka]: connection to the log. Keys from security_protocol on have Kafka's names. Files are PEM, relative to the TOML.

    Example: Kafka(bootstrap_servers="kafka-1:9093", security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-512",
                   sasl_username="headrace", partitions=12)
    """

    bootstrap_servers: str = ""
    """Addresses of the brokers, `host:port`, separated by commas. Default "": `headrace up` starts an embedded broker."""
    partitions: Positive = 4
    """Number of partitions of each partitioned topic, fixed once the topics exist."""
    replication: NonNegative = 0
    """Replication factor of newly created topics. Default 0: the brokers' `default.replication.factor`. From 2 on,
    `min.insync.replicas` is one less, so with 3 you may lose any single broker."""
    deadline_s: Seconds = 60.0
    """Seconds for which a role retries an unreachable broker before it exits."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Protocol of connections to the brokers."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    """SASL mechanism."""
    sasl_username: str = ""
    """SASL user name. A role's environment variable HEADRACE_KAFKA_USERNAME overrides it."""
    sasl_password_env: str = "HEADRACE_KAFKA_PASSWORD"
    """Environment variable with the SASL password. The TOML itself never holds a password."""
    sasl_password_file: str = ""
    """File with the SASL password, in place of the variable. Default "": the variable."""
    ssl_ca_file: str = ""
    """CA certificates that signed the brokers' certificates. Default "": the system's CA certificates."""
    ssl_cert_file: str = ""
    """Client certificate, for brokers that require it. Default "": none."""
    ssl_key_file: str = ""
    """Private key of the client certificate. Default "": the key is in `ssl_cert_file`."""

    @property
    def is_sasl(self) -> bool:
        """True if clients authenticate with SASL."""
        return self.security_protocol.startswith("SASL")

    def __post_init__(self) -> None:
        if self.replication > 1 and not self.bootstrap_servers:
            raise ValueError(
                f"got replication = {self.replication} without bootstrap_servers: the embedded broker is a single node"
            )
        if self.security_protocol != "PLAINTEXT" and not self.bootstrap_servers:
            raise ValueError(
                "got security_protocol without bootstrap_servers: the embedded broker sets its own password"
            )
        if self.is_sasl != bool(self.sasl_username):
            raise ValueError(
                f'got sasl_username = "{self.sasl_username}" with security_protocol = "{self.security_protocol}", '
                "expected a name with SASL_PLAINTEXT and SASL_SSL, and none otherwise"
            )
        if not self.security_protocol.endswith("SSL") and (self.ssl_ca_file or self.ssl_cert_file):
            raise ValueError(f'got ssl_* with security_protocol = "{self.security_protocol}", expected SSL or SASL_SSL')


class StoreConfig(Section, frozen=True):
    """[store]: object store of weights, checkpoints, keys and large records.

    Example: StoreConfig(url="s3://ml/support-bot", keys="s3://ml-secrets/support-bot")
    """

    url: str = "store"
    """Folder (relative to the TOML) or `s3://bucket/prefix`. S3 credentials come from the environment."""
    keys: str = ""
    """Place of encryption and API keys (objects below `keys/` and `gateway/`), as in `url`. Default "": `url`. With a separate
    place you can share weights and checkpoints with people who must not read users' texts. Gateways, stream workers, `forget`
    and `keys` need to write there; trainer, explorers, `trace` and `replay` need to read. Switch off object versioning in both
    places. To move the keys, stop the app and copy both folders."""
    use: OpenUsePath = ""
    """Your own store in place of `url`, as `module:name`. Default "": none."""
    options: Table = {}
    """Options of `use`."""

    @property
    def shown(self) -> str:
        """Place of objects, as `headrace check` shows it."""
        return self.use or self.url


class Keep(Section, frozen=True):
    """[keep]: retention of topics, versions and checkpoints.

    Example: Keep(replay="30d", store_gb=5, free_share=0.1)
    """

    replay: Duration = "30d"
    """Time that replay and audit reach back. It sets the retention of objects in the store, and of topics at their creation:
    after a change, set retention.ms of existing topics with Kafka's kafka-configs.sh. Reports stay for a day."""
    store_gb: Gigabytes = 5.0
    """Maximum gigabytes of the run's versions and checkpoints if the store is a folder. 0 for no limit. Above it, the trainer
    also deletes versions and checkpoints within `replay`. The newest `trainer.keep_checkpoints` checkpoints, the newest
    `pacing.max_staleness` + 1 versions, the stable version and the version on trial stay, even if they take more."""
    free_share: Annotated[float, msgspec.Meta(ge=0, lt=1, description="a share from 0 to below 1")] = 0.1
    """Minimum free share of the disk if the store is a folder. Below it the trainer publishes and saves nothing, and raises an
    alarm."""


class MetricsConfig(Section, frozen=True):
    """[metrics]: metrics endpoint of every role.

    Example: MetricsConfig(listen="0.0.0.0:9200")
    """

    listen: str = "127.0.0.1:0"
    """Address, as `host:port`, of a role's /metrics and /healthz. Port 0 is any free port. The endpoint has no authentication:
    choose an address that only the scraper reaches. Under `headrace up` the roles take consecutive ports from this port on
    (`METRICS_ORDER` in infra/cli/run/up.py). The environment variable HEADRACE_METRICS_LISTEN overrides it."""

    def __post_init__(self) -> None:
        split_address(self.listen, "metrics.listen")


class LogsConfig(Section, frozen=True):
    """[logs]: log output of every role.

    Example: LogsConfig(format="json")
    """

    format: Literal["text", "json"] = "text"
    """Format of log lines on stderr. "text": for people. "json": an object per line, for machines."""


def split_address(listen: str, name: str = "listen") -> tuple[str, int]:
    """Split `host:port`; raises ValueError. name: name of the setting, for the error.

    >>> split_address("0.0.0.0:8000")
    ('0.0.0.0', 8000)
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f'got {name} = "{listen}", expected host:port, such as "127.0.0.1:8000"')
    return host.strip("[]"), int(port)


class PolicyConfig(Section, frozen=True):
    """[policy]: model to train and serve.

    Example: PolicyConfig(model="Qwen/Qwen3-0.6B", template={"enable_thinking": False})
    """

    model: str = ""
    """Model: a folder (relative to the TOML) or a Hugging Face name."""
    name: Name = "main"
    """Name of the policy in topics and store."""
    template: Table = {}
    """Additional variables of the model's chat template, by the template's names."""
    tool_parser: str = ""
    """Parser of the model's tool calls in answers to clients and programs; the record keeps the sampled text. Default "":
    chosen by the chat template, as `headrace check` shows. "hermes": headrace's own. "none": no parser. Other names are vLLM's
    (`--tool-call-parser`) and need vLLM with any engine."""
    reasoning_parser: str = ""
    """Parser of the model's reasoning. Default "": chosen by the chat template. "think": headrace's own. "none": no parser.
    Other names are vLLM's (`--reasoning-parser`) and need vLLM with any engine."""

    def __post_init__(self) -> None:
        if taken := sorted(OF_TEMPLATES & self.template.keys()):
            raise ValueError(f"template.{taken[0]}: got a value, expected names that headrace does not set by itself")

    @property
    def parsers(self) -> tuple[str, str]:
        """Parsers of tool calls and of reasoning."""
        return self.tool_parser, self.reasoning_parser


class Pacing(Section, frozen=True):
    """[pacing]: bound on how far sampling runs ahead of learning, for the master and the trainer.

    Example: Pacing(groups_per_step=32, max_staleness=2)
    """

    groups_per_step: Positive = 32
    """Fresh rollout groups per optimizer step, G."""
    max_staleness: NonNegative = 2
    """Maximum age of a trained rollout token in versions, η. Older tokens are context only."""
    steps_per_version: Positive = 1
    """Optimizer steps per version, k."""
    straggler_s: Seconds = 30.0
    """Seconds that the trainer waits for a group whose first tokens are about to exceed `max_staleness`."""
    reissue_s: Seconds = 300.0
    """Seconds after which the master issues a group again that no explorer reports. A group that runs is not issued again."""
    groups_in_flight: NonNegative = 0
    """Maximum groups that are issued and not yet trained. Default 0: (η·k + 1)·G, with which no rollout token gets too old
    while its group waits."""

    def __post_init__(self) -> None:
        if 0 < self.groups_in_flight < self.groups_per_step:
            raise ValueError(
                f"got groups_in_flight = {self.groups_in_flight}, expected groups_per_step = {self.groups_per_step} or more:"
                " no step would ever be full"
            )


class Floor(Section, frozen=True):
    """Settings of every role.

    folder: folder of the TOML; never a key of the file.
    """

    app: Name
    """Name of the app, the prefix of all its topics."""
    run: str = ""
    """Name of the lineage of policies that this app trains. Default "": `app`."""
    plugins: tuple[str, ...] = ()
    """Folders with your own code, relative to the TOML; headrace appends them to sys.path."""
    kafka: Kafka = Kafka()
    store: StoreConfig = StoreConfig()
    keep: Keep = Keep()
    policy: PolicyConfig = PolicyConfig()
    pacing: Pacing = Pacing()
    metrics: MetricsConfig = MetricsConfig()
    logs: LogsConfig = LogsConfig()
    folder: Path = Path()

    @property
    def model_path(self) -> str:
        """The configured model: a folder relative to the TOML if it exists, else a Hugging Face name, "" for none.

        Raises ConfigError if the name exists as a folder of the working directory only.
        """
        model = self.policy.model
        folder = self.folder / model
        if model and folder.is_dir():
            return str(folder)
        if model and not Path(model).is_absolute() and Path(model).is_dir():
            raise ConfigError(
                f'policy.model: got "{model}", which is not relative to the settings ({folder}) but in the working directory; '
                f"expected a folder relative to the settings: {os.path.relpath(model, self.folder)}"
            )
        return model


def duration_s(text: str) -> float:
    """Seconds of a duration; raises ConfigError.

    >>> duration_s("24h")
    86400.0
    """
    match = _DURATION.match(text)
    if match is None:
        raise ConfigError(f'got "{text}", expected a duration such as "30d", "2h", "90s" or "500ms"')
    return float(match[1]) * _UNIT_S[match[2]]


def decode(table: object, type: type[Decoded], where: str) -> Decoded:
    """`table` as `type`; `where` starts every message (the file, or the option being read). Raises ConfigError."""
    decoded: Decoded = _checked(table, type, "", where)
    return decoded


def _checked(value: object, expected: Any, path: str, where: str) -> Any:
    """Walk value and type together, so that a failure names the exact key (msgspec says `[...]` for keys of dicts)."""
    base = _chosen(value, expected)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        if not isinstance(value, Mapping):
            raise ConfigError(mismatch(value, "a table", path, where))
        _check_keys(value, base, path, where)
    elif get_origin(base) is dict and isinstance(value, Mapping):
        for key, item in value.items():
            _checked(item, get_args(base)[1], join(path, key), where)
    elif get_origin(base) in (tuple, list) and isinstance(value, list):
        for index, item in enumerate(value):
            _checked(item, get_args(base)[0], f"{path}[{index}]", where)
    try:
        return msgspec.convert(value, expected, dec_hook=_convert_path)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ValueError):  # raised by a struct's own __post_init__
            raise ConfigError(f"{where}: {path + ': ' if path else ''}{cause}") from error
        raise ConfigError(mismatch(value, words_of(expected), path, where)) from error


def _check_keys(value: Mapping[str, object], struct: type[msgspec.Struct], path: str, where: str) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct) if field.type is not Path}
    for key, item in value.items():
        if key not in fields:
            hint = nearest(key, fields) or f", expected one of {', '.join(fields)}"
            raise ConfigError(f"{where}: {join(path, key)}: unknown key{hint}")
        _checked(item, fields[key].type, join(path, key), where)
    for key, field in fields.items():
        if field.required and key not in value:
            raise ConfigError(f"{where}: {join(path, key)}: missing, expected {words_of(field.type)}")


def _convert_path(expected: type, value: object) -> object:
    if expected is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"got {value!r}, expected {expected.__name__}")


def _chosen(value: object, expected: Any) -> Any:
    """The member of a union that `value` is meant to be; Annotated is taken off."""
    if get_origin(expected) is Annotated:
        expected = get_args(expected)[0]
    if get_origin(expected) not in (Union, types.UnionType):
        return expected
    for option in get_args(expected):
        base = _chosen(value, option)
        is_table = get_origin(base) is dict or (isinstance(base, type) and issubclass(base, msgspec.Struct))
        is_list = get_origin(base) in (tuple, list)
        if (isinstance(value, Mapping) and is_table) or (isinstance(value, list) and is_list):
            return base
    return object


def words_of(expected: Any) -> str:
    """A type as a person says it."""
    if get_origin(expected) is Annotated:
        for note in get_args(expected)[1:]:
            if isinstance(note, msgspec.Meta) and note.description:
                return note.description
        return words_of(get_args(expected)[0])
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(words_of(option) for option in get_args(expected) if option is not type(None))
    if origin is not None and getattr(origin, "__name__", "") == "Literal":
        return "one of " + ", ".join(f'"{option}"' for option in get_args(expected))
    if origin in (tuple, list):
        return f"a list of {words_of(get_args(expected)[0])}"
    if origin is dict or (isinstance(expected, type) and issubclass(expected, msgspec.Struct)):
        return "a table"
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(expected, getattr(expected, "__name__", str(expected)))


def mismatch(value: object, expected: str, path: str, where: str) -> str:
    """Message with the value and its expected kind, at a place of a file. expected: in words."""
    kinds = {str: "string", int: "whole number", float: "number", bool: "boolean", list: "list", dict: "table"}
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    kind = kinds.get(type(value), type(value).__name__)
    return f"{where}: {path + ': ' if path else ''}got {shown} ({kind}), expected {expected}"


def join(path: str, key: str) -> str:
    """The name of a setting below another; "" is the top."""
    return f"{path}.{key}" if path else key


def read_toml(path: Path, sets: Iterable[str] = ()) -> Table:
    """The file's tables with every `--set a.b=c` applied on top; raises ConfigError naming the file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; expected a TOML file") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for setting in sets:
        apply_set(table, setting)
    if "folder" in table:
        raise ConfigError(f"{path}: folder: unknown key; the folder is where the file lies")
    return table


def apply_set(table: Table, setting: str, flag: str = "--set") -> None:
    """Put the value of `a.b=c` into `table`: TOML syntax, else a bare string; a number steps into a list."""
    key, equals, value_text = setting.partition("=")
    where = f"{flag} {setting}"
    if not equals:
        raise ConfigError(f"{where}: got no '=', expected a.b=value")
    try:
        value: Any = tomllib.loads(f"value = {value_text}")["value"]
    except tomllib.TOMLDecodeError:
        value = value_text.strip()
    try:
        names, below = [], tomllib.loads(f"{key} = 0")
        while isinstance(below, dict):
            ((name, below),) = below.items()
            names.append(name)
    except ValueError as error:
        raise ConfigError(f"{where}: got the key {key!r}, expected names joined by dots") from error
    node: Any = table
    for depth, name in enumerate(names):
        above, place = ".".join(names[:depth]), name
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise ConfigError(f"{where}: got {name!r}, expected an index below {len(node)} of {above}")
            place = int(name)
        elif not isinstance(node, dict):
            raise ConfigError(f"{where}: {above} is a value, expected a table")
        if depth == len(names) - 1:
            node[place] = value
        else:
            node = node.setdefault(name, {}) if isinstance(node, dict) else node[place]


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, "" for none."""
    near = difflib.get_close_matches(name, [known for known in names if not known.startswith("__")], n=1, cutoff=0.5)
    return f', did you mean "{near[0]}"?' if near else ""
