"""The program behind `reasoning_gym.py`: makes problems of the library `reasoning-gym`, and scores answers to them.

It runs as a script, so that it can be killed, and with a fixed PYTHONHASHSEED, on which some of the library's problems
depend. Each line is a JSON object: `check` asks whether a task accepts a config, `index` for a problem, and with
`reply` for the score of an answer (null: none). Only scorers that do not execute a reply get one (`REFUSED`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from grpo_cli.tasks.math_worker import serve

BLOCK = 500  # problems of one data set of the library, some of which make all of them at once


def answers() -> Callable[[Any], dict[str, Any]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    @lru_cache(maxsize=32)
    def dataset(task: str, config: str, seed: str) -> Any:
        number = Random(f"{task}/{seed}").getrandbits(31)  # the library adds a problem's place to it
        return reasoning_gym.create_dataset(task, seed=number, size=BLOCK, **json.loads(config))

    @lru_cache(maxsize=64)  # the replies to one question come one after the other
    def entry(task: str, config: str, seed: str, place: int) -> Any:
        return dataset(task, config, seed)[place]

    def checked(task: str, config: dict[str, Any]) -> dict[str, Any]:
        if task not in DATASETS:
            return {"names": sorted(DATASETS)}
        words = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
        if unknown := sorted(config.keys() - words):
            return {"unknown": unknown[0], "words": sorted(words)}
        try:
            dataset(task, json.dumps(config), "tried")
        except Exception as error:  # a library's: assertions, and what wrong types end in
            return {"refused": f"{type(error).__name__}: {error}"[:300]}
        return {}

    def answer(asked: Any) -> dict[str, Any]:
        if "check" in asked:
            return checked(asked["check"], asked["config"])
        block, place = divmod(asked["index"], BLOCK)
        which = (asked["task"], json.dumps(asked["config"]), f"{asked['seed']}/{block}")
        found = entry(*which, place)
        if "reply" not in asked:
            oracle = found["answer"]
            return {"question": str(found["question"]), "answer": "" if oracle is None else str(oracle)}
        try:
            return {"score": float(dataset(*which).score_answer(asked["reply"], found))}
        except (MemoryError, RecursionError) as error:
            return {"limit": type(error).__name__}
        except Exception as error:  # no scorer is meant to raise, and many do
            return {"incomparable": f"{type(error).__name__}: {error}"[:200]}

    return answer


if __name__ == "__main__":
    serve(answers, float(sys.argv[1]))
