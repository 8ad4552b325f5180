"""Workflow with tools: the policy may call functions before it answers.

    task, tools ─> [session.reply] ─> calls? ─yes─> all at once ─> their answers ─> again, at most `max_rounds` times
                                        └─no──> that was the answer

Calls and answers have the format of Hermes and Qwen models, <tool_call>{"name": …, "arguments": {…}}</tool_call>. The calls of
a turn run concurrently; each gets a <tool_response>, in order. The system message describes the tools, so any chat template
works. The policy reads why a call failed; that does not end the episode. Ends: terminal with the answer, truncated at the limit
of rounds or context.
"""

import asyncio
import json
import re
from collections.abc import Sequence

from actors.engines.engine import ContextFull
from actors.rollout.session import Session
from actors.rollout.tool import ToolResult, ToolSpec, answer, load_server, load_tool, read_call
from actors.rollout.workflow import EpisodeFailed
from infra.settings.config import Positive, Seconds, Section, Use, decode
from schemas import Message, Score, Task
from schemas.errors import ConfigError

SYSTEM = """\
You may call functions to answer. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call return a JSON object with the function's name and its arguments:
<tool_call>
{"name": "…", "arguments": {…}}
</tool_call>
When you know the answer, give it without calling anything."""
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolsOptions(Section, frozen=True):
    """Options of the workflow Tools.

    tools: Tools that the policy may call. servers: Servers of further tools, as `actors.rollout.tools.mcp:McpServer`.
    max_rounds: Maximum turns with calls. max_calls: Maximum calls per turn; further calls are refused. timeout_s: Maximum
    seconds of a call. system: System message; {tools} stands for the signatures. answers: Role of the messages with tool
    responses.

    Example: ToolsOptions(tools=(Use(use="support:lookup"),), max_rounds=4)
    """

    tools: tuple[Use, ...] = ()
    servers: tuple[Use, ...] = ()
    max_rounds: Positive = 8
    max_calls: Positive = 16
    timeout_s: Seconds = 30.0
    system: str = SYSTEM
    answers: str = "user"


class Tools:
    """Answer after any number of tool calls. `notes` has the number of calls and of failed calls."""

    def __init__(self, **options: object) -> None:
        self._options = decode(options, ToolsOptions, "tools")
        self._tools = [load_tool(tool.use, tool.options) for tool in self._options.tools]
        self._servers = [load_server(server.use, server.options) for server in self._options.servers]
        if not self._tools and not self._servers:
            raise ConfigError("tools: got none, expected tools or servers")
        if fault := names_fault(self._tools):
            raise ConfigError(fault)

    async def __call__(self, task: Task, session: Session) -> tuple[Score, ...]:
        """Run one episode. Raises EpisodeFailed where a tool is out of order."""
        tools = await self._offered()
        system = self._options.system.replace("{tools}", described(tools))
        conversation = (Message(role="system", content=system), *task.messages)
        made = failed = 0
        for turn in range(self._options.max_rounds + 1):
            try:
                reply = await session.reply(conversation)
            except ContextFull:
                if not session.num_sampled:
                    raise
                session.finish("truncated", "context is full")
                break
            calls = _CALL.findall(reply.content)
            if not calls:
                break
            if turn == self._options.max_rounds:
                session.finish("truncated", "max_rounds")
                break
            answers = await self._answers(calls, tools)
            if broken := next((tool.broken for tool in answers if tool.broken), ""):
                raise EpisodeFailed("tool", broken)
            made += len(answers)
            failed += sum(tool.failed for tool in answers)
            text = "\n".join(f"<tool_response>\n{tool.text}\n</tool_response>" for tool in answers)
            conversation = (*conversation, reply, Message(role=self._options.answers, content=text))
        session.note("tool_calls", made)
        session.note("tool_errors", failed)
        return ()

    async def _offered(self) -> list[ToolSpec]:
        tools = list(self._tools)
        for server in self._servers:
            tools += await server.tools()
        if fault := names_fault(tools):
            raise EpisodeFailed("tool", fault)
        return tools

    async def _answers(self, calls: Sequence[str], tools: Sequence[ToolSpec]) -> list[ToolResult]:
        most, timeout_s = self._options.max_calls, self._options.timeout_s
        asked = [answer(read_call(text), tools, timeout_s=timeout_s) for text in calls[:most]]
        answers = list(await asyncio.gather(*asked))
        refused = ToolResult(f"error: not called: at most {most} calls in one turn", failed=True)
        return answers + [refused] * (len(calls) - len(asked))


def names_fault(tools: Sequence[ToolSpec]) -> str:
    """The fault of the names of tools, "" for none."""
    names = [tool.name for tool in tools]
    return f"tools: got the names {', '.join(names)}, expected each once" if len(set(names)) < len(names) else ""


def described(tools: Sequence[ToolSpec]) -> str:
    """The signatures, one JSON object a line, as OpenAI's API writes them."""
    return "\n".join(
        json.dumps(
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
        )
        for tool in tools
    )
