"""The rights of each role at the broker and in the bucket, and the ACLs and bucket policies made from them.

A role is a Kafka user and a bucket user of its own, both with the role's name. `operator` is the user of the commands.
Every role may describe the topics of its app and list the names in the bucket: without the second, an object that is not there
reads as one that is denied.
"""

from collections.abc import Mapping
from typing import NamedTuple

from infra.log.rights import Right
from infra.store.seal import FOLDER, SECRET
from infra.store.store import API_KEYS, BLOBS
from schemas import topics
from schemas.topics import Topic

SNAPSHOTS = "snapshots/"  # may hold texts
SUMMARIES = "snapshots/*/policies/"  # hold none
CHECKS = "checks/"  # objects that `headrace check --connect` puts and removes
PREFIXES = ("policies/", "checkpoints/", SNAPSHOTS, SUMMARIES, BLOBS, FOLDER, API_KEYS, SECRET, "identity/", CHECKS)
ACTIONS = {
    "get": ("s3:GetObject",),
    "put": ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
    "delete": ("s3:DeleteObject",),
}
LISTS = ("s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads")
# The compose file's folder for the files made here, its app, its bucket, and the folder of its store in the bucket.
COMPOSE, APP, BUCKET, STORE = "compose", "headrace", "headrace", "main"
ACLS = "/opt/kafka/bin/kafka-acls.sh --bootstrap-server 127.0.0.1:9094 --add"
PREFIXED = "--resource-pattern-type prefixed"


class RoleRights(NamedTuple):
    """reads, writes, trims: topics that the role reads, writes, and deletes records of. groups: consumer groups, each with all
    whose names begin so. gets, puts, deletes: prefixes of objects.
    """

    reads: tuple[Topic, ...]
    writes: tuple[Topic, ...]
    trims: tuple[Topic, ...] = ()
    groups: tuple[str, ...] = ()
    gets: tuple[str, ...] = PREFIXES
    puts: tuple[str, ...] = PREFIXES
    deletes: tuple[str, ...] = PREFIXES

    def at_topic(self, topic: Topic) -> tuple[Right, ...]:
        """The rights at a topic, of read, write and delete (of records)."""
        rights: dict[Right, tuple[Topic, ...]] = {"read": self.reads, "write": self.writes, "delete": self.trims}
        return tuple(name for name, granted in rights.items() if topic in granted)

    def at_prefix(self, prefix: str) -> tuple[str, ...]:
        """The rights at objects whose names begin with a prefix, of get, put and delete."""
        rights = (("get", self.gets), ("put", self.puts), ("delete", self.deletes))
        return tuple(name for name, granted in rights if prefix in granted)


RIGHTS: Mapping[str, RoleRights] = {
    "master": RoleRights(
        # It removes large frames that no record claims any more, so it reads every topic that may claim one.
        reads=(
            topics.TASKSET, topics.TASKS, topics.EXPERIENCES, topics.EXPERTS, topics.VERIFIED, topics.BUFFER, topics.EVALS,
            topics.PROGRESS, topics.REPORTS, topics.POLICIES, topics.DEAD_LETTERS,
        ),
        writes=(topics.TASKS, topics.EVALS, topics.REPORTS, topics.POLICIES),
        gets=("policies/", SNAPSHOTS, SUMMARIES, BLOBS, "identity/", CHECKS),
        puts=(SNAPSHOTS, SUMMARIES, BLOBS, CHECKS),
        deletes=(SNAPSHOTS, SUMMARIES, BLOBS, CHECKS),
    ),
    "train": RoleRights(
        reads=(topics.BUFFER, topics.EVALS, topics.BATCHES, topics.PROGRESS, topics.REPORTS, topics.POLICIES),
        writes=(topics.BATCHES, topics.PROGRESS, topics.REPORTS, topics.POLICIES, topics.DEAD_LETTERS),
        trims=(topics.BUFFER, topics.BATCHES),
        gets=("policies/", "checkpoints/", SUMMARIES, BLOBS, FOLDER, "identity/", CHECKS),
        puts=("policies/", "checkpoints/", SUMMARIES, BLOBS, "identity/", CHECKS),
        deletes=("policies/", "checkpoints/", SUMMARIES, CHECKS),
    ),
    "process": RoleRights(
        reads=(
            topics.TASKSET_RAW, topics.TASKSET, topics.EXPERIENCES, topics.EXPERTS, topics.FEEDBACK, topics.VERIFIED,
            topics.PROGRESS, topics.POLICIES,
        ),
        writes=(
            topics.TASKSET, topics.VERIFIED, topics.BUFFER, topics.EVALS, topics.PROGRESS, topics.REPORTS, topics.DEAD_LETTERS,
        ),
        groups=("tasks", "verify", "collect", "feedback"),
        gets=("policies/", SNAPSHOTS, SUMMARIES, BLOBS, FOLDER, SECRET, "identity/", CHECKS),
        puts=(SNAPSHOTS, SUMMARIES, BLOBS, FOLDER, SECRET, CHECKS),
        deletes=(SNAPSHOTS, SUMMARIES, CHECKS),
    ),
    "explore": RoleRights(
        reads=(topics.TASKS, topics.PROGRESS, topics.POLICIES),
        writes=(topics.EXPERIENCES, topics.VERIFIED, topics.PROGRESS, topics.REPORTS, topics.DEAD_LETTERS),
        groups=("explore",),
        gets=("policies/", SUMMARIES, BLOBS, "identity/", CHECKS),
        puts=(BLOBS, CHECKS),
        deletes=(CHECKS,),
    ),
    "serve": RoleRights(
        reads=(topics.POLICIES,),
        writes=(topics.EXPERIENCES, topics.FEEDBACK, topics.REPORTS),
        gets=("policies/", SUMMARIES, BLOBS, FOLDER, API_KEYS, SECRET, "identity/", CHECKS),
        puts=(BLOBS, FOLDER, SECRET, CHECKS),
        deletes=(CHECKS,),
    ),
    "operator": RoleRights(topics.ALL, topics.ALL, topics.ALL, groups=("",)),
}  # fmt: skip


def acl_script(app: str) -> str:
    """Commands that grant the Kafka users their rights, for a shell on the broker's machine."""
    roles = [role for role in RIGHTS if role != "operator"]
    everyone = " ".join(f"--allow-principal User:{role}" for role in roles)
    lines = [
        f"{ACLS} --allow-principal User:operator --operation All --topic {app}. --group {app}. {PREFIXED}",
        f"{ACLS} {everyone} --operation Describe --topic {app}. {PREFIXED}",
    ]
    for role in roles:
        rights, who = RIGHTS[role], f"--allow-principal User:{role}"
        for operation, granted in (("Read", rights.reads), ("Write", rights.writes), ("Delete", rights.trims)):
            if granted:
                names = " ".join(f"--topic {app}.{topic.name}" for topic in granted)
                lines.append(f"{ACLS} {who} --operation {operation} {names}")
        if rights.groups:
            names = " ".join(f"--group {app}.{group}" for group in rights.groups)
            lines.append(f"{ACLS} {who} --operation Read {names} {PREFIXED}")
    return "set -e\n" + "\n".join(lines) + "\n"


def bucket_policy(role: str, bucket: str, folder: str) -> dict[str, object]:
    """The policy of a bucket user. folder: of the store in the bucket."""
    everything = f"arn:aws:s3:::{bucket}"
    rights = RIGHTS[role]
    statements = [{"Effect": "Allow", "Action": [*LISTS], "Resource": [everything]}]
    for verb, prefixes in (("get", rights.gets), ("put", rights.puts), ("delete", rights.deletes)):
        places = ("",) if role == "operator" else prefixes
        named = [f"{everything}/{folder}/{place}{'' if place == SECRET else '*'}" for place in places]
        statements.append({"Effect": "Allow", "Action": [*ACTIONS[verb]], "Resource": named})
    return {"Version": "2012-10-17", "Statement": statements}
