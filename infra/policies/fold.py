"""State of every policy, folded from the records of `policies`. Pure.

Guarantee: a fold that begins with a summary and reads on equals one that read every record, except for versions below
`known_from`. Bound: twice `window` versions a policy, and the versions that its channels serve.
"""

from infra.log.bus import Record, digest_of
from infra.log.log import LogMessage
from infra.policies.channel import Stable
from infra.policies.policy_feed import PolicyFeed
from infra.policies.summary import Learning, LeaseFence, PolicySummary, Summary, count, entries
from schemas import Directive, PolicyEvent

WINDOW = 64  # newest versions of a policy: more than a checkpoint, an evaluation or a verdict is usually behind


class PoliciesFold:
    """since: summary of the records below `begun_at`. next_offset: of the first record that is not folded. learning: an
    operator's newest order about it. window: number of a policy's newest versions in a summary.
    """

    def __init__(self, since: Summary | None = None, *, window: int = WINDOW) -> None:
        self._window = window
        self._lease = -1 if since is None else since.lease
        self._last: Record | str = "" if since is None else since.last
        self._policies = (
            {} if since is None else {policy.policy: _PolicyFold(policy, window) for policy in since.policies}
        )
        self.begun_at = self.next_offset = 0 if since is None else since.below
        self.learning: Learning = "" if since is None else since.learning

    def take(self, message: LogMessage) -> None:
        """Take the next record; one that was taken changes nothing."""
        if message.offset < self.next_offset:
            return
        self.next_offset, self._last = message.offset + 1, message.record
        if isinstance(message.value, Directive):
            self._directive(message.value, message.offset)
        elif isinstance(message.value, PolicyEvent):
            policy = message.value.policy
            if policy not in self._policies:
                begun = PolicySummary(policy, Stable(lease=self._lease))
                self._policies[policy] = _PolicyFold(begun, self._window)
            self._policies[policy].take(message.value, message.offset)

    def of(self, policy: str) -> PolicySummary:
        """Summary of one policy."""
        return self.summary().of(policy)

    def summary(self) -> Summary:
        """Summary of the records below `next_offset`."""
        return Summary(
            below=self.next_offset,
            last=self._last if isinstance(self._last, str) else digest_of(self._last),
            lease=self._lease,
            learning=self.learning,
            policies=tuple(policy.summary() for policy in self._policies.values()),
        )

    def _directive(self, directive: Directive, offset: int) -> None:
        if directive.order == "drain" or directive.order == "pause" or directive.order == "continue":
            self.learning = directive.order
        if directive.order == "lease":
            self._lease = max(self._lease, offset)
        for policy in self._policies.values():
            policy.feed.fence(directive, offset)


class _PolicyFold:
    def __init__(self, since: PolicySummary, window: int) -> None:
        self._window = window
        self.feed = PolicyFeed(since.policy, since=since)
        self._policy = since.policy
        self._known_from = since.known_from
        self._fence = LeaseFence(since.token)
        self._published = since.published()

    def take(self, event: PolicyEvent, offset: int) -> None:
        self.feed.apply(event, offset)
        if self._fence.admits(event, offset):
            count(self._published, event)
        if len(self._published.keys() | self.feed.events.keys()) > 2 * self._window:
            self._trim()

    def summary(self) -> PolicySummary:
        self._trim()
        events = self.feed.events
        return PolicySummary(
            policy=self._policy,
            stable=self.feed.stable,
            token=self._fence.token,
            newest=self.feed.newest,
            known_from=self._known_from,
            announced=entries(events.values()),
            otherwise=entries(
                event
                for version, event in self._published.items()
                if event.event != "published" or events.get(version) != event
            ),
        )

    def _trim(self) -> None:
        stable, events = self.feed.stable, self.feed.events
        kept = {stable.version, stable.promoted, stable.trial, stable.before}
        for known in (self._published, events):  # the highest number given out is among the published
            kept |= set(sorted(known)[-self._window :])
        gone = (self._published.keys() | events.keys()) - kept
        for version in gone:
            self._published.pop(version, None)
            events.pop(version, None)
        self._known_from = max(self._known_from, max(gone, default=-1) + 1)
