"""TRL's GRPOTrainer on the demo's instructions, from a model folder on, until so many of the development prompts are met.

`python _trl.py ASKED`, in the environment of the peers; torch, the score and the rate come from headrace, so that both sides
have the same kernels, reward and schedule.

It prints lines of JSON: `begin` when training begins, then after each `every` steps the share that is met and its cost.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 16  # answers that TRL reads at once; a step sums the gradients of all its answers
LOOK_ROWS = 32


def run(asked: dict[str, Any]) -> None:
    """Train until `at` of the development prompts are met."""
    sys.path += asked["path"]  # after the peers' own packages
    import msgspec
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from schemas import Task
    from trainer.config import TrainerConfig

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(asked["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    config = msgspec.convert(asked["trainer"], TrainerConfig)
    tasks = [msgspec.json.decode(line, type=Task) for line in Path(asked["tasks"]).read_bytes().splitlines()]
    rows = [
        {"prompt": msgspec.to_builtins(task.messages), "answer": task.answer, "split": task.split} for task in tasks
    ]
    practice, looked = ([row for row in rows if row["split"] == asked[name]] for name in ("split", "suite"))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward_by(tokenizer.eos_token_id)],
        args=settings_of(asked, config),
        train_dataset=Dataset.from_list(practice),
        processing_class=tokenizer,
        callbacks=[looking(asked, lambda: accuracy(asked, model, tokenizer, looked))],
        optimizers=optimizers(model, config),
    )
    trainer.train()


def shares(texts: list[str], answers: list[str], ended: list[bool]) -> list[float]:
    """Share of its instructions that each text follows, 0 for a text cut off at its limit, as the demo's score."""
    from streams.scores.instructions import follows

    rules = [json.loads(answer) for answer in answers]
    return [
        sum(follows(text, *rule) for rule in mine) / len(mine) if whole else 0.0
        for text, mine, whole in zip(texts, rules, ended, strict=True)
    ]


def reward_by(end: int) -> Callable[..., list[float]]:
    """end: id of the token that ends an answer."""

    def instructions(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        return shares([each[0]["content"] for each in completions], answer, [end in ids for ids in completion_ids])

    return instructions


def settings_of(asked: dict[str, Any], config: Any) -> Any:
    """TRL's settings that are the demo's."""
    from trl import GRPOConfig

    answers = asked["groups"] * asked["num_episodes"]
    return GRPOConfig(
        output_dir=asked["folder"], use_cpu=True, bf16=config.dtype == "bfloat16", seed=asked["seed"], max_steps=10**6,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=answers // ROWS,
        num_generations=asked["num_episodes"], max_completion_length=asked["max_tokens"],
        temperature=asked["temperature"], beta=0.0, learning_rate=config.learning_rate,
        max_grad_norm=config.gradient_clip, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip


def optimizers(model: Any, config: Any) -> tuple[Any, Any]:
    """AdamW and the schedule, as headrace has them."""
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR

    from trainer.batch.assemble import learning_rate_at

    found = AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
    return found, LambdaLR(found, lambda done: learning_rate_at(config, "train", done) / config.learning_rate)


def looking(asked: dict[str, Any], share: Callable[[], float]) -> Any:
    """Callback that reports how far training is, and ends it. share: met by now."""
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
            met = share()
            taken = {"wall_s": time.perf_counter() - self.wall_s, "cpu_s": time.process_time() - self.cpu_s}
            say({"step": state.global_step, "accuracy": met, **taken})
            control.should_training_stop = met >= asked["at"]

    return Looking()


def accuracy(asked: dict[str, Any], model: Any, tokenizer: Any, tasks: list[dict[str, Any]]) -> float:
    """Share of the prompts whose greedy answer follows every instruction."""
    import torch

    met = 0
    model.eval()
    for at in range(0, len(tasks), LOOK_ROWS):
        part = tasks[at : at + LOOK_ROWS]
        prompts = tokenizer.apply_chat_template(
            [task["prompt"] for task in part],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        with torch.no_grad():
            ids = model.generate(**prompts, max_new_tokens=asked["max_tokens"], do_sample=False, temperature=None)
        answers = ids[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        ended = [tokenizer.eos_token_id in row for row in answers.tolist()]
        met += sum(share == 1.0 for share in shares(texts, [task["answer"] for task in part], ended))
    model.train()
    return met / len(tasks)


def say(what: dict[str, Any]) -> None:
    """One line for the parent process."""
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
