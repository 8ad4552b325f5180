"""A preference pair passes verify and collect as it was given: nobody scores, compares or drops it."""

import asyncio

from actors.tasksets.preferences import pair_block
from actors.tasksets.taskset import Preference
from infra.chain.chain import Context, new_memories, run_chain
from schemas import Block, Experience, Message
from schemas.pairs import pair_fault
from streams.collect.fold import chain_of, fold
from streams.collect.state import State
from streams.config import RewardConfig, ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from tests.actors.rig import CharTokenizer
from tests.streams.collect.collecting import RULES, FakePartition

CONFIG = StreamsConfig(
    score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),), reward=RewardConfig(require=("exact",))
)


def pair() -> Block:
    asked = (Message(role="user", content="2+2="),)
    return pair_block(Preference(id="q", messages=asked, chosen="4", rejected="5"), CharTokenizer())


def verified(experiences: tuple[Experience, ...]) -> tuple[Experience, ...]:
    steps = build_verify(CONFIG)
    outcome = asyncio.run(run_chain(steps, experiences, Context(memories=new_memories(steps))))
    assert not outcome.dropped
    return outcome.kept


def test_a_pair_reaches_the_buffer_whole_and_unjudged() -> None:
    kept = verified(pair().experiences)
    arrival = FakePartition().append(Block(kept))
    result = asyncio.run(fold(State(), arrival, RULES, chain_of(build_collect(CONFIG))))
    (decision,) = result.decisions
    assert (decision.closure.outcome, decision.closure.experiences, decision.closure.lane) == ("buffered", 2, "human")
    (block,) = decision.blocks
    assert pair_fault(block.experiences) == ""
    assert [(one.reward, one.advantage, one.scores) for one in block.experiences] == [(None, None, ())] * 2
