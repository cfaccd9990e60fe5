"""What answers a model: text in, text out, and the tokens in between."""

from __future__ import annotations

import json
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import environments
import made
import pytest
from environments import Responding
from made import rollout_of
from tiny_hf import TURN_END, make_tokenizer

from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks import turns
from grpo_cli.tasks.prompting import Prompting
from grpo_cli.types import ENVIRONMENT, Finish, Request, Rollout, Span

PLAIN, CHAT = make_tokenizer(), make_tokenizer(chat_template=True)


TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = make_tokenizer(chat_template=TOOLS)
TAKE = '<tool_call>{"name": "take", "arguments": {"count": 2}}</tool_call>'


@pytest.fixture
def rows(tmp_path: Path) -> str:
    made = [{"question": f"q{i}", "answer": str(i), "hint": "!", "heard": []} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(tmp_path / "rows.jsonl")


RESPONDING = {"environment": "environments:Responding"}


def talking(rows: str, tokenizer: Any = PLAIN, **words: Any) -> Any:
    return made.task("jsonl", tokenizer, path=rows, **{"turns": 3} | words)


def heard(task: Any, *said: str, prompt: int = 0) -> Any:
    """What is answered to these turns."""
    turns = [task._prompting.tokenizer.encode(text, add_special_tokens=False) for text in said]
    return task.respond(task.prompts("train")[prompt], turns).result(timeout=300)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a call runs from when it sleeps: one that does not may take what a busy machine needs."""
    asleep = Event()

    def wait_patiently(futures: Any, seconds: float) -> Any:
        while not (futures[0].done() or asleep.is_set()):
            time.sleep(0.0001)
        asleep.clear()
        return wait(futures, seconds)

    monkeypatch.setattr(turns, "wait", wait_patiently)
    sleeping = SimpleNamespace(sleep=lambda seconds: asleep.set() or time.sleep(seconds))
    monkeypatch.setattr(environments, "time", sleeping)


# What a user's code does, and what the model reads then: all but the last four with an error that is counted.
ANSWERED = {
    "key": "error: KeyError: 'k'",
    "mute": "error: Mute: ",
    "stop": "error: Stop: ",
    "syntax": "error: SyntaxError: s",
    "deep": "error: RecursionError: maximum recursion depth exceeded",
    "object": "error: TypeError: returned a object, which is no text",
    "number": "7",
    "nothing": "",
    "much": "x" * 100_000,
    "half": "a?b",
}


@pytest.mark.parametrize("how", ANSWERED)
def test_what_user_code_does_wrong_is_answered_counted_and_named_once(rows, how):
    call = '<tool_call>{"name": "%s", "arguments": {"how": "%s"}}</tool_call>'
    failed, tools = ANSWERED[how].startswith("error: "), {"tools": "environments:now,later"}
    for words, first, turn in (
        (RESPONDING, "a", how),
        (tools, call % ("now", "a"), call % ("now", how)),
        (tools, call % ("now", "a"), call % ("later", how)),
    ):
        warned: list[str] = []
        task = talking(rows, PLAIN if words is RESPONDING else WITH_TOOLS, warn=warned.append, **words)
        for _ in range(2):
            (answer,) = heard(task, first, turn)
            assert answer.startswith(ANSWERED[how]) and len(answer) <= 100_000
        assert task.take_metrics() == {"turns/errors": 2.0 * failed} and task.take_metrics() == {"turns/errors": 0.0}
        assert len(warned) == (failed or how in ("much", "half"))
        assert task.between([[5]], [answer]), "it can be read"


@pytest.mark.parametrize(
    ("how", "named"), [("slow", "respond_seconds=0.1"), ("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")]
)
def test_a_late_answer_is_answered_and_code_that_hangs_or_exits_elsewhere_ends_the_run_by_its_name(rows, how, named):
    words, warned = {**RESPONDING, "respond_seconds": 0.1, "reward": "environment"}, list[str]()
    task = talking(rows, warn=warned.append, **words)
    if how == "slow":  # the model may have caused that
        assert heard(task, "a", how) == ["error: no answer in 0.1 seconds"] and len(warned) == 1
        assert task.take_metrics() == {"turns/errors": 1.0}
    else:
        with pytest.raises(UserError, match=f"Responding, called after turn 2 of prompt train-.*, respond.*{named}"):
            heard(task, "a", how)
    prompt = task.prompts("train")[0]
    with pytest.raises(UserError, match=f"get_reward for the row .*hint.*{named}"):
        task.reward(prompt, rollout_of(prompt, how, PLAIN))
    with pytest.raises(UserError, match=f"reset for line 1,.*{named}"):
        task._environment.opens({"question": "q", "answer": "1", "opening": how}, "line 1")


def test_an_environment_that_is_late_once_is_not_called_random_and_its_object_is_left(rows, monkeypatch):
    monkeypatch.setattr(environments, "_WAS_LATE", [])
    task = talking(rows, warn=list().append, **RESPONDING | {"respond_seconds": 0.1})
    assert heard(task, "a", "once") == ["error: no answer in 0.1 seconds"] and task._environment._waiting == {}
    assert heard(task, "a", "once") == ["2: not once !"]


def test_an_object_is_kept_from_turn_to_turn_and_the_oldest_makes_room(rows, monkeypatch):
    task = talking(rows, turns=9, **RESPONDING)
    prompt = task.prompts("train")[0]

    def answered(*said: str) -> tuple[Any, int]:
        before = Responding.resets
        reply = task._environment.observe(prompt, {"answer": "1", "hint": "!"}, said, "who")
        return reply.messages, Responding.resets - before

    assert answered("a") == (["1: not a !"], 2), "the first answer of a run is made twice"
    assert answered("a", "b") == (["2: not b !"], 0) and answered("a", "b", "c") == (["3: not c !"], 0)
    monkeypatch.setattr(turns, "MOST_WAITING", 2)
    assert [answered(said)[1] for said in "efg"] == [1, 1, 1]
    assert answered("g", "h") == (["2: not h !"], 0) and answered("e", "h") == (["2: not h !"], 1)
    assert answered("1") == (None, 1) and answered("1", "h") == (["2: not h !"], 1), "none is kept at an end"


@pytest.mark.parametrize(
    ("environment", "said", "worth"),
    [("Counter", 3 * [2], -4.0), ("Counter", [2], 0.0), ("Hearing", [*"abc"], 3.0)] + [("Hearing", ["a", "key"], 1.0)],
)
def test_an_episode_is_scored_by_what_the_model_has_read(rows, environment, said, worth):
    """The calls of a last turn, which nobody answers, are not made; a turn that is an answer itself is heard."""
    tokenizer, counts = (WITH_TOOLS, True) if environment == "Counter" else (PLAIN, False)
    words, warned = {"reward": "environment", "environment": f"environments:{environment}"}, list[str]()
    task = talking(rows, tokenizer, warn=warned.append, **words)
    prompt = task.prompts("train")[0]
    said = [TAKE if one == 2 else one for one in said]
    parts = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in said]
    spans = [Span(0, len(parts[0])), *(it for part in parts[1:] for it in (Span(ENVIRONMENT, 0), Span(0, len(part))))]
    ids = sum(parts, ())
    episode = Rollout(Request(prompt, 0, 0, Sampling.plain(999)), ids, (0.0,) * len(ids), Finish.EOS, tuple(spans))
    assert [task.text(turn) for turn in episode.turns] == said
    assert task.reward(prompt, episode).total == counts * float(prompt.answer) + worth
    assert task.take_metrics()["turns/errors"] == said.count("key") == len(warned), "of the last turn, too"
    if said == [*"abc"]:
        assert heard(task, "a", "b") == ["a b"], "a list of its row is its own"


def test_what_reset_returns_goes_behind_a_question_that_is_generated():
    task = made.task("word_problems", PLAIN, turns=2, environment="environments:Hearing", eval_problems=2)
    for prompt in (task.prompts("eval")[1], task.prompts("train")[7]):
        assert f"{task.row_of(prompt)['question']} Hint: {prompt.answer}" in task.text(prompt.token_ids)


def test_tools_are_called_by_what_the_model_writes_and_faults_are_told_to_it(rows):
    task = talking(rows, WITH_TOOLS, tools="environments:add", turns=4)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert heard(task, call) == ["5"] and heard(task, call + "then" + call) == ["5", "5"]
    assert heard(task, "no call") is None
    bad = {
        "<tool_call>{": "no end",
        "<tool_call>not json</tool_call>": "no JSON",
        call.replace('{"a": 2, "b": 3}', "[1]"): "an object",
        call.replace(', "b": 3', ""): "TypeError",
        call.replace('"add"', '["add"]'): "none of add",
        call.replace("</", " and</"): "no JSON",
        f"<tool_call>{'[' * 99_999}</tool_call>": "no JSON",
        call.removeprefix("<tool_call>"): "no beginning",
        f"<tool_call>{call}": "no end",
    }
    assert [why for turn, why in bad.items() if why not in heard(task, turn)[0]] == []
    assert task.take_metrics() == {"turns/errors": 9.0}
    assert heard(task, f"{call}<tool_call>")[0] == "5"
    assert "add" in task.text(task.prompts("train")[0].token_ids), "the prompt names the tool"


NO_BEGINNING = "the tool call has no beginning: open it with <tool_call>"
CALL = '<tool_call>{"name": "now", "arguments": {"how": "a"}}</tool_call>'


@pytest.mark.parametrize(
    ("turn", "answers", "in_thought"),
    [
        (f"<think>{CALL}</think>", None, None),
        (f"<think>{CALL}</think>{CALL}", ["a"], ["a"]),
        (f"{CALL}<think>{CALL}</think>{CALL}", ["a", "a"], ["a"]),
        (f"<think>a</think>b<think>{CALL}", None, None),
        (f"{CALL}</think>", None, None),
        (f"{CALL}</think>{CALL}", ["a"], ["a"]),
        (CALL, ["a"], None),
        (CALL.replace('"a"', '"<think>"'), ["<think>"], None),
        (CALL.replace('"a"', '"</think>"'), ["</think>"], [f"error: {NO_BEGINNING}"]),
        (CALL.replace('"a"', '"x</tool_call>y<tool_call>"'), ["x</tool_call>y<tool_call>"], None),
        (CALL.replace("}}", "}}\n\t "), ["a"], None),
    ],
)
def test_a_call_is_read_whole_and_none_is_made_in_a_thought(rows, turn, answers, in_thought):
    """Also where the chat template begins a turn with the thought's tag."""
    begins = TOOLS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert begins != TOOLS
    for template, expected in ((TOOLS, answers), (begins, in_thought)):
        tokenizer = make_tokenizer(chat_template=template)
        task = talking(rows, tokenizer, tools="environments:now", keep_reasoning=True)
        assert heard(task, turn) == expected


def test_no_tool_call_that_a_model_writes_ends_a_run(rows):
    """600 of them, made of pieces of right and wrong ones, each answered by text that can be read, or by the end."""
    warned, rng = list[str](), Random(0)
    tools = talking(rows, WITH_TOOLS, tools="environments:now,later,add", warn=warned.append)
    plain = talking(rows, warn=warned.append, **RESPONDING)
    names = ["now", "later", "add", "rm", "", "__class__", ["now"], {"now": 1}, None, 7, True]
    values = [*ANSWERED, "none", "next", "\ud800", 5, -1e308, float("nan"), 10**400, None, [], {}, [[[]]], {"a": "b"}]
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>", *'{}[]",:\\\n\x00é', "```json", "<function=add>"]

    def call() -> str:
        words = {word: rng.choice(values) for word in rng.sample(["how", "a", "b", "self", "*", ""], rng.randrange(4))}
        one = rng.choice([{"how": rng.choice(values)}, rng.choice(values), words])
        whole: Any = {"name": rng.choice(names), "arguments": one}
        return f"<tool_call>{json.dumps(rng.choice([whole, whole, whole, [whole], one]))}</tool_call>"

    def cut(text: str) -> str:
        place = rng.randrange(len(text) + 1)
        return text[:place] + rng.choice(["", rng.choice(marks)]) + text[place + rng.randrange(3) :]

    answered, prompt = 0, plain.prompts("train")[0]
    for _ in range(300):
        text = "".join(rng.choice([call, call, lambda: cut(call()), lambda: rng.choice(marks)])() for _ in range(3))
        for task, turn in ((tools, text), (plain, str(rng.choice(values)))):
            turn = turn.encode("utf-8", "replace").decode()  # what tokens can say
            found = task._environment.observe(prompt, {"answer": "1"}, [turn], "who")
            task._note(found)
            assert all(len(message.encode()) <= 100_000 for message in found.messages or ())
            answered += found.messages is not None
    assert answered > 450 and tools.take_metrics()["turns/errors"] > 150 and plain.take_metrics()["turns/errors"] > 60
    assert len(warned) == len(set(warned)) < 99, "each kind is named once"


def test_typed_methods_are_tools_and_what_reset_returns_goes_behind_the_question(rows):
    task = talking(rows, WITH_TOOLS, environment="environments:Counter", turns=4)
    left = int(task.prompts("train")[0].answer)
    assert heard(task, TAKE, TAKE) == [f"{left - 4} left"] and heard(task, TAKE) == [f"{left - 2} left"]
    plain = task.text(task.prompts("eval")[0].token_ids)
    question = task.row_of(task.prompts("eval")[0])["question"]
    task._eval.problems[0].row["opening"] = " 7 left"
    assert task.text(task.prompts("eval")[0].token_ids) == plain.replace(question, f"{question} 7 left") != plain
    for opening in (7, "\ud800"):
        with pytest.raises(UserError, match="line 1, returned a .*in UTF-8"):
            task._environment.opens({"answer": "1", "opening": opening}, "line 1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({}, "task.environment"),
        ({"environment": "environments:Counter", "tools": "environments:add"}, "environment and tools"),
        ({"environment": "environments:NoReset"}, "reset"),
        ({"environment": "environments:add"}, "task.tools"),
        ({"tools": "environments:untyped", "tokenizer": WITH_TOOLS}, "untyped.*type"),
        ({"environment": "environments:Random", "reward": "environment"}, "get_reward"),
    ],
)
def test_what_cannot_answer_is_refused_at_the_start(rows, words, named):
    with pytest.raises(UserError, match=named):
        talking(rows, **words)


def test_special_tokens_in_a_message_are_text():
    prompting = Prompting(CHAT, "{question}", None, use_chat_template=True)
    end = CHAT.convert_tokens_to_ids(TURN_END)
    plain, with_end = (prompting.between([end], [text], "user") for text in ("x", f"x{TURN_END}x"))
    assert plain.count(end) == with_end.count(end) and CHAT.decode(with_end).count(TURN_END) == plain.count(end) + 1
    cut = CHAT.encode("<", add_special_tokens=False)[-1]
    assert prompting.between([cut], ["x"], "user")[0] == end, "which begins with <, too"
    on_paper = Prompting(PLAIN, "Q: {question}\nA:", None, use_chat_template=False)
    assert PLAIN.decode(on_paper.between([5], ["b"], "user")) == "\n\nQ: b\nA:"


def test_a_guess_narrows_the_range_and_a_calculator_adds_up():
    def answered(task: Any, *turns: str) -> Any:
        return task.respond(prompt, [PLAIN.encode(turn, add_special_tokens=False) for turn in turns]).result()

    guess, calculator = made.task("guess", PLAIN, min_numbers=15, max_numbers=15), made.task("calculator", PLAIN)
    prompt = replace(guess.prompts("eval")[0], answer="9:0:14")
    assert answered(guess, "6") == [",7+3="] and answered(guess, "6", "12") == [",7+2="]
    assert answered(guess, "x") == answered(guess, "15") == [",0+7="] and answered(guess, "6", "9") is None
    asked = {"12+7-5=": "14", "3+4=7+1=": "8", "__import__('os')=": "?", "=": "?", "9" * 50 + "=": "?"}
    assert {turn: answered(calculator, turn)[0] for turn in asked} == asked and answered(calculator, "14") is None
