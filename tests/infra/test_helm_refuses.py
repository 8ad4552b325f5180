"""Two charts of one app in one namespace: Helm itself refuses the second, by what an API server tells it is there."""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.test_deploy import CHART, KUBERNETES, NO_HELM

HELM = shutil.which("helm")
GROUPS = {
    "v1": {"ConfigMap": "configmaps", "Service": "services", "ServiceAccount": "serviceaccounts", "Secret": "secrets"},
    "apps/v1": {"StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}

pytestmark = pytest.mark.skipif(HELM is None, reason=NO_HELM)


def found(path: str, there: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What an API server answers: its version, the kinds that it has, and these objects by their paths."""
    named = [one for one in GROUPS if "/" in one]
    if path == "/version":
        major, minor, _ = KUBERNETES.split(".")
        return 200, {"major": major, "minor": minor, "gitVersion": f"v{KUBERNETES}"}
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [
            {"name": one.partition("/")[0], "versions": [version], "preferredVersion": version}
            for one in named
            for version in [{"groupVersion": one, "version": one.partition("/")[2]}]
        ]
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
    if group in GROUPS:
        kinds = [
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list", "create"]}
            for kind, plural in GROUPS[group].items()
        ]
        return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": kinds}
    if path in there:
        return 200, there[path]
    if path.endswith("/secrets"):
        return 200, {"kind": "SecretList", "apiVersion": "v1", "items": []}
    return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


@contextmanager
def api_server(there: dict[str, Any]) -> Iterator[str]:
    """One that holds these objects and takes no others."""

    class ClusterHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = found(self.path.partition("?")[0], there)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), ClusterHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def helm(folder: Path, *arguments: str, app: str = "bot") -> "subprocess.CompletedProcess[str]":
    (folder / "headrace.toml").write_text(f'app = "{app}"\n', encoding="utf-8")
    command = [str(HELM), *arguments, "--set-file", f"settings={folder / 'headrace.toml'}", "--namespace", "team"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_helm_refuses_a_second_release_of_an_app_in_a_namespace_and_takes_one_of_another_app(tmp_path: Path) -> None:
    rendered = helm(tmp_path, "template", "blue", str(CHART), "--kube-version", KUBERNETES)
    objects = [one for one in yaml.safe_load_all(rendered.stdout) if one]
    (one,) = (one for one in objects if one["metadata"]["name"].startswith("headrace-app-"))
    one["metadata"]["namespace"] = "team"
    one["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "Helm"
    one["metadata"]["annotations"] = {"meta.helm.sh/release-name": "blue", "meta.helm.sh/release-namespace": "team"}
    place = f"/api/v1/namespaces/team/configmaps/{one['metadata']['name']}"
    with api_server({place: one}) as url:
        install = (str(CHART), "--dry-run=server", "--kube-apiserver", url, "--disable-openapi-validation")
        second = helm(tmp_path, "install", "green", *install)
        assert second.returncode != 0
        assert one["metadata"]["name"] in second.stderr and 'current value is "blue"' in second.stderr, second.stderr
        other = helm(tmp_path, "install", "green", *install, app="another")
        assert other.returncode == 0, other.stderr
