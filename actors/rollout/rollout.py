"""Runs the episodes of an issued task concurrently, and publishes them in blocks.

Guarantees: every episode ends as an experience or, if it sampled nothing or fits no record, as a drop marker that completes its
group (in an eval, as an experience without tokens); so does a task with an unknown workflow (an eval with a closure). A failure
affects only its episode. A straggler delays finished episodes by at most `linger_s`. A stopped episode ends as a drop marker
with the reason; its tokens are counted.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec

from actors.config import ExploreConfig
from actors.engines.engine import Engine, EngineStopped, Sampling
from actors.rollout.environment import EnvironmentFailed
from actors.rollout.scheduler import Stop, require_issued
from actors.rollout.session import ChatTokenizer, Session, encodable
from actors.rollout.workflow import EpisodeFailed, Workflow, Workflows
from infra.log.log import Log
from infra.roles.role import Role
from infra.settings.plugin import describe
from infra.store.images import ImageReader
from schemas import Closure, DropMarker, Experience, Issued, Score, Task
from schemas.errors import BadImage, ConfigError
from schemas.fields import GROUP_OVER
from schemas.ids import experience_id
from schemas.topics import EXPERIENCES, PROGRESS, VERIFIED
from schemas.wire.block import split_blocks

_log = logging.getLogger(__name__)

FAILED = "episode failed"
REFUSED = "unknown workflow"
STAGE = "explore"
_MAX_FAILURE_CHARS = 500


class RolloutRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """Objects that all rollouts of an explorer share. images: reads the tasks' images, None for a model of text alone."""

    role: Role
    engine: Engine
    tokenizer: ChatTokenizer
    workflows: Workflows
    config: ExploreConfig
    stop_tokens: tuple[int, ...]
    images: ImageReader | None = None


class _Ended(msgspec.Struct, frozen=True):
    """One episode and its record, if any. stopped: reason of a stop before its end."""

    episode: int
    experiences: list[Experience]
    stopped: str = ""


async def run_group(task: Task, runtime: RolloutRuntime, stop: Stop | None = None) -> None:
    """Run all episodes of the task and publish them. Raises errors of the log, and EngineStopped. stop: cancels them early."""
    issued, stop = require_issued(task), stop or Stop()
    try:
        workflow = runtime.workflows.get(task.workflow)
    except ConfigError as error:
        _log.warning("task_refused group=%s error=%s", issued.group, error)
        runtime.role.metrics.counter("tasks_refused", reason=REFUSED).inc()
        ended = [_Ended(episode, []) for episode in range(issued.num_episodes)]
        await _publish(ended, issued, runtime, REFUSED)
        return
    sampling = Sampling(max_tokens=issued.max_tokens, temperature=issued.temperature, stop=runtime.stop_tokens)
    async with asyncio.TaskGroup() as group:
        running: dict[asyncio.Task[_Ended], tuple[int, Session]] = {}
        for episode in range(issued.num_episodes):
            session = Session(runtime.engine, runtime.tokenizer, sampling, runtime.images)
            episode_task = group.create_task(_run_episode(task, episode, workflow, session, runtime))
            running[episode_task] = episode, session
            stop.watch(episode_task)
        while running:
            done, _ = await asyncio.wait(running, timeout=runtime.config.linger_s)
            ended = [_ended(episode_task, *running.pop(episode_task), runtime) for episode_task in done]
            if ended:
                await _publish(ended, issued, runtime)
    runtime.role.metrics.counter("groups").inc()


async def give_up(task: Task, runtime: RolloutRuntime) -> None:
    """End a group that never started, without an answer."""
    issued = require_issued(task)
    episodes = range(issued.num_episodes)
    runtime.role.metrics.counter("episodes_cancelled", reason=GROUP_OVER).inc(len(episodes))
    await _publish([_Ended(episode, [], stopped=GROUP_OVER) for episode in episodes], issued, runtime)


def _ended(episode_task: asyncio.Task[_Ended], episode: int, session: Session, runtime: RolloutRuntime) -> _Ended:
    """The end of an episode. Tokens of a stopped episode are counted and go no further."""
    if not episode_task.cancelled():
        return episode_task.result()
    runtime.role.metrics.counter("episodes_cancelled", reason=GROUP_OVER).inc()
    runtime.role.metrics.counter("tokens_cancelled", reason=GROUP_OVER).inc(session.num_sampled)
    return _Ended(episode, [], stopped=GROUP_OVER)


async def pass_over(tasks: Iterable[Task], reason: str, log: Log) -> None:
    """Tell the master that these evals get no answer here."""
    closures = [_closure(require_issued(task), reason) for task in tasks]
    await log.publish_all(PROGRESS, closures)


async def _run_episode(
    task: Task, episode: int, workflow: Workflow, session: Session, runtime: RolloutRuntime
) -> _Ended:
    scores: tuple[Score, ...] = ()
    cause, failure = "", ""
    try:
        async with asyncio.timeout(runtime.config.episode_timeout_s):
            scores = tuple(await workflow(task, session))
    except EngineStopped:  # no episode can succeed any more: this process ends, the master issues its groups again
        raise
    except TimeoutError:
        cause, failure = "timeout", f"not finished after {runtime.config.episode_timeout_s:g} s"
    except BadImage as error:
        runtime.role.metrics.counter("bad_images", reason=error.reason).inc()
        cause, failure = "environment", describe(error)
    except EpisodeFailed as error:
        cause, failure = error.cause, str(error)
    except Exception as error:  # any error of a workflow is this episode's failure, recorded as data
        cause, failure = "environment" if isinstance(error, EnvironmentFailed) else "workflow", describe(error)
    failure, experiences = encodable(failure[:_MAX_FAILURE_CHARS]), []
    is_eval = bool(require_issued(task).suite)  # each of its samples counts by a record of its own
    if session.num_sampled or is_eval:
        try:
            reason = failure or ("" if session.num_sampled else "nothing was sampled")
            experiences = _experiences(session, task, episode, reason, scores, runtime)
        except Exception as error:  # the workflow scored or noted what no record can hold
            cause, failure = "workflow", describe(error)[:_MAX_FAILURE_CHARS]
            empty = Session(runtime.engine, runtime.tokenizer, session.sampling)
            experiences = _experiences(empty, task, episode, failure, (), runtime) if is_eval else []
    if failure:
        runtime.role.metrics.counter("requests_failed").inc()
        runtime.role.metrics.counter("episodes_failed", cause=cause).inc()
        _log.warning("episode_failed group=%s episode=%d failure=%s", require_issued(task).group, episode, failure)
    return _Ended(episode, experiences)


def _experiences(
    session: Session, task: Task, episode: int, failure: str, scores: tuple[Score, ...], runtime: RolloutRuntime
) -> list[Experience]:
    """The record of an episode. Raises ValueError for what no record can hold."""
    issued = require_issued(task)
    experiences = session.experiences(
        group=issued.group,
        attempt=issued.attempt,
        episode=episode,
        failure=failure,
        group_size=issued.num_episodes,
        sequence=issued.sequence,
        suite=issued.suite,
        origin=runtime.role.instance,
        scores=() if failure else scores,
        task=task.id,
        answer=task.answer,
        held_out=bool(issued.suite),
        meta=task.meta,
    )
    for experience in experiences:
        experience.check_header()
    return experiences


async def _publish(ended: Sequence[_Ended], issued: Issued, runtime: RolloutRuntime, reason: str = FAILED) -> None:
    ended = sorted(ended, key=lambda episode: episode.episode)
    experiences = [experience for episode in ended for experience in episode.experiences]
    empty = [episode for episode in ended if not episode.experiences]
    for block in split_blocks(experiences):
        await runtime.role.log.publish(EXPERIENCES, block)
    if empty and issued.suite:
        await runtime.role.log.publish(PROGRESS, _closure(issued, reason))
    elif empty:
        markers = [_marker(episode.episode, issued, episode.stopped or reason) for episode in empty]
        await runtime.role.log.publish_all(VERIFIED, markers)
    metrics = runtime.role.metrics
    metrics.counter("episodes").inc(len(ended))
    metrics.counter("experiences").inc(len(experiences))
    for experience in experiences:
        if experience.last:
            metrics.counter("episode_ends", end=experience.end).inc()
        if experience.part_reason:
            metrics.counter("episodes_split", reason=experience.part_reason).inc()
    metrics.counter("tokens").inc(sum(experience.num_sampled for experience in experiences))
    for episode in empty:
        metrics.counter("stubs", reason=episode.stopped or reason).inc()


def _marker(episode: int, issued: Issued, reason: str) -> DropMarker:
    return DropMarker(
        id=experience_id(issued.group, issued.attempt, episode),
        group=issued.group,
        episode=episode,
        group_size=issued.num_episodes,
        attempt=issued.attempt,
        sequence=issued.sequence,
        reason=reason,
        stage=STAGE,
    )


def _closure(issued: Issued, reason: str) -> Closure:
    return Closure(
        group=issued.group, outcome="dropped", reason=reason, attempt=issued.attempt, sequence=issued.sequence
    )
