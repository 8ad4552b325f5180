"""TRL's GRPOTrainer on the demo's task, from a model folder on, until so many of the tasks that it is asked are right.

python _trl.py ASKED, in the environment of the peers; torch and the functions that say what is right
and what the rate is are headrace's own, so that both sides have the same kernels, task, reward and schedule.

It says lines of JSON: `begin` when it begins to train, then after each `every` steps what share is right and what it took.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(asked: dict[str, Any]) -> None:
    """Train until `at` of the given tasks are correct."""
    sys.path += asked["path"]  # after the peers' own packages
    import msgspec
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from schemas import Task
    from trainer.config import TrainerConfig

    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    config = msgspec.convert(asked["trainer"], TrainerConfig)
    tasks = [msgspec.json.decode(line, type=Task) for line in Path(asked["tasks"]).read_bytes().splitlines()]
    rows = [{"prompt": msgspec.to_builtins(one.messages), "answer": one.answer, "split": one.split} for one in tasks]
    practice, looked = ([one for one in rows if one["split"] == asked[name]] for name in ("split", "suite"))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=settings_of(asked, config),
        train_dataset=Dataset.from_list(practice),
        processing_class=tokenizer,
        callbacks=[looking(asked, lambda: accuracy(model, tokenizer, looked))],
        optimizers=optimizers(model, config),
    )
    trainer.train()


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.0 for the right answer, else 0.0, as the demo's score."""
    from streams.scores.exact import is_exact

    return [float(is_exact(one[0]["content"], wanted)) for one, wanted in zip(completions, answer, strict=True)]


def settings_of(asked: dict[str, Any], config: Any) -> Any:
    """TRL's settings that are the demo's."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=asked["folder"], use_cpu=True, bf16=False, seed=asked["seed"], max_steps=10**6,
        per_device_train_batch_size=asked["groups"] * asked["num_episodes"], num_generations=asked["num_episodes"],
        max_completion_length=asked["max_tokens"], temperature=asked["temperature"], beta=0.0,
        learning_rate=config.learning_rate, max_grad_norm=config.gradient_clip, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip


def optimizers(model: Any, config: Any) -> tuple[Any, Any]:
    """AdamW and the schedule, as headrace has them."""
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR

    from trainer.batch.assemble import learning_rate_at

    found = AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
    return found, LambdaLR(found, lambda done: learning_rate_at(config, "train", done) / config.learning_rate)


def looking(asked: dict[str, Any], share: Callable[[], float]) -> Any:
    """What says how far it is, and ends it. share: of the tasks that are right now."""
    from transformers import TrainerCallback

    class Looking(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Before the first step."""
            say({"begin": True, "accuracy": share()})
            self.wall_s, self.cpu_s = time.perf_counter(), time.process_time()

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            """After each step."""
            if state.global_step % asked["every"]:
                return
            right = share()
            taken = {"wall_s": time.perf_counter() - self.wall_s, "cpu_s": time.process_time() - self.cpu_s}
            say({"step": state.global_step, "accuracy": right, "reward": rewards(state), **taken})
            control.should_training_stop = right >= asked["at"]

    return Looking()


def rewards(state: Any) -> float:
    """Of the step that was logged last."""
    found = [one["reward"] for one in state.log_history if "reward" in one]
    return float(found[-1]) if found else 0.0


def accuracy(model: Any, tokenizer: Any, tasks: list[dict[str, Any]]) -> float:
    """Share of the tasks whose every token of the answer, and the end, is the likeliest after those before it."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(one["prompt"], add_generation_prompt=True, return_dict=False) for one in tasks
    ]
    answers = [[*tokenizer(one["answer"])["input_ids"], tokenizer.eos_token_id] for one in tasks]
    rows = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    length = len(answers[0])
    model.eval()
    with torch.no_grad():
        likeliest = model(rows).logits[:, -length - 1 : -1].argmax(-1)
    model.train()
    return float((likeliest == rows[:, -length:]).all(1).float().mean())


def say(what: dict[str, Any]) -> None:
    """One line for the parent process."""
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
