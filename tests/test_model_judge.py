"""`task.reward=judge`: a model's scores, whatever the server does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from judging import Server, said
from typed import json_lines

from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build
from grpo_cli.support.errors import UserError
from grpo_cli.tasks import model_judge
from grpo_cli.tasks.judges import Completion
from grpo_cli.tasks.model_judge import JudgeSettings, ModelJudge
from grpo_cli.tasks.problems import Problem

REPLY = re.compile(r"<reply[^>]*>\n(.*?)\n</reply>", re.S)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_judge, "BACK_OFF", 0.0)


@pytest.fixture
def server() -> Iterator[Server]:
    yield (found := Server(by_length))
    found.close()


def by_length(question: str) -> str:
    """A tenth for each letter of a completion."""
    return json.dumps({"score": min(len(REPLY.findall(question)[0]), 10) / 10})


def judge_of(server: Server, run_dir: Path | None = None, lines: list[str] | None = None, **changed: Any) -> ModelJudge:
    words: dict[str, Any] = dict(prompt=None, concurrency=4, timeout=30.0, max_tokens=64, key=None)
    settings = JudgeSettings(**{"base_url": server.url, "model": "judge"} | words | changed)
    return ModelJudge(settings, run_dir, ([] if lines is None else lines).append)


def scores(judge: ModelJudge, *replies: str) -> list[float | None]:
    problem = Problem(1, "rows, line 1", "question 1", "gold")
    return [parts.get("score") for parts in judge([Completion("it", [it], "gold", True, 3, problem) for it in replies])]


def test_what_was_said_is_kept_and_not_asked_again(server: Server, tmp_path: Path) -> None:
    first = judge_of(server, tmp_path)
    assert scores(first, "a", "a", "bb") == [0.1, 0.1, 0.2]
    assert len(server.questions) == 2, "equal questions are one"
    assert "question 1" in server.questions[0] and "gold" in server.questions[0]
    with (tmp_path / "judgements.jsonl").open("a") as file:
        file.write('{"question": "torn')
    again = judge_of(server, tmp_path)
    server.answer = lambda question: '{"score": 1.0}'
    assert scores(again, "a", "bb", "new") == [0.1, 0.2, 1.0]
    assert again.take_metrics() == {"judge/questions": 1, "judge/kept": 2, "judge/failed": 0}
    assert again.take_metrics()["judge/questions"] == 0
    assert scores(judge_of(server, tmp_path, model="another"), "a") == [1.0], "another model may say something else"
    assert scores(judge_of(server, tmp_path), "new") == [1.0], "a torn line spoils none after it"


BAD = {
    "prose": "I would give it a 0.9.",
    "a billion": '{"score": 1000000000.0}',
    "NaN": '{"score": NaN}',
    "digits": '{"score": ' + 5000 * "1" + "}",
    "deep": 9000 * "[",
    "content of another kind": (200, said([{"type": "text"}])),
    "cut off": (200, said('{"score": 0.5}', "length")),
    "cut off in a thought": (200, said(None, "length")),
    "bad request": (400, "no"),
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_an_answer_that_is_no_score_is_none(server: Server, answer: Any, tmp_path: Path) -> None:
    """Said once with its reason, never tried again, since it would be the same; the others' scores stand."""
    server.answer = lambda question: answer if "<reply>\nbad" in question else by_length(question)
    lines = list[str]()
    judge = judge_of(server, tmp_path, lines)
    assert scores(judge, "aa", "bad", "bad", "a") == [0.2, None, None, 0.1]
    assert judge.take_metrics() == {"judge/questions": 3, "judge/kept": 0, "judge/failed": 1}
    assert ("task.judge.max_tokens" in lines[0]) == ('"length"' in str(answer))
    assert len(lines) == 1 and "1 of 3 questions" in lines[0] and "\n" not in lines[0] and len(lines[0]) < 400
    server.answer = by_length
    assert scores(judge_of(server, tmp_path), "bad") == [0.3], "a failure is not kept"


def test_a_fence_and_a_thought_around_it_are_no_harm(server: Server) -> None:
    """The last one for minutes, where white space is tried twice."""
    for content in (
        ' ```\r\n\n{"score":\n 0.5}\n\n \t``` \n',
        '<think>\n{"score": 1}\n</think>\n\n{"score": 0.5}',
        '<think>It wrote </think>{"score": 1}, so</think>{"score": 0.5}',
        '```json\n{"score": 0.5}' + "\n \n" * 50_000 + "```",
    ):
        server.answer = lambda question, content=content: content
        assert scores(judge_of(server), "a") == [0.5]


def test_a_server_that_fails_for_a_while_is_asked_again(server: Server) -> None:
    left = iter([(503, "busy"), (429, "slowly"), '{"score": 0.5}'])
    server.answer = lambda question: next(left)
    assert scores(judge_of(server), "a") == [0.5] and len(server.questions) == 3
    server.answer = lambda question: (500, "\x1b[31mbroken")
    lines = list[str]()
    assert scores(judge_of(server, None, lines), "a") == [None] and len(server.questions) == 8
    assert "status 500" in lines[0] and "\x1b" not in lines[0]


def test_an_answer_that_does_not_come_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    post = httpx.Client.post
    limit = lambda json: {} if "<reply>\nbad" in json["messages"][0]["content"] else {"timeout": 300.0}  # noqa: E731
    monkeypatch.setattr(httpx.Client, "post", lambda *given, json: post(*given, json=json, **limit(json)))
    server.answer = lambda question: None if "<reply>\nbad" in question else by_length(question)
    lines = list[str]()
    assert scores(judge_of(server, None, lines, timeout=0.3), "bad", "a") == [None, 0.1]
    assert "task.judge.timeout" in lines[0]


def test_the_words_of_a_template_are_put_in_once(server: Server, tmp_path: Path) -> None:
    prompt = tmp_path / "rubric.txt"
    prompt.write_text('{question}|{answer}|{reply} {"score": x}', encoding="utf-8")
    judge, server.answer = judge_of(server, prompt=str(prompt)), lambda question: '{"score": 1}'
    scores(judge, "{answer} {question}")
    assert server.questions == ['question 1|gold|{answer} {question} {"score": x}']
    prompt.write_text("{question}")
    for path, named in ((prompt, "{reply}"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=f"task.judge.prompt.*{named}"):
            judge_of(server, prompt=str(path))


def test_what_cannot_be_asked_is_refused_at_the_start(server: Server) -> None:
    server.models = (404, "none")
    judge_of(server)
    server.models = (401, "who?")
    with pytest.raises(UserError, match="task.judge.key"):
        judge_of(server)
    with pytest.raises(UserError, match="task.judge.key=NO_SUCH"):
        judge_of(server, key="NO_SUCH")
    for address in ("127.0.0.1:8000", "ftp://x/v1", "http://", "http://me:secret@host/v1", None):
        with pytest.raises(UserError, match="task.judge.base_url"):
            judge_of(server, base_url=address)
    server.close()
    with pytest.raises(UserError, match="task.judge.base_url=.* does not answer"):
        judge_of(server)


def test_a_key_goes_to_the_server_alone(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", "very-secret-word")
    lines = list[str]()
    judge = judge_of(server, tmp_path, lines, key="JUDGE_KEY")
    for answer in ((400, "the key very-secret-word is wrong"), "I was called with very-secret-word"):
        server.answer = lambda question, answer=answer: answer
        scores(judge, "a")
        assert "secret" not in lines[-1] and "<hidden>" in lines[-1]
    assert [found["Authorization"] for found in server.headers] == ["Bearer very-secret-word"] * 3
    server.answer = by_length
    scores(judge, "a")
    assert all("secret" not in file.read_text() for file in tmp_path.iterdir())


def run_of(folder: Path, server: Server, *words: str) -> Any:
    rows = folder.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{i}", "answer": "x"}) + "\n" for i in range(20)))
    task = f"task=jsonl task.path={rows} task.reward=judge task.judge.base_url={server.url} task.judge.model=judge"
    short = "n=4 train.prompts=3 train.steps=2 sampling.max_new_tokens=8 eval.every=0 logger=jsonl seed=1"
    more = f"model.random_init=true train.checkpoint_every=1 run_dir={folder}"
    return build(settings_of(*task.split(), *short.split(), *more.split(), *words))


def test_a_run_goes_on_with_the_same_rewards(server: Server, tmp_path: Path) -> None:
    """The judge has changed its mind meanwhile, and what it said before still counts."""
    run_of(tmp_path / "alone", server).fit()
    (tmp_path / "cut").mkdir()
    kept = (tmp_path / "alone" / "judgements.jsonl").read_text()
    (tmp_path / "cut" / "judgements.jsonl").write_text(kept)
    server.answer = lambda question: '{"score": 0.0}'
    run_of(tmp_path / "cut", server, "train.steps=1").fit()
    run_of(tmp_path / "cut", server, f"resume={tmp_path / 'cut'}").fit()
    alone, cut = json_lines(tmp_path / "alone" / "metrics.jsonl"), json_lines(tmp_path / "cut" / "metrics.jsonl")
    assert [row["reward/mean"] for row in cut[1:]] == [row["reward/mean"] for row in alone[1:]]
    assert [row["judge/questions"] for row in cut[1:]] == [0, 0]
    assert alone[1]["reward/mean"] > 0 and alone[1]["reward/score"] == pytest.approx(alone[1]["reward/mean"])
    assert (tmp_path / "cut" / "judgements.jsonl").read_text() == kept


def test_a_group_without_a_judgement_is_left_out_and_a_step_without_any_stops(server: Server, tmp_path: Path) -> None:
    first = list[str]()

    def but_one(question: str) -> str:
        first.append(question.partition("</question>")[0])
        return "no" if question.startswith(first[0]) else by_length(question)

    server.answer = but_one
    run_of(tmp_path / "one", server, "task.judge.concurrency=1").fit()
    rows = json_lines(tmp_path / "one" / "metrics.jsonl")
    assert [row.get("collect/unjudged_groups") for row in rows[1:]] == [1.0, None]
    assert rows[1]["judge/failed"] > 0 == rows[2]["judge/failed"]
    assert rows[1]["collect/dropped_groups"] == 0 == rows[1]["collect/tokens_dropped"], "the collector returned it"
    assert [row["rollouts/generated"] for row in rows[1:]] == [8, 20], "it is in no figure"
    server.answer = lambda question: "no"
    with pytest.raises(UserError, match="judge.*resume=auto"):
        run_of(tmp_path / "none", server).fit()
    server.answer = by_length
    run_of(tmp_path / "none", server, f"resume={tmp_path / 'none'}").fit()
    assert len(json_lines(tmp_path / "none" / "metrics.jsonl")) == 3
