"""The inner half of `streams.scores.code`: runs in the sandbox with the answer; the caller trusts nothing it sends.

    in   {"function": "add"}, then {"index": 0, "args": [2, 3], "kwargs": {}} …       one line of JSON each
    out  {"index": 0, "value": 5} | {"index": 0, "error": "…"}

The caller copies this file into the sandbox; it imports nothing of headrace. It gets neither tests nor expected values, so a
program that takes over this process can send results but cannot know the right ones.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

FOLDER = "/program"  # where answer.py lies


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)  # the answer's own output is no reply
    name = json.loads(requests.readline())["function"]
    function = _loaded(name)
    for line in requests:
        request = json.loads(line)
        reply = json.dumps({"index": request["index"], **_called(function, request)})
        data = reply.encode() + b"\n"
        while data:
            data = data[os.write(replies, data) :]


def _loaded(name: str) -> Callable[..., Any] | str:
    sys.path.insert(0, FOLDER)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module("answer"), name)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return function


def _called(function: Callable[..., Any] | str, request: dict[str, Any]) -> dict[str, Any]:
    if isinstance(function, str):
        return {"error": function[:500]}
    try:
        value = function(*request["args"], **request["kwargs"])
        json.dumps(value)
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"value": value}


if __name__ == "__main__":
    sys.setrecursionlimit(100_000)
    main()
