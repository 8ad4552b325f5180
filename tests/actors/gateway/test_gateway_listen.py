"""Where a gateway listens."""

import asyncio
import socket
from pathlib import Path

import pytest

from actors.engines.scripted import ScriptedEngine
from schemas.errors import ConfigError
from tests.actors.gateway.gateway_rig import serving


def test_an_address_that_is_taken_is_one_line_before_a_model_is_loaded(tmp_path: Path) -> None:
    class Loading(ScriptedEngine):
        async def start(self) -> None:
            raise AssertionError("the model is loaded")

    async def main(port: int) -> None:
        async with serving(tmp_path, Loading(), listen=f"127.0.0.1:{port}"):
            raise AssertionError("it serves")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf'^gateway.listen: cannot listen on "127.0.0.1:{port}": Address already in use$'
        ):
            asyncio.run(main(port))
