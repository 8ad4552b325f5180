"""Every metric that a role of headrace counts or sets, by the short name that reports have: a table, for people and tests.

The reference page, the help texts that Prometheus reads and the checks of rules and dashboards are made from it. A test
compares it with the code. Prometheus reads a metric under its short name with units and labels spelled out:

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
    """name: with the prefix, without the suffix of its kind. labels: besides its own. scale: times the value."""

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
    """One metric. name: without the prefix `headrace_`. roles: who has it. labels: its own."""

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
    _counter("issued", "master", "tasks issued, by kind: groups, issued again, evals", "kind"),
    _counter("closures_read", "master", "groups that ended, by the closures that were read", "outcome", "reason"),
    _counter("groups_drawn", "master", "outstanding groups that the trainer drew"),
    _counter("eval_results", "master", "results of evals published", "suite"),
    _counter("gate_decisions", "master", "moves of a channel by the gate, a trial or a watch", "owner", "event"),
    _counter("frames_pruned", "master", "large frames removed from the store"),
    _counter("prunings_failed", "master", "times that removing large frames failed; it is tried again"),
    _counter("master_snapshots", "master", "stored states of the master, by result", "result"),
    _gauge("master_snapshot_bytes", "master", "size of its newest stored state"),
    _gauge("accuracy", "master", "share of right answers of the newest eval", "suite"),
    _gauge("outstanding_groups", "master", "groups issued, and neither drawn nor dropped"),
    _gauge("max_outstanding_groups", "master", "how many groups may be outstanding"),
    _gauge("issued_groups", "master", "groups issued since the app began"),
    _gauge("stable_version", "master", "version that the gate lets customers have, -1 for none"),
    _gauge("trial_version", "master", "version that canaries serve, -1 for the stable one"),
    _gauge("explorers_without_partition", "master", "explorers that read no partition of tasks"),
    _gauge("tasks", "master", "tasks of the taskset"),
    _gauge("evals_missed", "master", "eval tasks that no engine could answer any more"),
    _gauge("alarm_raised", "master", "1 while the alarm of that name is raised", "alarm"),
    _gauge("canary_missing_s", "master, serve", "for how long no canary was heard of, 0 where that is no alarm"),
    # sampling
    _counter("groups", "explore", "groups that ended"),
    _counter("episodes", "explore", "episodes that ended"),
    _counter("episode_ends", "explore", "experiences by how they ended", "end"),
    _counter("episodes_failed", "explore", "episodes that failed", "cause"),
    _counter("episodes_cancelled", "explore", "episodes that were stopped", "reason"),
    _counter("episodes_split", "explore", "experiences that do not go on in the one before", "reason"),
    _counter("experiences", "explore", "experiences published"),
    _counter("tokens", ENGINES, "tokens sampled"),
    _counter("tokens_cancelled", "explore", "sampled tokens of episodes that were stopped", "reason"),
    _counter("stubs", "explore", "members of a group published without their content", "reason"),
    _counter("requests_failed", "explore", "requests that an engine failed on"),
    _counter("tasks_refused", "explore", "tasks that cannot be played here", "reason"),
    _counter("duplicate_tasks", "explore", "tasks delivered twice"),
    _counter("evals_passed", "explore", "evals of versions that this engine is beyond"),
    _counter("bad_images", "explore", "episodes whose images could not be read", "reason"),
    _counter("routing_bytes", "explore", "bytes of recorded experts"),
    _counter("routing_dropped", "explore", "answers whose recorded experts were not kept", "reason"),
    _gauge("tokens_per_s", "explore", "sampled while anything ran, since the first group"),
    _gauge("idle_share", "explore", "share of its places that were empty lately, 0 to 1"),
    _gauge("episodes_in_flight", "explore", "episodes that run"),
    _gauge("tasks_waiting", "explore", "tasks that wait for a place"),
    # weights
    _counter("reloads", ENGINES, "versions loaded"),
    _counter("policies_refused", ENGINES, "versions refused: damaged, unhealthy, or not reproduced by the engine"),
    _counter("policy_fetch_failed", ENGINES, "times that a version could not be had from the store; it is tried again"),
    _counter("policy_fetch_slow", ENGINES, "minutes for which a version was waited for from the store"),
    _counter("eval_hold_expired", "explore", "reloads that waited for evals for as long as they may"),
    _gauge("policy_version", ENGINES, "version that the engine samples with"),
    _gauge("policy_version_published", ENGINES, "newest version that the log tells of"),
    _gauge("policy_version_stable", ENGINES, "version that the log says customers get, -1 for none"),
    Measure("reload_pause_s", "histogram", ENGINES, "how long sampling paused for a version"),
    _gauge("reload_pause_ms_p50", ENGINES, "how long sampling paused for one of the last versions"),
    _gauge("publish_to_serving_ms_p50", ENGINES, "from publishing one of the last versions to serving it"),
    # the store
    _counter("store_bytes", "all", "bytes that went to the store (put) and came from it (get)", "verb"),
    _counter("store_seconds", "all", "time that these requests took, each counted", "verb"),
    _counter("store_failed", "all", "requests that the store failed on", "verb"),
    # what a host keeps of the store
    _counter("host_cache_hits", ENGINES, "objects of the store read from the host's cache"),
    _counter("host_cache_misses", ENGINES, "objects that the host's cache did not have"),
    _counter("host_cache_damaged", ENGINES, "objects of the cache with other bytes; they are fetched again"),
    _counter("host_cache_skipped", ENGINES, "times that the cache could not be used"),
    _counter("version_files_no_room", ENGINES, "times that a place in memory or on disk had no room for a version"),
    _counter("version_files_damaged", ENGINES, "versions in shared memory with other bytes; they are made anew"),
    _gauge("host_cache_bytes", ENGINES, "what the host's cache holds"),
    _gauge("host_cache_max_bytes", ENGINES, "what it may hold"),
    # streams
    _counter("experiences_in", "process", "experiences that a stage read", "stage"),
    _counter("experiences_out", "process", "experiences that a stage passed on", "stage"),
    _counter("dropped", "process, train", "experiences dropped", "reason"),
    _counter("closures", "process", "groups closed", "outcome"),
    _counter("step_failed", "process", "experiences on which a step of a chain failed", "stage", "step"),
    _counter("scores_absent", "process", "experiences that a score had nothing to say of", "score", "reason"),
    _counter("dead_letters", "explore, process", "records that could not be used", "reason"),
    _counter("bad_frames", "all", "records that could not be read, by topic", "topic"),
    _counter("sessions_closed_early", "process", "sessions closed to make room"),
    _gauge("lag", "process", "records that wait in a topic, in the partitions of this worker", "topic"),
    _gauge("groups_pending", "process", "groups that have not ended"),
    _gauge("oldest_waiting_s", "process", "for how long the oldest group that has not ended waits, 0 where none does"),
    _gauge("answers_waiting", "process", "answers that wait for feedback"),
    _gauge("turns_held", "process", "turns that wait for the rest of their session"),
    _counter("snapshots_written", "process", "states of a partition stored"),
    _counter("snapshots_failed", "process", "times that one could not be stored; it is tried again"),
    _counter("snapshots_taken_up", "process", "partitions that went on from a stored state"),
    _counter("snapshots_refused", "process", "stored states that could not be used: the log is read instead", "reason"),
    _gauge("snapshot_bytes", "process", "size of the newest stored state, by partition", "partition"),
    _gauge("records_in_flight", "process", "records that a stage works on", "stage"),
    # feedback
    _counter("feedback_events", "process", "events of a feedback source", "source", "outcome"),
    _counter("feedback_trimmed", "process", "records of a feedback topic gone before they were read", "source"),
    _gauge("feedback_topic_missing", "process", "1 while a source waits for its topic to be made", "source", "topic"),
    _counter("feedback_polls_failed", "process", "times that another system could not be asked", "source", "reason"),
    _counter("feedback_position_not_saved", "process", "times that the place in a source was not saved", "source"),
    _gauge("feedback_read_to_timestamp_s", "process", "time up to which another system was read", "source"),
    # training
    _counter("steps", "train", "optimizer steps"),
    _counter("steps_skipped", "train", "steps that changed nothing: loss or gradient was not sound"),
    _counter(
        "tracker_points_lost",
        "train",
        "points that a tracker did not take; TensorBoard has them",
        "tracker",
    ),
    _counter("rollbacks", "train", "times that the trainer went back to a checkpoint"),
    _counter("alarms", "train", "values of a step outside their healthy range", "alarm"),
    _counter("step_seconds", "train", "time in optimizer steps"),
    _counter("learner_seconds", "train", "time in the learner"),
    _counter("phase_seconds", "train", "time in parts of the learner's steps", "phase"),
    _counter("idle_seconds", "train", "time without enough to train on"),
    _counter("journal_seconds", "train", "time in writing the journal"),
    _counter("publish_seconds", "train", "time in publishing versions, beside the steps"),
    _counter("publish_wait_seconds", "train", "time that a version waited for the one before to be out"),
    _counter("snapshot_seconds", "train", "time in copying the state for a checkpoint"),
    _counter("publication_waits", "train", "waits of up to 30 s for room in a folder store"),
    _gauge("run_stored_bytes", "train", "bytes of the run's versions and checkpoints in a folder store"),
    _counter("checkpoint_seconds", "train", "time in storing checkpoints, beside the steps"),
    _counter("checkpoints", "train", "checkpoints stored"),
    _counter("policy_versions", "train", "versions published"),
    _gauge("last_version_timestamp_s", "train", "when this trainer published its newest version, seconds of the epoch"),
    _counter("flops", "train", "floating-point operations of what was trained, forward and backward"),
    _gauge("mfu", "train", "share of the cards' peak that the newest step used, where it is known"),
    _gauge("gpu_memory_bytes", "train", "in use on the card of the first rank, by every process"),
    _gauge("gpu_memory_capacity_bytes", "train", "of that card"),
    _counter("experiences_trained", "train", "experiences in steps"),
    _counter("experiences_held_back", "train", "experiences that waited since their tenant or user had its share"),
    _counter("staleness_tokens", "train", "sampled tokens by how many versions old they were trained", "versions"),
    _counter("tokens_masked", "train", "sampled tokens too old to be trained"),
    _counter("buffer_refused", "train", "blocks of the buffer not taken", "reason"),
    _gauge("groups_waiting", "train", "groups in its buffer that may still be trained"),
    _gauge("held_back", "train", "experiences that wait since their tenant or user had its share of the last step"),
    _gauge("loss", "train", "of the newest step"),
    _gauge("grad_norm", "train", "of the newest step"),
    _gauge("reward_mean", "train", "of the newest step"),
    _gauge("validation_accuracy", "train", "of the warm-up"),
    _gauge("uses_remembered", "train", "groups whose uses are counted"),
    _gauge("mismatch_abs_max_run", "train", "largest difference of log-probabilities, engine against trainer, so far"),
    _gauge("mismatch_k3_run", "train", "largest k3 of engine against trainer so far"),
    _gauge("critic/value_loss", "train", "of the newest step"),
    _gauge("critic/explained_variance", "train", "share of the targets' variance that the values explain"),
    *(
        _gauge(f"usual/{name}", "train", meaning)
        for name, meaning in (
            ("tokens", "sampled tokens of the lane"),
            ("entropy", "-mean log π of the sampled tokens"),
            ("entropy_exact", "entropy over the vocabulary"),
            ("kl_reference", "estimate of KL(π‖reference)"),
            ("ess", "effective sample size of the importance weights over their number"),
            ("weight_mean", "mean importance weight"),
            ("weight_max", "largest importance weight"),
            ("clip_positive", "share of tokens with a positive advantage that the loss clipped"),
            ("clip_negative", "share of tokens with a negative advantage that the loss clipped"),
            ("k1", "estimate of KL(μ‖π)"),
            ("k3", "estimate of KL(μ‖π), never negative"),
            ("chi2", "estimate of χ²(π‖μ)"),
            ("staleness_mean", "versions between sampling and training"),
            ("staleness_p95", "versions between sampling and training, 95th percentile"),
            ("staleness_max", "versions between sampling and training, the most"),
            ("mixed_versions", "share of sequences that several versions sampled"),
            ("mismatch_tokens", "tokens on which engine and trainer can be compared"),
            ("mismatch_abs_max", "largest difference of log-probabilities, engine against trainer"),
            ("mismatch_k3", "k3 of engine against trainer"),
            ("routing_replayed", "share of tokens read with the experts that the engine recorded"),
            ("routing_without", "sequences without recorded experts"),
            ("routing_differs", "share of replayed tokens whose own router chooses otherwise"),
            ("routing_differs_layers", "share of layers in which it does"),
        )
    ),
    # serving
    _counter("requests", "serve", "requests by route and status", "route", "status"),
    Measure("request_s", "histogram", "serve", "from a request's arrival to the end of its response", ("route",)),
    Measure("first_token_s", "histogram", "serve", "from arrival to the first token of a streamed answer", ("route",)),
    _counter("refused", "serve", "requests refused", "route", "reason"),
    _counter("answers", "serve", "answers given, whole or broken off", "end"),
    _counter("recorded", "serve", "answers recorded"),
    _counter("not_recorded", "serve", "answers not recorded", "reason"),
    _counter("redacted", "serve", "answers from which secrets or personal data were taken"),
    _counter("fields_ignored", "serve", "fields of requests that changed nothing", "route"),
    _counter("recorded_without_ratio", "serve", "answers recorded that losses with a ratio leave out", "reason"),
    _counter("calls_unread", "serve", "calls of tools that could not be read", "parser"),
    _counter("sessions_split", "serve", "turns that do not go on from the one before", "reason"),
    _counter("keys_refused", "serve", "requests with a key that does not open", "reason"),
    _counter("quota_exceeded", "serve", "requests over their key's quota", "kind"),
    _counter("keys_read", "serve", "times that the keys were read from the store"),
    _counter("keys_not_read", "serve", "times that they could not be"),
    _counter("feedback_received", "serve", "words about answers", "path", "outcome"),
    _counter("feedback_unread", "serve", "feedback not recorded: no source listens to /v1/feedback"),
    _counter("feedback_not_known_here", "serve", "words about answers that this gateway did not give"),
    _counter("feedback_unsealed", "serve", "words that could not be sealed", "path"),
    _counter("written", "serve", "records confirmed by the broker", "topic"),
    _counter("shed", "serve", "records given up", "reason"),
    _counter("spooled", "serve", "records kept on disk while the broker was away"),
    _counter("spool_torn_bytes", "serve", "bytes cut off a spool that was being written when its gateway was killed"),
    _counter("spans", "serve", "spans delivered"),
    _counter("spans_dropped", "serve", "spans given up", "reason"),
    _counter("canary", "serve", "what became of requests meant for the canary", "outcome"),
    _counter("policy_not_remembered", "serve", "versions not noted on disk for a start without the log"),
    _gauge("canary_there", "serve", "1 where a canary answers"),
    _gauge("answers_running", "serve", "answers being made"),
    _gauge("sessions", "serve", "sessions in memory"),
    _gauge("sessions_bytes", "serve", "their size"),
    _gauge("conversations", "serve", "earlier conversations in memory"),
    _gauge("conversations_bytes", "serve", "their size"),
    _gauge("outbox_queued", "serve", "records that wait in memory for the broker"),
    _gauge("outbox_waiting", "serve", "records that wait, in memory or on disk"),
    _gauge("spool_records", "serve", "records on disk"),
    _gauge("spool_bytes", "serve", "their size"),
    _gauge("spans_waiting", "serve", "spans that wait to be delivered"),
    _gauge("keys_held", "serve", "keys that wait for the store"),
)

HELP = {exposed(measure.name).name: measure.meaning for measure in MEASURES}
