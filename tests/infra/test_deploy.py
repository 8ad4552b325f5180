"""The files of infra/deploy parse, name existing things, and start existing commands.

Images are not built and nothing is started here. Where `helm` and `promtool` are on PATH, they read the chart and the queries.
"""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.cli import docs
from infra.cli.commands.init import EXAMPLES
from infra.cli.settings import load_settings
from infra.observe.measures import MEASURES
from infra.roles import rights
from schemas import topics
from tests.own_sources import ROOT, sources, text_of

DEPLOY = ROOT / "infra" / "deploy"
CHART = DEPLOY / "chart"
HELM, PROMTOOL = shutil.which("helm"), shutil.which("promtool")
ROLES = {"master", "train", "process", "explore", "serve"}
NO_HELM = "helm is not on PATH: go install helm.sh/helm/v3/cmd/helm@v3.22.0"
KUBERNETES = "1.30.0"  # what a helm without one built in renders for
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "dashboards").glob("*.json"))}
QUERIES = [
    (target["expr"], panel["title"])
    for dashboard in DASHBOARDS.values()
    for panel in dashboard["panels"]
    for target in panel["targets"]
]
KNOWN = {
    *(one.shown for one in MEASURES), *(f"{one.shown}_bucket" for one in MEASURES if one.kind == "histogram"),
     "headrace_build_info", "process_resident_memory_bytes", "process_cpu_seconds_total",
    "process_open_fds",
}  # fmt: skip


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))
    return found


def takes(arguments: list[str]) -> bool:
    """True if `headrace` has the command, with these options."""
    command = docs.command_tree().commands[arguments[0]]
    options = {name for parameter in command.params for name in parameter.opts}
    return all(one in options for one in arguments[1:] if one.startswith("--"))


def test_the_containers_start_commands_that_exist_and_each_role_is_one() -> None:
    ours = {name: one for name, one in compose()["services"].items() if one["image"].startswith("headrace:")}
    assert {one["command"][0] for one in ours.values()} == ROLES | {"check"}
    assert all(takes(one["command"]) for one in ours.values())
    assert {name for name, one in ours.items() if name == one["command"][0]} == ROLES


def test_no_image_floats_each_has_a_tag_and_a_digest_that_prepare_asks_for() -> None:
    images = {one["image"] for one in compose()["services"].values()} - {"headrace:${PROCESSOR:-cpu}"}
    images |= set(re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(images) == 6
    for image in images:
        assert re.fullmatch(r"[\w/]+:[\w.-]*\d[\w.-]*@\$\{[A-Z]+_DIGEST(:\?run infra/deploy/prepare\.sh)?\}", image), (
            image
        )


def test_prepare_makes_each_variable_of_the_containers_once(tmp_path: Path) -> None:
    for name in ("prepare.sh", "compose.yml", "Dockerfile"):
        shutil.copy(DEPLOY / name, tmp_path)
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho $4 >> {tmp_path}/asked\necho sha256:{'a' * 64}\n")
    docker.chmod(0o755)
    wanted = set(re.findall(r"\$\{(\w+):\?run", (DEPLOY / "compose.yml").read_text(encoding="utf-8")))
    found = []
    for _ in range(2):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run(["sh", str(tmp_path / "prepare.sh")], env=environment, check=True, timeout=60)
        found.append((tmp_path / ".env").read_text())
    values = dict(line.split("=") for line in found[0].splitlines())
    assert found[0] == found[1] and set(values) == wanted
    assert all(len(value) == 48 for name, value in values.items() if name.endswith("_PASSWORD"))
    assert len({value for name, value in values.items() if name.endswith("_PASSWORD")}) == 9
    assert len((tmp_path / "asked").read_text().split()) == 6 and (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_no_container_has_capabilities_or_gains_privileges_and_those_of_roles_are_read_only() -> None:
    networks = compose()["networks"]
    for name, one in compose()["services"].items():
        assert one["cap_drop"] == ["ALL"] and one["security_opt"] == ["no-new-privileges:true"] and one["pids_limit"], (
            name
        )
        if name in ROLES:
            assert one["read_only"]
            assert {mount.partition(":")[0] for mount in one["tmpfs"]} == {"/tmp", "/var/lib/headrace"}
            assert [network for network in one["networks"] if not (networks[network] or {}).get("internal")] == (
                ["front"] if name == "serve" else []
            ), "no network leads outside"
    assert not set(compose()["services"]["grafana"]["networks"]) & {"data", "watch"}


def test_what_checks_hashes_is_installed_by_its_hash() -> None:
    requirements = ROOT / "infra" / "requirements"
    (name,) = re.findall(r"^(uv==\S+) \\$", (requirements / "uv.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"{name} " in (requirements / "all.lock").read_text(encoding="utf-8")
    for path in (DEPLOY / "Dockerfile", ROOT / "Makefile"):
        for line in re.findall(r"pip install .*", path.read_text(encoding="utf-8")):
            assert "--require-hashes" in line or "--no-deps" in line, f"{path.name}: {line}"


def test_every_role_can_trust_the_broker_and_only_the_broker_has_its_key() -> None:
    settings = tomllib.loads((DEPLOY / "compose" / "headrace.toml").read_text(encoding="utf-8"))["kafka"]
    assert settings["security_protocol"] == "SASL_SSL" and settings["ssl_ca_file"] == "/etc/headrace/ca.pem"
    mounted = {
        name: {one.partition(":")[0] for one in service.get("volumes", ())}
        for name, service in compose()["services"].items()
    }
    assert {name for name, sources in mounted.items() if "authority" in sources} == {*ROLES, "operator", "certificate"}
    assert {name for name, sources in mounted.items() if "tls" in sources} == {"kafka", "certificate"}


def test_each_role_is_a_user_of_its_own_at_the_broker_and_in_the_bucket_of_the_settings() -> None:
    settings = tomllib.loads((DEPLOY / "compose" / "headrace.toml").read_text(encoding="utf-8"))
    assert settings["app"] == rights.APP and settings["store"]["url"] == f"s3://{rights.BUCKET}/{rights.STORE}"
    assert set(rights.RIGHTS) == {*ROLES, "operator"}
    passwords = set()
    for role in rights.RIGHTS:
        environment = compose()["services"][role]["environment"]
        assert environment["HEADRACE_KAFKA_USERNAME"] == environment["AWS_ACCESS_KEY_ID"] == role
        assert environment["HEADRACE_KAFKA_PASSWORD"] == environment["AWS_SECRET_ACCESS_KEY"]
        passwords.add(environment["AWS_SECRET_ACCESS_KEY"])
        assert f"user {role} " in compose()["services"]["bucket"]["command"][0]
    assert len(passwords) == 6


def test_an_explorer_reads_no_key_only_the_trainer_writes_weights_and_no_engine_moves_a_channel() -> None:
    assert not {"keys/", "gateway/keys/", "gateway/secret"} & set(rights.RIGHTS["explore"].gets)
    assert rights.RIGHTS["explore"].deletes == (rights.CHECKS,)
    movers = {role for role, its in rights.RIGHTS.items() if topics.POLICIES in its.writes}
    assert movers == {"master", "train", "operator"}
    writers = {role for role, one in rights.RIGHTS.items() if {"policies/", "checkpoints/"} & {*one.puts, *one.deletes}}
    assert writers == {"train", "operator"}


def test_every_role_may_write_each_topic_that_its_code_names() -> None:
    homes = {"master": "actors/master", "serve": "actors/gateway", "explore": "actors/rollout", "train": "trainer"}
    for role, home in {**homes, "process": "streams"}.items():
        text = "".join(text_of(path) for path in sources(home))
        named = re.findall(r"\.publish(?:_all)?\((?:topics\.)?([A-Z_]+),", text)
        named += ["DEAD_LETTERS"] if ".dead_letter(" in text else []
        assert named and not {getattr(topics, name) for name in named} - {*rights.RIGHTS[role].writes}, role


def test_no_container_holds_a_password_and_only_this_machine_reaches_a_port() -> None:
    text = (DEPLOY / "compose.yml").read_text(encoding="utf-8")
    assert re.findall(r"(?:PASSWORD|SECRET_ACCESS_KEY): (?!\$\{\w+:\?)(.*)", text) == []
    assert re.findall(r'(?:password|user_\w+)="(?!\$\{\w+:\?)', text) == []
    ports = [port for one in compose()["services"].values() for port in one.get("ports", ())]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_the_settings_of_the_containers_load_and_name_the_containers(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "compose" / "headrace.toml", tmp_path)
    settings, services = load_settings(tmp_path / "headrace.toml"), compose()["services"]
    assert settings.kafka.bootstrap_servers.partition(":")[0] in services
    assert settings.gateway is not None and settings.gateway.listen.endswith(":8000")
    assert settings.metrics.listen.endswith(":9200")
    assert (
        services["train"]["environment"]["HEADRACE_S3_ENDPOINT"].removeprefix("http://").partition(":")[0] in services
    )


def test_every_metric_that_a_dashboard_shows_is_one_that_a_role_has_with_those_labels() -> None:
    labels = {one.shown: {*one.shown_labels, "instance"} for one in MEASURES}
    for query, title in QUERIES:
        names = re.findall(r"\b(?:headrace|process)_[a-z0-9_]+", query)
        assert names and set(names) <= KNOWN, title
        for by in re.findall(r"by \((\w+)\)", query):
            assert all(by in labels[name] for name in names if name in labels) or by == "role", f"{title}: {by}"


def rendered(
    tmp_path: Path, *arguments: str, release: str = "main", text: str = 'app = "main"\n'
) -> list[dict[str, Any]]:
    (tmp_path / "headrace.toml").write_text(text, encoding="utf-8")
    command = (
        str(HELM), "template", release, str(CHART), "--set-file", f"settings={tmp_path}/headrace.toml",
        "--kube-version", KUBERNETES, *arguments,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@pytest.mark.skipif(HELM is None, reason=NO_HELM)
def test_helm_renders_every_role_with_its_probes_its_budget_and_its_disk(tmp_path: Path) -> None:
    found = rendered(
        tmp_path, "--set", "roles.serve.replicas=2,autoscale.enabled=true,secret=secrets,modelClaim=models"
    )
    kinds = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(kinds) == len(found)
    for role in ROLES:
        pod = kinds["StatefulSet", f"main-{role}"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["args"] == [role] and {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        mounted = {one["name"] for one in container["volumeMounts"]}
        claims = kinds["StatefulSet", f"main-{role}"]["spec"].get("volumeClaimTemplates", ())
        given = {one["name"] for one in pod["volumes"]} | {one["metadata"]["name"] for one in claims}
        assert mounted == given, role
    assert {name for kind, name in kinds if kind == "PodDisruptionBudget"} == {
        "main-process",
        "main-serve",
        "main-explore",
    }
    assert kinds["HorizontalPodAutoscaler", "main-explore"]["spec"]["scaleTargetRef"]["name"] == "main-explore"
    assert "replicas" not in kinds["StatefulSet", "main-explore"]["spec"]
    assert kinds["ConfigMap", "main"]["data"]["headrace.toml"] == 'app = "main"\n'
    job = kinds["Job", "main-topics-1"]["spec"]["template"]["spec"]["containers"][0]
    assert takes(job["args"])


@pytest.mark.skipif(HELM is None, reason=NO_HELM)
def test_helm_has_nothing_to_say_of_the_chart_and_refuses_one_without_settings() -> None:
    lint = subprocess.run(
        [str(HELM), "lint", "--strict", str(CHART), "--set", 'settings=app="main"', "--kube-version", KUBERNETES],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert lint.returncode == 0, lint.stdout + lint.stderr
    bare = subprocess.run(
        [str(HELM), "template", "main", str(CHART), "--kube-version", KUBERNETES],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert bare.returncode != 0 and "expected the text of headrace.toml" in bare.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH: apt-get install prometheus")
def test_promtool_reads_every_query_of_a_dashboard_and_the_settings_of_prometheus(tmp_path: Path) -> None:
    rules = [{"record": f"query{at}", "expr": query} for at, (query, _) in enumerate(QUERIES)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    for command in (("rules", "queries.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            [str(PROMTOOL), "check", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


FOLDER = ROOT / "infra" / "requirements"
EXTRAS = {
    "all": ("streams", "actors", "gateway", "trainer"),
    "cuda": ("streams", "actors", "gateway", "trainer", "cuda"),
    "image": ("streams", "actors", "gateway", "trainer", "console", "environments", "mcp", "tasks"),
    "image-cuda": ("streams", "actors", "gateway", "trainer", "console", "environments", "mcp", "tasks", "cuda"),
}


def pinned(lock: str) -> dict[str, str]:
    """Versions of a lock, by name; each has hashes."""
    found = {}
    for part in re.split(r"\n(?=\S)", (FOLDER / f"{lock}.lock").read_text()):
        name, _, rest = part.partition("==")
        assert "--hash=sha256:" in rest, name
        found[canonicalize_name(name)] = rest.split()[0]
    return found


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_holds_what_the_package_and_its_extras_ask_for(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(one for extra in EXTRAS[lock] for one in extras[extra])]
    versions = pinned(lock)
    for one in map(Requirement, asked):
        if one.name != project["name"]:
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), f"{one}: make lock"


MACHINES = EXAMPLES / "machines"


def test_the_how_to_shows_the_files_as_they_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "infra/docs/howto/train-on-several-machines.md").read_text()
    shown = dict(re.findall(r"^```text (\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert shown == {name: (MACHINES / name).read_text() for name in ("torchrun.sh",)}
