"""Broker and bucket of infra/deploy/compose.yml as processes: who has the password is let in, to what is the app's alone."""

from pathlib import Path

import pytest

from tests import minio
from tests.e2e.compose_stack import ComposeStack, keytool, programs

pytestmark = pytest.mark.full

VARIABLES = {"KAFKA_PASSWORD": "one2three4", "MINIO_PASSWORD": "five6seven", "MINIO_ADMIN_PASSWORD": "eight9ten",
             "GRAFANA_PASSWORD": "eleven12", "MODEL": "/"}  # fmt: skip


def test_the_broker_of_the_containers_lets_in_who_has_the_password_and_nobody_else_and_to_topics_of_the_app_alone(
    tmp_path: Path,
) -> None:
    with ComposeStack(tmp_path, VARIABLES, programs={"keytool": keytool()}) as stack:
        for name in ("certificate", "kafka", "rights"):
            stack.start(name)

        def create(*sets: str) -> tuple[int, str]:
            more = [word for one in (f"store.url={tmp_path / 'store'}", *sets) for word in ("--set", one)]
            done = stack.run("topics", "check", "--create", *more)
            return done.returncode, done.stdout + done.stderr

        code, said = create()
        assert code == 0, said
        code, said = create("app=other", "kafka.deadline_s=3")
        assert code != 0 and "other." in said, said
        code, said = create("kafka.security_protocol=SASL_PLAINTEXT", "kafka.ssl_ca_file=", "kafka.deadline_s=3")
        assert code != 0, said
        code, said = create("kafka.ssl_ca_file=", "kafka.deadline_s=3")
        assert code == 2 and "certificate" in said, said
        stack.services["topics"]["environment"]["HEADRACE_KAFKA_PASSWORD"] = "one2four5"
        code, said = create()
        assert code == 2 and 'does not let "headrace" with this password in (PLAIN)' in said, said


def test_a_connection_of_the_containers_finds_every_right_and_no_other_bucket_and_names_what_is_taken_away(
    tmp_path: Path,
) -> None:
    program = minio.find_or_build(minio.default_cache())
    if program is None:
        pytest.skip("no minio on PATH, no Go")
    with ComposeStack(tmp_path, VARIABLES, programs=programs(program)) as stack:
        for name in ("certificate", "kafka", "rights", "minio", "bucket", "topics"):
            stack.start(name)

        def connected(*more: str) -> tuple[int, str]:
            done = stack.run("serve", "check", "--connect", *more)
            return done.returncode, done.stdout + done.stderr

        code, said = connected()
        assert code == 0 and "put, list, get, delete" in said, said
        code, said = connected("--set", "store.url=s3://others/main")
        assert code == 1 and "may not put" in said, said
        acls = "docker compose exec kafka /opt/kafka/bin/kafka-acls.sh --bootstrap-server 127.0.0.1:9094"
        rule = "--deny-principal User:headrace --operation Write --topic headrace.experiences"
        assert stack.typed(f"{acls} --add {rule}").returncode == 0
        listed = stack.typed(f"{acls} --list").stdout
        assert "name=headrace., patternType=PREFIXED" in listed and "permissionType=DENY" in listed
        code, said = connected()
        assert code == 1 and "topic headrace.experiences" in said and "may not write: it needs an ACL" in said, said
        assert stack.typed(f"{acls} --remove --force {rule}").returncode == 0
        assert connected()[0] == 0
        stack.services["bucket"]["environment"]["ADMIN_PASSWORD"] = "another1"
        done = stack.run("bucket")
        assert done.returncode == 1 and "MINIO_ADMIN_PASSWORD is not the one that minio was started with" in done.stderr
        stack.services["bucket"]["environment"]["ADMIN_PASSWORD"] = VARIABLES["MINIO_ADMIN_PASSWORD"]
        for service in ("rights", "bucket"):
            assert stack.typed(f"docker compose run --rm {service}").returncode == 0, "typed again, it changes nothing"
        assert connected()[0] == 0
