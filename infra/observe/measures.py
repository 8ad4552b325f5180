"""Table of every metric, by the short name that reports use.

The reference page, Prometheus' help texts and the checks of rules and dashboards come from it. A test compares it with the
code. Prometheus reads a metric under its short name, with units and labels spelled out:

<name>_s, <name>_per_s        <name>_seconds, <name>_per_second
<name>_ms_p95                 recent_<name>_seconds{percentile="95"}, in seconds
<lane>/<name>                 step_<name>{lane="<lane>"}: a value of the newest optimizer step, of one lane
"""

import re
from typing import Literal, NamedTuple

from schemas.fields import LANES

PREFIX = "headrace_"
_PERCENTILE = re.compile(r"(.+)_ms_p(\d+)")
Kind = Literal["counter", "gauge", "histogram"]


class Exposed(NamedTuple):
    """A metric as Prometheus reads it. name: without `_total`. labels: added by the name. scale: factor of the value."""

    name: str
    labels: dict[str, str]
    scale: float = 1.0


def exposed(name: str) -> Exposed:
    """Prometheus name and unit of a metric.

    >>> exposed("usual/ess")
    Exposed(name='headrace_step_ess', labels={'lane': 'usual'}, scale=1.0)
    """
    lane, _, value = name.rpartition("/")
    if lane in LANES:
        return Exposed(f"{PREFIX}step_{value}", {"lane": lane})
    if (found := _PERCENTILE.fullmatch(name)) is not None:
        return Exposed(f"{PREFIX}recent_{found[1]}_seconds", {"percentile": found[2]}, 0.001)
    for unit, spelled in (("_per_s", "_per_second"), ("_s", "_seconds")):
        if name.endswith(unit):
            return Exposed(PREFIX + name.removesuffix(unit) + spelled, {})
    return Exposed(PREFIX + name.replace("/", "_"), {})


class Measure(NamedTuple):
    """A metric. name: without the prefix `headrace_`. roles: roles that export it. labels: names of its labels."""

    name: str
    kind: Kind
    roles: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return exposed(self.name).name + ("_total" if self.kind == "counter" else "")

    @property
    def shown_labels(self) -> tuple[str, ...]:
        return (*self.labels, *exposed(self.name).labels)


def _counter(name: str, roles: str, meaning: str, *labels: str) -> Measure:
    return Measure(name, "counter", roles, meaning, labels)


def _gauge(name: str, roles: str, meaning: str, *labels: str) -> Measure:
    return Measure(name, "gauge", roles, meaning, labels)


ENGINES = "explore, serve"
MEASURES = (
    # issuing
    _counter("issued", "master", "tasks issued, by kind: groups, reissued groups, eval tasks", "kind"),
    _counter("closures_read", "master", "closures of groups that the master read", "outcome", "reason"),
    _counter("gate_decisions", "master", "channel moves, by owner: the gate, a trial or a watch", "owner", "event"),
    _counter("master_snapshots", "master", "snapshots of the master's state, by result", "result"),
    _gauge("master_snapshot_bytes", "master", "size of the master's newest snapshot"),
    _gauge("accuracy", "master", "share of right answers in the newest eval of a suite, 0 to 1", "suite"),
    _gauge("outstanding_groups", "master", "groups issued and neither drawn nor dropped"),
    _gauge("max_outstanding_groups", "master", "limit of outstanding groups"),
    _gauge("issued_groups", "master", "groups issued since the app began"),
    _gauge("stable_version", "master", "version on the stable channel, as the gate decided; -1 for none"),
    _gauge("trial_version", "master", "version on the canary channel; -1 if canaries serve the stable version"),
    _gauge("tasks", "master", "tasks of the taskset"),
    _gauge("evals_missed", "master", "eval tasks that no engine can answer any more"),
    _gauge("alarm_raised", "master", "1 while the alarm is raised", "alarm"),
    _gauge("canary_missing_s", "master, serve", "time without a canary that should run; 0 below 30 s"),
    # sampling
    _counter("groups", "explore", "groups that ended"),
    _counter("episodes", "explore", "episodes that ended"),
    _counter("episode_ends", "explore", "experiences that end an episode, by kind of end", "end"),
    _counter("episodes_failed", "explore", "episodes that failed, by cause", "cause"),
    _counter("episodes_cancelled", "explore", "episodes that the explorer stopped, by reason", "reason"),
    _counter("episodes_split", "explore", "experiences that do not continue their episode's previous part", "reason"),
    _counter("experiences", "explore", "experiences published"),
    _counter("tokens", ENGINES, "tokens sampled"),
    _counter("tokens_cancelled", "explore", "sampled tokens of episodes that the explorer stopped", "reason"),
    _counter("stubs", "explore", "drop markers published in place of experiences", "reason"),
    _counter("requests_failed", "explore", "episodes that failed, whatever the cause"),
    _counter("tasks_refused", "explore", "tasks that this explorer cannot run, by reason", "reason"),
    _counter("bad_images", "explore", "episodes with unreadable images, by reason", "reason"),
    _gauge("tokens_per_s", "explore", "tokens per second of the time with a running episode, since the first group"),
    _gauge("idle_share", "explore", "share of the time since the first group in which no episode ran, 0 to 1"),
    _gauge("episodes_in_flight", "explore", "episodes that run"),
    _gauge("tasks_waiting", "explore", "tasks that wait for a free place on the engine"),
    # weights
    _counter("reloads", ENGINES, "versions loaded"),
    _counter("policies_refused", ENGINES, "versions refused: damaged, unhealthy, or not reproduced by the engine"),
    _counter("policy_fetch_failed", ENGINES, "failed fetches of a version from the store; the role retries"),
    _counter("policy_fetch_slow", ENGINES, "minutes spent waiting for fetches of versions from the store"),
    _gauge("policy_version", ENGINES, "version that the engine samples with"),
    _gauge("policy_version_published", ENGINES, "newest version in the log"),
    _gauge("policy_version_stable", ENGINES, "version on the stable channel, as read from the log; -1 for none"),
    _gauge("reload_pause_ms_p50", ENGINES, "pause of sampling at recent reloads"),
    _gauge("publish_to_serving_ms_p50", ENGINES, "time from the publication of recent versions to their use"),
    # the store
    _counter("store_bytes", "all", "bytes written to the store (put) and read from it (get)", "verb"),
    _counter("store_seconds", "all", "durations of store requests, summed; parallel requests each count", "verb"),
    _counter("store_failed", "all", "failed store requests", "verb"),
    # version files of a host
    _counter("version_files_no_room", ENGINES, "versions that did not fit into a place in memory or on disk"),
    _counter("version_files_damaged", ENGINES, "versions in shared memory with wrong bytes; the engine rewrites them"),
    # streams
    _counter("experiences_in", "process", "experiences that a stage read", "stage"),
    _counter("experiences_out", "process", "experiences that a stage passed on", "stage"),
    _counter("dropped", "process, train", "experiences dropped, by reason", "reason"),
    _counter("closures", "process", "groups closed, by outcome", "outcome"),
    _counter("step_failed", "process", "experiences on which a step of a chain raised an error", "stage", "step"),
    _counter("scores_absent", "process", "experiences for which a score returned no verdict", "score", "reason"),
    _counter("dead_letters", "explore, process", "records moved to dead letters, by reason", "reason"),
    _counter("bad_frames", "all", "records that could not be decoded", "topic"),
    _counter("sessions_closed_early", "process", "sessions closed before their end to make room"),
    _gauge("lag", "process", "unread records of a topic, in the partitions of this worker", "topic"),
    _gauge("groups_pending", "process", "groups that have not ended"),
    _gauge("oldest_waiting_s", "process", "age of the oldest group that has not ended; 0 if there is none"),
    _gauge("turns_held", "process", "turns that wait for the rest of their session"),
    _counter("snapshots_written", "process", "partition snapshots stored"),
    _counter("snapshots_failed", "process", "failed writes of a partition snapshot; the worker retries"),
    _counter("snapshots_taken_up", "process", "partitions restored from a snapshot"),
    _counter("snapshots_refused", "process", "unusable partition snapshots; the worker reads the log", "reason"),
    _gauge("snapshot_bytes", "process", "size of the newest snapshot of a partition", "partition"),
    _gauge("records_in_flight", "process", "records that a stage is processing", "stage"),
    # feedback
    _counter("feedback_events", "process", "events of a feedback source, by outcome", "source", "outcome"),
    _counter("feedback_trimmed", "process", "feedback records that the broker deleted before they were read", "source"),
    _gauge("feedback_topic_missing", "process", "1 while the topic of the source does not exist", "source", "topic"),
    _counter("feedback_polls_failed", "process", "failed reads of a feedback file or system", "source", "reason"),
    _counter("feedback_position_not_saved", "process", "failed writes of the read position in a source", "source"),
    _gauge("feedback_read_to_timestamp_s", "process", "Unix time up to which the source was read", "source"),
    # training
    _counter("steps", "train", "optimizer steps"),
    _counter("steps_skipped", "train", "steps not applied: loss or gradient not finite, or far above the median"),
    _counter("tracker_points_lost", "train", "points that a tracker did not accept; TensorBoard has them", "tracker"),
    _counter("rollbacks", "train", "restores of the last good checkpoint after bad steps"),
    _counter("alarms", "train", "values of a step outside their healthy range", "alarm"),
    _counter("learner_seconds", "train", "time spent in the learner"),
    _counter("phase_seconds", "train", "time spent in each part of the learner's steps", "phase"),
    _counter("idle_seconds", "train", "time without enough experiences for a step"),
    _counter("journal_seconds", "train", "time spent on writes of the journal"),
    _counter("publish_seconds", "train", "time spent on publishing versions, in parallel with steps"),
    _counter("publish_wait_seconds", "train", "time that versions waited for the publication of the version before"),
    _counter("snapshot_seconds", "train", "time spent on copies of the learner's state for checkpoints"),
    _counter("publication_waits", "train", "waits of up to 30 s for free space in a folder store"),
    _gauge("run_stored_bytes", "train", "size of the run's versions and checkpoints in a folder store"),
    _counter("checkpoints", "train", "checkpoints stored"),
    _counter("policy_versions", "train", "versions published"),
    _gauge("last_version_timestamp_s", "train", "Unix time at which this trainer published its newest version"),
    _counter("experiences_trained", "train", "experiences trained on; each use counts"),
    _counter("experiences_held_back", "train", "experiences that draws left out because of a tenant's or user's share"),
    _counter("staleness_tokens", "train", "trained sampled tokens, by their age in versions", "versions"),
    _counter("tokens_masked", "train", "sampled tokens masked because they were too old"),
    _counter("buffer_refused", "train", "buffer records that the trainer refused, by reason", "reason"),
    _gauge("groups_waiting", "train", "groups in the trainer's buffer that may still be trained"),
    _gauge("held_back", "train", "experiences that the last draw left out because of a tenant's or user's share"),
    _gauge("loss", "train", "loss of the newest step"),
    _gauge("grad_norm", "train", "gradient norm of the newest step, before clipping"),
    _gauge("reward_mean", "train", "mean reward of the newest step"),
    _gauge("validation_accuracy", "train", "accuracy on held-out demonstrations during the warm-up, 0 to 1"),
    _gauge("uses_remembered", "train", "groups whose uses the trainer counts"),
    _gauge("mismatch_abs_max_run", "train", "largest engine-trainer difference of a log-probability, over the run"),
    _gauge("mismatch_k3_run", "train", "largest k3 estimate of the engine-trainer divergence, over the run"),
    _gauge("critic/value_loss", "train", "value loss of the newest step"),
    _gauge("critic/explained_variance", "train", "share of the targets' variance that the critic explains"),
    *(
        _gauge(f"usual/{name}", "train", meaning)
        for name, meaning in (
            ("tokens", "sampled tokens of the lane"),
            ("entropy", "entropy estimate: mean of -log π over the sampled tokens"),
            ("entropy_exact", "entropy over the vocabulary"),
            ("kl_reference", "estimate of KL(π‖reference)"),
            ("ess", "effective sample size of the importance weights, as a share of their number"),
            ("weight_mean", "mean importance weight"),
            ("weight_max", "largest importance weight"),
            ("clip_positive", "share of tokens with a positive advantage that the loss clipped"),
            ("clip_negative", "share of tokens with a negative advantage that the loss clipped"),
            ("k1", "estimate of KL(μ‖π)"),
            ("k3", "estimate of KL(μ‖π), never negative"),
            ("chi2", "estimate of χ²(π‖μ)"),
            ("staleness_mean", "versions between sampling and training, mean"),
            ("staleness_p95", "versions between sampling and training, 95th percentile"),
            ("staleness_max", "versions between sampling and training, maximum"),
            ("mixed_versions", "share of sequences sampled by several versions"),
            ("mismatch_tokens", "tokens of the version in training, on which engine and trainer are compared"),
            ("mismatch_abs_max", "largest engine-trainer difference of a token's log-probability"),
            ("mismatch_k3", "k3 estimate of the engine-trainer divergence"),
        )
    ),
    # serving
    _counter("requests", "serve", "requests by route and status", "route", "status"),
    Measure("request_s", "histogram", "serve", "time from a request's arrival to the end of its response", ("route",)),
    Measure(
        "first_token_s", "histogram", "serve", "time from a request's arrival to the first streamed token", ("route",)
    ),
    _counter("refused", "serve", "requests refused, by reason", "route", "reason"),
    _counter("answers", "serve", "answers given, by end: whole or broken off", "end"),
    _counter("recorded", "serve", "answers recorded"),
    _counter("not_recorded", "serve", "answers not recorded, by reason", "reason"),
    _counter("redacted", "serve", "answers from which the gateway removed secrets or personal data"),
    _counter("fields_ignored", "serve", "request fields without effect", "route"),
    _counter("recorded_without_ratio", "serve", "recorded answers that losses with a ratio leave out", "reason"),
    _counter("calls_unread", "serve", "tool calls that the parser could not read", "parser"),
    _counter("sessions_split", "serve", "turns that do not continue an earlier turn of their session", "reason"),
    _counter("keys_refused", "serve", "requests refused because of their API key, by reason", "reason"),
    _counter("quota_exceeded", "serve", "requests over the quota of their API key", "kind"),
    _counter("keys_read", "serve", "reads of the API keys from the store"),
    _counter("keys_not_read", "serve", "failed reads of the API keys from the store"),
    _counter("feedback_received", "serve", "feedback events received over HTTP, by outcome", "path", "outcome"),
    _counter("feedback_unread", "serve", "feedback not recorded because no source listens to /v1/feedback"),
    _counter("feedback_not_known_here", "serve", "feedback about answers that this gateway did not give"),
    _counter("feedback_unsealed", "serve", "feedback written unencrypted: it names no known answer", "path"),
    _counter("written", "serve", "records that the broker confirmed", "topic"),
    _counter("shed", "serve", "records that the gateway could not keep, by reason", "reason"),
    _counter("spooled", "serve", "records written to disk while the broker was unreachable"),
    _counter("spool_torn_bytes", "serve", "bytes cut from the end of a spool whose gateway was killed during a write"),
    _counter("canary", "serve", "requests of sessions assigned to the canary, by outcome", "outcome"),
    _counter("policy_not_remembered", "serve", "failed writes of the served version for a start without the log"),
    _gauge("canary_there", "serve", "1 while a canary answers"),
    _gauge("answers_running", "serve", "answers in progress"),
    _gauge("outbox_waiting", "serve", "records that wait for the broker, in memory or on disk"),
    _gauge("spool_records", "serve", "records in the gateway's spool on disk"),
    _gauge("spool_bytes", "serve", "size of the gateway's spool on disk"),
)

HELP = {exposed(measure.name).name: measure.meaning[:1].upper() + measure.meaning[1:] for measure in MEASURES}
