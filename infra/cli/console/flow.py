"""The flow in words: who waits for whom, in one sentence. From `status` alone."""

from infra.cli.look.status_screen import State

WAITS = 0.4  # share of a minute above which a wait is worth a word
BEHIND = 1000  # records that wait for a stage


def sentence(state: State, now_s: float) -> str:
    """Who waits for whom, as one sentence."""
    alive = [
        role for role in state["roles"] if not role["silent"] and role["state"] not in ("stopped", "done", "failed")
    ]
    if not state["roles"]:
        return "No role has spoken yet."
    if not alive:
        age_s = min(role["age_s"] for role in state["roles"])
        return f"Nothing runs: this is how it was {since(age_s)} ago."
    learning = state["learning"]
    if learning["state"] != "on":
        why = f": {learning['reason']}" if learning["reason"] else ""
        return f"Learning is {learning['state']} by {learning['by']} since {since(now_s - learning['since_s'])}{why}."
    behind = max(((count or 0, name) for name, count in state["lags"].items() if name != "tasks"), default=(0, ""))
    trainer = max((role["per_s"].get("idle_seconds", 0.0) for role in alive if role["role"] == "train"), default=0.0)
    explorer = max((role["gauges"].get("idle_share", 0.0) for role in alive if role["role"] == "explore"), default=0.0)
    if trainer >= WAITS:
        if behind[0] > BEHIND:
            who = f"processing is the bottleneck, {behind[0]:,} records of {behind[1]} wait"
        elif any(role["role"] == "serve" for role in alive) and not _issues(state):
            who = "rated answers come no faster"
        else:
            who = "the explorers are the bottleneck"
        return f"The trainer waited {min(trainer, 1.0):.0%} of the last minute: {who}."
    if explorer >= WAITS and _issues(state):
        return f"The explorers waited {min(explorer, 1.0):.0%} of their time: the trainer is the bottleneck."
    if behind[0] > BEHIND:
        return f"{behind[0]:,} records of {behind[1]} wait: processing is the bottleneck."
    return "No part waits long: they keep pace."


def since(seconds: float) -> str:
    """A span in words. They change once a minute at most, since a screen reader reads each change aloud.

    >>> since(75), since(7)
    ('1 minute', 'less than a minute')
    """
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' if count > 1 else ''}"
    return "less than a minute"


def _issues(state: State) -> bool:
    return any(value > 0 for value in _gauge(state, "master", "issued_groups"))


def _gauge(state: State, role: str, name: str) -> list[float]:
    return [one["gauges"][name] for one in state["roles"] if one["role"] == role and name in one["gauges"]]
