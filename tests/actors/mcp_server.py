"""A server of MCP's own package, for tests: python mcp_server.py stdio, or python mcp_server.py PORT. Some tools do it harm."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")


@server.tool()
def price(item: str, pieces: int = 1) -> int:
    """Price of this many pieces."""
    if item == "moon":
        raise ToolError("the moon is not for sale")
    return len(item) * pieces


@server.tool()
def variables() -> str:
    """The environment."""
    return " ".join(sorted(os.environ)) + f" process={os.getpid()}"


@server.tool()
def long(characters: int) -> str:
    """A long text."""
    return "x" * characters


@server.tool()
async def slow() -> str:
    """Never answers."""
    await asyncio.sleep(3600)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(7)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        print("welcome to the shop", flush=True)  # as sloppy servers do
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]), json_response="json" in sys.argv)
