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
TOWER = r"5^{5^{5^{5^5}}}"


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    pytest.importorskip("math_verify")
    judge = MathJudge("correct", 10.0, 1)
    yield judge
    judge.close()


def reply(text: str, gold: str) -> Completion:
    return Completion("sample 0 of prompt p", [text], gold, True, 1, Problem(1, "line 1", "q", gold))


def started(judge: MathJudge) -> bool:
    return any(worker._process is not None for worker in judge._workers._workers)


def verdict(judge: MathJudge, gold: str, answer: str) -> dict[str, float]:
    return {name: value for name, value in judge([reply(rf"\boxed{{{answer}}}", gold)])[0].items() if value}


PAIRS = Path(__file__).with_name("judge_pairs.txt").read_text("utf-8").splitlines()


def test_published_formats_of_answers_are_told_apart_and_recognised(judge: MathJudge) -> None:
    pairs = [line.split("\t") for line in PAIRS if not line.startswith("#")]
    assert len({(gold, answer) for gold, answer, _ in pairs}) == len(pairs) >= 300
    parts = judge([reply(rf"\boxed{{{answer}}}", gold) for gold, answer, _ in pairs])
    found = [(*pair, "equal" if it["correct"] else "different") for pair, it in zip(pairs, parts, strict=True)]
    assert [it for it in found if it[2:] == ("different", "equal")] == []
    missed = [it for it in found if it[2:] == ("equal", "different")]
    assert len(missed) <= len(pairs) / 100, missed


def test_who_hangs_is_a_counted_zero_within_the_limit_and_asked_once() -> None:
    pytest.importorskip("math_verify")
    judge = MathJudge("correct", 4.0, 2)
    replies = [reply(rf"\boxed{{{text}}}", "2x") for text in (TOWER, "x+x", r"(10^9)!", "3x")] * 3
    parts = judge(replies)
    assert [p["over_limit"] for p in parts] == [1.0, 0.0, 1.0, 0.0] * 3
    assert [p["correct"] for p in parts] == [0.0, 1.0, 0.0, 0.0] * 3
    judge.close()
    assert [p["over_limit"] for p in judge(replies)] == [1.0, 0.0, 1.0, 0.0] * 3  # remembered: no worker is started
    assert not started(judge)


def test_what_only_looks_like_code_is_not_run(judge: MathJudge, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    for text in (f"__import__('os').system('touch {proof}')", rf"\text{{__import__('os').system('touch {proof}')}}"):
        assert "correct" not in verdict(judge, "5", text)
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
    parts = judge([reply(rf"\boxed{{{text}}}", "a") for text in ("y", "z", "w", "zz")])
    assert [p["correct"] for p in parts] == [1.0, 0.0, 1.0, 0.0]
    assert [p["incomparable"] for p in parts] == [0.0, 1.0, 0.0, 1.0]
    judge.close()


def math_file(path: Path, *solutions: str) -> str:
    rows = [{"problem": f"problem {i}", "solution": text} for i, text in enumerate(solutions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_answers_are_the_last_boxes_of_solutions_or_short_texts(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = math_file(tmp_path / "m.jsonl", r"First \boxed{1}, so \boxed{\frac{1}{2}}.", "2x", "1 + 1\n#### 2")
    task = task_of("math", TOKENIZER, path=path, eval_fraction=1.0)
    prompts = list(task.prompts("eval"))
    assert [prompt.answer for prompt in prompts] == [r"\frac{1}{2}", "2x", "2"]
    rewards = task.rewards([(prompt, rollout_of(prompt, r"\boxed{0.5}", TOKENIZER)) for prompt in prompts[:2]])
    assert [reward.total for reward in rewards] == [1.0, 0.0]
    assert set(rewards[0].parts) == {"correct", "correct_strict", "over_limit", "incomparable"}
    with pytest.raises(UserError, match="lower task.eval_fraction"):
        task.prompts("train")
