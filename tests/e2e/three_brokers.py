"""Three real brokers as processes: replication 3, two in sync for every confirmed record, the three of them the quorum.

The embedded broker, three times: each folder has its own ports, and learns those of the others before the first start.
"""

from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from infra.local.broker import HOST, EmbeddedKafka, plan_address

NODES = (1, 2, 3)


class ThreeBrokers:
    """A cluster in one folder. Also a context manager."""

    def __init__(self, folder: Path) -> None:
        ports = {node: plan_address(folder / str(node)) for node in NODES}
        cluster = urlsafe_b64encode(uuid4().bytes).rstrip(b"=").decode()
        self.bootstrap = ",".join(port.bootstrap for port in ports.values())
        self.brokers = {
            node: EmbeddedKafka(
                folder / str(node),
                settings={
                    "node.id": str(node),
                    "controller.quorum.voters": ",".join(f"{n}@{HOST}:{p.controller_port}" for n, p in ports.items()),
                    "default.replication.factor": "3",
                    "min.insync.replicas": "2",
                    "offsets.topic.replication.factor": "3",
                    "transaction.state.log.replication.factor": "3",
                    "transaction.state.log.min.isr": "2",
                    # Leaders go back to the broker that is to have them: they move in calm, too, and not with kills alone.
                    "leader.imbalance.check.interval.seconds": "2",
                },
                format_options=(f"--cluster-id={cluster}",),
            )
            for node in NODES
        }

    def kill(self, node: int) -> None:
        """SIGKILL one. Start it again with `start`."""
        self.brokers[node].kill()

    def start(self, node: int) -> None:
        """Returns once it answers; the others must be a quorum by then, or become one meanwhile."""
        broker = self.brokers[node]
        broker.start()
        assert broker.bootstrap in self.bootstrap.split(","), f"broker {node} came up at {broker.bootstrap}"

    def restart(self, node: int) -> None:
        """As an upgrade does it: it hands its leaders over, ends, and comes back."""
        self.brokers[node].stop()
        self.start(node)

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(len(NODES)) as pool:
            list(pool.map(self.start, NODES))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for node in NODES:  # the last two have no quorum left to say good-bye to
            self.kill(node)
