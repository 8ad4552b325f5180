"""Grafana's dashboards as tables: one for each role, and one for who waits for whom. Written by `python -m infra.cli.docs`.

Each shows the app that is chosen at its top.

infra/deploy/dashboards/<name>.json      to be imported, or provisioned as infra/deploy/compose does
"""

import json
import re
from typing import NamedTuple

FOLDER = "../deploy/dashboards"  # from the documentation's
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


class Panel(NamedTuple):
    """One graph. queries: PromQL, each with the legend of its lines. unit: Grafana's word.

    title: above the graph.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"


def _rate(metric: str, by: str = "instance") -> tuple[str, str]:
    return f"sum by ({by}) (rate({metric}[5m]))", f"{{{{{by}}}}}"


def _now(metric: str, by: str = "instance") -> tuple[str, str]:
    return f"max by ({by}) ({metric})", f"{{{{{by}}}}}"


def _share(metric: str, legend: str) -> tuple[str, str]:
    return f"sum(rate({metric}[5m]))", legend


def _quantile(metric: str, share: float, by: str) -> tuple[str, str]:
    """Of a histogram."""
    return (
        f"histogram_quantile({share:g}, sum by (le, {by}) (rate({metric}_bucket[5m])))",
        f"{{{{{by}}}}} p{100 * share:g}",
    )


def _process(role: str) -> tuple[Panel, ...]:
    mine = f'and on (instance) headrace_build_info{{role="{role}"}}'
    legend = "{{instance}}"
    return (
        Panel("Resident memory", ((f"process_resident_memory_bytes {mine}", legend),), "bytes"),
        Panel("Processors in use", ((f"rate(process_cpu_seconds_total[5m]) {mine}", legend),)),
        Panel("Open descriptors", ((f"process_open_fds {mine}", legend),)),
    )


WAITS = (
    Panel(
        "Who waits: share of the time",
        (
            ("avg(headrace_idle_share)", "explorers without enough to sample"),
            _share("headrace_idle_seconds_total", "trainer without enough to train"),
        ),
        "percentunit",
    ),
    Panel(
        "Groups outstanding",
        (
            ("max(headrace_outstanding_groups)", "issued, not drawn"),
            ("max(headrace_max_outstanding_groups)", "allowed"),
        ),
    ),
    Panel("Records that wait, by topic", (("sum by (topic) (headrace_lag)", "{{topic}}"),)),
    Panel("Tasks that wait for a place", (_now("headrace_tasks_waiting"),)),
    Panel(
        "Versions: published, sampled with, given to customers",
        (
            ("max(headrace_policy_version_published)", "published"),
            ("min(headrace_policy_version)", "oldest in an engine"),
            ("max(headrace_stable_version)", "stable"),
        ),
    ),
    Panel("Since the newest version", (("time() - max(headrace_last_version_timestamp_seconds)", "age"),), "s"),
    Panel("How long the oldest group waits", (_now("headrace_oldest_waiting_seconds"),), "s"),
    Panel("Records that wait for the broker", (_now("headrace_outbox_waiting"),)),
    Panel(
        "Where the trainer's time goes",
        (
            _share("headrace_learner_seconds_total", "learner"),
            _share("headrace_idle_seconds_total", "waiting"),
            _share("headrace_journal_seconds_total", "journal"),
            _share("headrace_publish_wait_seconds_total", "waiting for the version before"),
            _share("headrace_snapshot_seconds_total", "copying for checkpoints"),
        ),
        "percentunit",
    ),
    Panel("Alarms of the master", (("max by (alarm) (headrace_alarm_raised)", "{{alarm}}"),)),
    Panel("Roles that run", (("count by (role) (headrace_build_info)", "{{role}}"),)),
)
MASTER = (
    Panel("Tasks issued a second", (_rate("headrace_issued_total", "kind"),)),
    Panel("Groups that ended a second", (_rate("headrace_closures_read_total", "outcome"),)),
    Panel("Accuracy of evals", (_now("headrace_accuracy", "suite"),), "percentunit"),
    Panel(
        "Decisions of the gate an hour",
        (("sum by (owner, event) (increase(headrace_gate_decisions_total[1h]))", "{{owner}}: {{event}}"),),
    ),
    Panel("Versions", (("max(headrace_stable_version)", "stable"), ("max(headrace_trial_version)", "of canaries"))),
    Panel("Evals that no engine could answer", (_now("headrace_evals_missed"),)),
)  # fmt: skip
EXPLORE = (
    Panel("Tokens sampled a second", (_rate("headrace_tokens_total"),)),
    Panel("Share of places that are empty", (_now("headrace_idle_share"),), "percentunit"),
    Panel("Episodes that run", (_now("headrace_episodes_in_flight"),)),
    Panel("How episodes end, a second", (_rate("headrace_episode_ends_total", "end"),)),
    Panel("Episodes that failed, a second", (_rate("headrace_episodes_failed_total", "cause"),)),
    Panel("Episodes that were stopped, a second", (_rate("headrace_episodes_cancelled_total", "reason"),)),
    Panel("Pause for a version", (("max by (percentile) (headrace_recent_reload_pause_seconds)", "p{{percentile}}"),), "s"),
    Panel(
        "From publishing to serving",
        (("max by (percentile) (headrace_recent_publish_to_serving_seconds)", "p{{percentile}}"),),
        "s",
    ),
    Panel(
        "Bytes a second that a request has from the store",
        (
            (
                "sum by (instance) (rate(headrace_store_bytes_total{verb=\"get\"}[5m])) / "
                "sum by (instance) (rate(headrace_store_seconds_total{verb=\"get\"}[5m]))",
                "{{instance}}",
            ),
        ),
        "Bps",
    ),
    Panel("Versions refused an hour", (("sum by (instance) (increase(headrace_policies_refused_total[1h]))", "{{instance}}"),)),
)  # fmt: skip
STREAMS = (
    Panel("Experiences read a second", (_rate("headrace_experiences_in_total", "stage"),)),
    Panel("Experiences passed on a second", (_rate("headrace_experiences_out_total", "stage"),)),
    Panel("Experiences dropped a second", (_rate("headrace_dropped_total", "reason"),)),
    Panel("Records that wait", (("sum by (topic) (headrace_lag)", "{{topic}}"),)),
    Panel("Steps that failed, a second", (_rate("headrace_step_failed_total", "step"),)),
    Panel("Scores with nothing to say, a second", (_rate("headrace_scores_absent_total", "score"),)),
    Panel("Groups that have not ended", (_now("headrace_groups_pending"),)),
    Panel("How long the oldest of them waits", (_now("headrace_oldest_waiting_seconds"),), "s"),
    Panel("Turns that wait for their session", (_now("headrace_turns_held"),)),
    Panel("Dead letters a second", (_rate("headrace_dead_letters_total", "reason"),)),
)
TRAIN = (
    Panel("Steps a second", (_rate("headrace_steps_total"),)),
    Panel("Loss", (_now("headrace_loss"),)),
    Panel("Norm of the gradient", (_now("headrace_grad_norm"),)),
    Panel("Mean reward", (_now("headrace_reward_mean"),)),
    Panel("Entropy", (_now("headrace_step_entropy", "lane"),)),
    Panel("Effective sample size", (_now("headrace_step_ess", "lane"),), "percentunit"),
    Panel("Engine against trainer, k3", (_now("headrace_step_mismatch_k3", "lane"),)),
    Panel("Staleness, versions", (_now("headrace_step_staleness_mean", "lane"), _now("headrace_step_staleness_max", "lane"))),
    Panel("Sampled tokens too old to be trained, a second", (_rate("headrace_tokens_masked_total"),)),
    Panel("Experiences trained a second", (_rate("headrace_experiences_trained_total"),)),
    Panel("Where a step's time goes", (_rate("headrace_phase_seconds_total", "phase"),), "percentunit"),
    Panel("Model FLOPs utilization", (_now("headrace_mfu"),), "percentunit"),
    Panel("Operations that the model needed, a second", (_rate("headrace_flops_total"),), "flops"),
    Panel(
        "Memory of the first rank's card",
        (("max(headrace_gpu_memory_bytes)", "in use"), ("max(headrace_gpu_memory_capacity_bytes)", "all")),
        "bytes",
    ),
    Panel("Steps that changed nothing, an hour", (("sum(increase(headrace_steps_skipped_total[1h]))", "skipped"),)),
    Panel("Values outside their range, an hour", (("sum by (alarm) (increase(headrace_alarms_total[1h]))", "{{alarm}}"),)),
)  # fmt: skip
SERVE = (
    Panel("Requests a second", (_rate("headrace_requests_total", "status"),)),
    Panel(
        "From a request to the end of its response",
        (_quantile("headrace_request_seconds", 0.5, "route"), _quantile("headrace_request_seconds", 0.99, "route")),
        "s",
    ),
    Panel(
        "From a request to its first token, streamed",
        (
            _quantile("headrace_first_token_seconds", 0.5, "route"),
            _quantile("headrace_first_token_seconds", 0.99, "route"),
        ),
        "s",
    ),
    Panel("Requests refused a second", (_rate("headrace_refused_total", "reason"),)),
    Panel("Answers being made", (_now("headrace_answers_running"),)),
    Panel("Answers a second", (_rate("headrace_answers_total", "end"),)),
    Panel("Answers not recorded, a second", (_rate("headrace_not_recorded_total", "reason"),)),
    Panel("Words about answers a second", (_rate("headrace_feedback_received_total", "outcome"),)),
    Panel("Records that wait", (_now("headrace_outbox_waiting"),)),
    Panel("Records on disk", (_now("headrace_spool_bytes"),), "bytes"),
    Panel("Records given up, an hour", (("sum by (reason) (increase(headrace_shed_total[1h]))", "{{reason}}"),)),
)
DASHBOARDS = {
    "waits": ("Who waits for whom", WAITS),
    "master": ("Master", MASTER),
    "explore": ("Explorers", EXPLORE),
    "process": ("Stream workers", STREAMS),
    "train": ("Trainer", TRAIN),
    "serve": ("Gateways", SERVE),
}


def dashboards() -> dict[str, str]:
    """The JSON of every dashboard, by its path from infra/docs."""
    return {
        f"{FOLDER}/{name}.json": json.dumps(
            _dashboard(name, title, (*panels, *(() if name == "waits" else _process(name)))), indent=1
        )
        + "\n"
        for name, (title, panels) in DASHBOARDS.items()
    }


def _dashboard(name: str, title: str, panels: tuple[Panel, ...]) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${source}"}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "app", "type": "query", "label": "App", "datasource": source, "refresh": 2,
            "query": "label_values(headrace_build_info, app)",
        },
    ]  # fmt: skip
    return {
        "uid": f"headrace-{name}",
        "title": f"headrace: {title}",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels)],
    }


def of_app(query: str) -> str:
    """A query of one app's samples alone.

    >>> of_app('max(headrace_loss) + sum by (topic) (headrace_lag{topic="verified"})')
    'max(headrace_loss{app="$app"}) + sum by (topic) (headrace_lag{app="$app",topic="verified"})'
    """
    return re.sub(
        r"\b((?:headrace|process)_\w+)(\{)?",
        lambda found: f'{found[1]}{{app="$app"' + ("," if found[2] else "}"),
        query,
    )


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, object]:
    row, column = divmod(number, PER_ROW)
    targets = [
        {"refId": chr(ord("A") + at), "datasource": source, "expr": of_app(query), "legendFormat": legend}
        for at, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }
