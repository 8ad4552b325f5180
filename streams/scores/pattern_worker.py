"""The child of `streams.scores.format`: matches a pattern against a whole text, per line of JSON.

in   {"pattern": "a+", "dotall": true, "text": "aaa"}      first line out: {"ready": true}
out  {"matches": true}                                      ends with its standard input
"""

import functools
import json
import re
import sys


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = compiled(asked["pattern"], asked["dotall"]).fullmatch(asked["text"])
        print(json.dumps({"matches": found is not None}), flush=True)


@functools.lru_cache(maxsize=64)
def compiled(pattern: str, dotall: bool) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL if dotall else 0)


if __name__ == "__main__":
    main()
