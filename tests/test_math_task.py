"""The task math: what counts as the same expression, and that no reply can hang, crash or fool the judge unnoticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_hf import make_tokenizer
from words import rollout_of, task_of

from grpo_cli.support.errors import UserError
from grpo_cli.tasks import math_judge, workers
from grpo_cli.tasks.judges import Completion
from grpo_cli.tasks.math_judge import MathJudge
from grpo_cli.tasks.problems import Problem

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    pytest.importorskip("math_verify")
    judge = MathJudge("correct", 4.0, 2)
    yield judge
    judge.close()


def judged(judge: MathJudge, *pairs: tuple[str, str]) -> list[dict[str, float]]:
    problem = Problem(1, "line 1", "q", "")
    return judge([Completion("it", [rf"\boxed{{{answer}}}"], gold, True, 1, problem) for gold, answer in pairs])


def test_published_formats_of_answers_are_told_apart_and_recognised(judge: MathJudge) -> None:
    lines = Path(__file__).with_name("judge_pairs.txt").read_text("utf-8").splitlines()
    pairs = [line.split("\t") for line in lines if not line.startswith("#")]
    assert len({(gold, answer) for gold, answer, _ in pairs}) == len(pairs) >= 300
    parts = judged(judge, *((gold, answer) for gold, answer, _ in pairs))
    found = [(*pair, "equal" if it["correct"] else "different") for pair, it in zip(pairs, parts, strict=True)]
    assert [it for it in found if it[2:] == ("different", "equal")] == []
    missed = [it for it in found if it[2:] == ("equal", "different")]
    assert len(missed) <= len(pairs) / 100, missed


def test_who_hangs_is_a_counted_zero_within_the_limit_and_asked_once(judge: MathJudge) -> None:
    pairs = [("2x", text) for text in (r"5^{5^{5^{5^5}}}", "x+x", r"(10^9)!", "3x")] * 3
    parts = judged(judge, *pairs)
    assert [p["over_limit"] for p in parts] == [1.0, 0.0, 1.0, 0.0] * 3
    assert [p["correct"] for p in parts] == [0.0, 1.0, 0.0, 0.0] * 3
    judge.close()
    assert judged(judge, *pairs) == parts  # remembered: no worker is started
    assert not any(worker._process for worker in judge._workers._workers)


def test_what_only_looks_like_code_is_not_run(judge: MathJudge, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    call = f"__import__('os').system('touch {proof}')"
    assert not any(it["correct"] for it in judged(judge, ("5", call), ("5", rf"\text{{{call}}}")))
    assert not proof.exists()


DYING = """
import json, os, sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
reply = {"ready": True}
while reply != {"died": "sympy is broken"}:
    pipe.send_bytes(json.dumps(reply).encode())
    reply = {"died": "sympy is broken"} if "z" in json.loads(pipe.recv_bytes())["answer"] else {"equal": True}
"""


def test_a_judge_that_crashes_counts_a_zero_and_the_others_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(DYING)
    monkeypatch.setattr(workers, "SCRIPT", tmp_path / "worker.py")
    monkeypatch.setattr(math_judge, "require", lambda *words: None)
    judge = MathJudge("correct", 10.0, 1)
    parts = judged(judge, *(("a", text) for text in ("y", "z", "w", "zz")))
    assert [p["correct"] for p in parts] == [1.0, 0.0, 1.0, 0.0]
    assert [p["incomparable"] for p in parts] == [0.0, 1.0, 0.0, 1.0]
    judge.close()


def test_answers_are_the_last_boxes_of_solutions_or_short_texts(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    solutions = (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", "2x", "1 + 1\n#### 2")
    rows = [{"problem": f"problem {i}", "solution": text} for i, text in enumerate(solutions)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = task_of("math", TOKENIZER, path=str(tmp_path / "m.jsonl"), eval_fraction=1.0)
    prompts = list(task.prompts("eval"))
    assert [prompt.answer for prompt in prompts] == [r"\frac{1}{2}", "2x", "2"]
    rewards = task.rewards([(prompt, rollout_of(prompt, r"\boxed{0.5}", TOKENIZER)) for prompt in prompts[:2]])
    assert [reward.total for reward in rewards] == [1.0, 0.0]
    assert set(rewards[0].parts) == {"correct", "correct_strict", "over_limit", "incomparable"}
    with pytest.raises(UserError, match="lower task.eval_fraction"):
        task.prompts("train")
