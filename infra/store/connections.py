"""Connections to an S3 server.

urllib3 gives a request on a new connection only as long to be sent as the connection may take to be made, and Python counts
that time for the whole body: a part of an upload over a slow network would never arrive. Here sending may take as long as an
answer may.
"""

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection


def connections(*, most: int, connect_s: float, answer_s: float, num_retries: int, ca_file: str) -> urllib3.PoolManager:
    """A pool. most: connections that are kept. answer_s: how long a body may take to be sent, and a server to say something."""

    class Patient(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            self.sock.settimeout(answer_s)

    class PatientWithTls(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            self.sock.settimeout(answer_s)

    class ConnectionPool(urllib3.HTTPConnectionPool):
        ConnectionCls = Patient

    class PoolWithTls(urllib3.HTTPSConnectionPool):
        ConnectionCls = PatientWithTls

    manager = urllib3.PoolManager(
        maxsize=most,
        timeout=urllib3.Timeout(connect=connect_s, read=answer_s),
        retries=urllib3.Retry(total=num_retries, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
        cert_reqs="CERT_REQUIRED",
        ca_certs=ca_file,
    )
    manager.pool_classes_by_scheme = {"http": ConnectionPool, "https": PoolWithTls}
    return manager
