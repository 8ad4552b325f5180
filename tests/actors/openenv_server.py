"""A server of OpenEnv's own package, for tests: python openenv_server.py PORT. It runs in `.venv/agents`."""

import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Push(Action):
    floors: int
    how: str = "gently"


class Seen(Observation):
    text: str
    floor: int
    seed: int | None = None
    height: int = 3


class Lift(Environment[Push, Seen, State]):
    """Reach the top. `how` may make the server fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.floor, self.height = 0, 3

    def reset(self, seed: int | None = None, episode_id: str | None = None, height: int = 3, **_: Any) -> Seen:
        self.floor, self.height = 0, height
        return Seen(text=f"floor 0 of {height}", floor=0, seed=seed, height=height)

    def step(self, action: Push, timeout_s: float | None = None, **_: Any) -> Seen:
        if action.how == "wildly":
            raise RuntimeError("the rope broke")
        if action.how == "slowly":
            time.sleep(30)
        if action.how == "widely":
            return Seen(text="x" * 5_000_000, floor=self.floor)
        self.floor += action.floors
        done = self.floor >= self.height
        return Seen(text=f"floor {self.floor}", floor=self.floor, done=done, reward=float(done))

    @property
    def state(self) -> State:
        return State(step_count=0)


if __name__ == "__main__":
    app = create_fastapi_app(Lift, Push, Seen, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
