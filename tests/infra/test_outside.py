"""What services settings may name."""

import ssl

import httpx
import pytest

from actors.gateway.config import CanaryShare
from infra.settings.outside import checked_url, shared_tls
from schemas.errors import ConfigError
from streams.processors.task_vary import Vary
from streams.scores.endpoint import EndpointConfig

METADATA = (
    "169.254.169.254", "169.254.169.254.", "2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376",
    "[fe80::1]", "[fe80::1%25eth0]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "100.100.100.200",
    "metadata.google.internal", "Metadata",
)  # fmt: skip


@pytest.mark.parametrize("host", METADATA)
def test_a_clouds_metadata_service_is_refused_however_it_is_spelled(host: str) -> None:
    with pytest.raises(ValueError, match="link-local"):
        checked_url(f"http://{host}/latest/meta-data")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://x/", "http://", "ftp://x", "x", "http://h:99999", "http://[::1"]
)
def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected one such as"):
        checked_url(url)


def test_a_password_is_refused_and_not_told() -> None:
    for make in (
        lambda url: checked_url(url),
        lambda url: CanaryShare(url=url),
        lambda url: EndpointConfig(url=url, model="m"),
    ):
        for url in ("http://ann:S3CRET@judge:8000/v1?S3CRET", "ftp://ann:S3CRET@judge/", "ann:S3CRET@judge"):
            with pytest.raises(ValueError) as caught:
                make(url)
            assert "S3CRET" not in str(caught.value)


def test_canary_judge_and_rewriter_are_checked() -> None:
    for make in (
        lambda: CanaryShare(url="http://169.254.169.254:80"),
        lambda: EndpointConfig(url="http://169.254.169.254/v1", model="m"),
        lambda: Vary(url="http://169.254.169.254/v1", model="m"),
    ):
        with pytest.raises((ValueError, ConfigError), match="link-local"):
            make()
    for url in ("http://127.0.0.1:8010", "https://judge.example:443/v1", "http://[::1]:8000/v1", "http://10.0.0.7/v1"):
        assert checked_url(url) == url


def test_servers_are_checked_by_their_name_and_a_known_authority() -> None:
    """What all clients share is no weaker than what each would make for itself."""
    shared = shared_tls()
    assert shared is shared_tls()
    assert shared.verify_mode is ssl.CERT_REQUIRED and shared.check_hostname
    assert len(shared.get_ca_certs()) == len(httpx.create_ssl_context().get_ca_certs()) > 0
