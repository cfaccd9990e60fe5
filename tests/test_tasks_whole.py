"""Whole runs on files of one's own: from the words on the command line to the rewards in the records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tiny_hf import make_folder
from typed import done, json_lines

LEAN = "device=cpu", "eval.k=1"
SMALL = ["n=2", "m=2", "train.steps=1", "train.prompts=2", "eval.problems=2", "logger=jsonl"]
FUNCTION = """
def score(reply, answer, row):
    return {"correct": float(answer in reply), "words": 0.1 * reply.count(" "), "level": row["level"]}
"""


def test_ones_own_file_function_and_stop_strings_train_a_model_that_is_evaluated(elsewhere: Path) -> None:
    make_folder(elsewhere / "model")
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i), "level": i} for i in range(8)]
    (elsewhere / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (elsewhere / "rewards_of_a_run.py").write_text(FUNCTION)
    own = ("model=hf", "model.path=model", "task=jsonl", "task.path=mine.jsonl", "sampling.max_new_tokens=12")
    letters = "[" + ",".join("abcdefghijklmnopqrstuvwxyz") + "]"
    reward = ("task.reward=rewards_of_a_run:score", "task.few_shot=1", f"sampling.stop={letters}")
    done("train", *own, *SMALL, *reward, "hydra.run.dir=run", *LEAN)
    last = json_lines(elsewhere / "run" / "metrics.jsonl")[-1]
    assert {"reward/correct", "reward/words", "reward/level"} <= last.keys()
    ended = [str(row["reply"]) for row in json_lines(elsewhere / "run" / "rollouts.jsonl") if row["finish"] == "stop"]
    assert ended and all(any(c in reply for c in letters if c.isalpha()) for reply in ended)
    shutil.copy("mine.jsonl", "copy.jsonl")  # stop strings and function come along, and what was held out
    done("eval", "checkpoint=run", "task.path=copy.jsonl", "eval.problems=-1", "hydra.run.dir=eval1", *LEAN)
    assert len(json_lines(elsewhere / "eval1" / "samples.jsonl")) == 2
    for words, count in (((), 8), (("task.eval_fraction=0.125",), 1), (("eval.split=train",), 7)):  # else all of a file
        printed = done("eval", *own, "eval.problems=-1", *words, f"hydra.run.dir=held_out{count}", *LEAN)
        assert ["problems", str(count)] in map(str.split, printed.splitlines())
