"""Where each name of `headrace` comes from, for type checkers."""

from actors.engines.engine import Chunk as Chunk
from actors.engines.engine import Completion as Completion
from actors.engines.engine import ContextFull as ContextFull
from actors.engines.engine import Engine as Engine
from actors.engines.engine import EngineStopped as EngineStopped
from actors.engines.engine import LoadReport as LoadReport
from actors.engines.engine import OnChunk as OnChunk
from actors.engines.engine import Sampling as Sampling
from actors.engines.engine import SchemaRefused as SchemaRefused
from actors.rollout.agent import Act as Act
from actors.rollout.agent import Agent as Agent
from actors.rollout.environment import Environment as Environment
from actors.rollout.environment import Outcome as Outcome
from actors.rollout.session import Session as Session
from actors.rollout.workflow import Workflow as Workflow
from actors.tasksets.taskset import Demonstration as Demonstration
from actors.tasksets.taskset import Preference as Preference
from actors.tasksets.taskset import Taskset as Taskset
from infra.chain.processor import Drop as Drop
from infra.chain.processor import Memory as Memory
from infra.chain.processor import Verdict as Verdict
from infra.chain.processor import feedback as feedback
from infra.chain.processor import processor as processor
from infra.chain.processor import score as score
from infra.policies.policy import Policy as Policy
from infra.settings.config import Section as Section
from infra.settings.config import Use as Use
from infra.store.images import Pixels as Pixels
from infra.store.store import Store as Store
from infra.store.store import check_key as check_key
from infra.store.store import check_prefix as check_prefix
from schemas.errors import ConfigError as ConfigError
from schemas.errors import NotInStore as NotInStore
from schemas.errors import PolicyRefused as PolicyRefused
from schemas.errors import StoreError as StoreError
from schemas.experience import Experience as Experience
from schemas.fields import Score as Score
from schemas.fields import Span as Span
from schemas.ids import synthetic_group as synthetic_group
from schemas.records import Feedback as Feedback
from schemas.records import Image as Image
from schemas.records import Message as Message
from schemas.records import Task as Task
from trainer.losses.loss import LossInputs as LossInputs
from trainer.losses.loss import LossOutput as LossOutput
from trainer.losses.loss import Needs as Needs
from trainer.losses.loss import needs as needs
from trainer.processors import with_weight as with_weight

HOMES: dict[str, dict[str, str]]

def main() -> None: ...
