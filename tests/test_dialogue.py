"""What answers a model: text in, text out, and the tokens in between."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import made
import pytest
from tiny_hf import TURN_END, TURN_START, make_tokenizer
from words import rollout_of, task_of

from grpo_cli.collect.requests import score_all
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.prompting import Prompting
from grpo_cli.tasks.turns import environment_of
from grpo_cli.types import Finish, Group, Request, Rollout, Span

PLAIN, CHAT = make_tokenizer(), make_tokenizer(chat_template=True)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    made = [{"question": f"q{i}", "answer": str(i), "hint": "!"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(tmp_path / "rows.jsonl")


SETTINGS: Any = dict(turns=2, environment="environments:Counter", tools=None)

RESPONDING = {"environment": "environments:Responding"}


def talking(rows: str, tokenizer: Any = PLAIN, **words: Any) -> Any:
    return task_of("jsonl", tokenizer, path=rows, **{"turns": 3} | words)


def heard(task: Any, *said: str, prompt: int = 0) -> Any:
    """What is answered to these turns."""
    turns = [task._prompting.tokenizer.encode(text, add_special_tokens=False) for text in said]
    answer = task.respond(task.prompts("train")[prompt], turns)
    while not answer.done():
        time.sleep(0.001)
    return answer.result()


def test_an_environment_hears_the_row_and_all_turns(rows):
    task = talking(rows, environment="environments:Responding", reward="environments:score")
    answer = task.prompts("train")[0].answer
    assert heard(task, "a", "b") == ["2: not b !"] and heard(task, "a", answer) is None


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("raise", "raised KeyError"),
        ("number", "returned a int"),
        ("nothing", "an empty string"),
        ("much", "10000000 characters"),
        ("slow", "respond_seconds=0.2"),
    ],
)
def test_what_an_environment_must_not_do_names_the_prompt_and_the_turn(rows, said, named):
    task = talking(rows, environment="environments:Responding", respond_seconds=0.2)
    with pytest.raises(UserError, match=f"turn 2 of prompt train-[0-9]+.*({named})"):
        heard(task, "a", said)


def test_tools_are_called_by_what_the_model_writes_and_faults_are_told_to_it(rows):
    chat = make_tokenizer(chat_template=TOOLS)
    task = talking(rows, chat, tools="environments:add", turns=4)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert heard(task, call) == ["5"] and heard(task, call + "then" + call) == ["5", "5"]
    assert heard(task, "no call") is None
    for bad, why in {
        "<tool_call>{": "no end",
        "<tool_call>not json</tool_call>": "no JSON",
        "<tool_call>[1]</tool_call>": "none of add",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': "none of add",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "an object",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>': "TypeError",
    }.items():
        assert why in heard(task, bad)[0]
    assert "add" in task.text(task.prompts("train")[0].token_ids), "the model is told of it"


TOOLS = (
    (
        "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}TURN_START{{ m.role }}\n{{ m.content }}TURN_END\n{% endfor %}"
        "{% if add_generation_prompt %}TURN_STARTassistant\n{% endif %}"
    )
    .replace("TURN_START", TURN_START)
    .replace("TURN_END", TURN_END)
)


def test_a_class_hears_its_turns_again_wherever_it_is_asked(rows):
    chat = make_tokenizer(chat_template=TOOLS)
    task = talking(rows, chat, environment="environments:Counter", turns=4)
    take = '<tool_call>{"name": "take", "arguments": {"count": 2}}</tool_call>'
    left = int(task.prompts("train")[0].answer)
    assert heard(task, take, take) == [f"{left - 4} left"]
    assert heard(task, take) == [f"{left - 2} left"] and heard(task, take, take) == [f"{left - 4} left"]
    stepping = talking(rows, environment="environments:Stepping")
    assert heard(stepping, "a", "b") == ["a b"] and heard(stepping, "a") == ["a"] and heard(stepping, "end") is None


def test_what_reset_returns_goes_behind_the_question(rows, tmp_path):
    chat = make_tokenizer(chat_template=TOOLS)
    plain = talking(rows, chat, environment="environments:Counter", turns=4).prompts("train")[0]
    made = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    opened = tmp_path / "opened.jsonl"

    def first(**more: object) -> str:
        opened.write_text("".join(json.dumps(row | more) + "\n" for row in made))
        task = talking(str(opened), chat, environment="environments:Counter", turns=4)
        return chat.decode(task.prompts("train")[0].token_ids)

    question = made[0]["question"]
    before = chat.decode(plain.token_ids)
    assert question in before and first(opening=" 7 left") == before.replace(question, f"{question} 7 left")
    with pytest.raises(UserError, match="returned a int for line 1: return text"):
        environment_of(SETTINGS).opens({"answer": "1", "opening": 7}, "line 1")


def test_a_class_that_says_different_things_is_refused(rows):
    with pytest.raises(UserError, match="in two ways"):
        heard(talking(rows, environment="environments:Random"), "a")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({}, "task.environment"),
        ({"environment": "environments:Counter", "tools": "environments:add"}, "both"),
        ({"environment": "environments:Counter", "turns": 1}, "task.turns of 2 or more"),
        ({"tools": "environments:nothing"}, "has no function"),
        ({"environment": "environments"}, "module:name"),
        ({"environment": "no_such_module:Counter"}, "cannot be imported"),
        ({"environment": "environments:NoReset"}, "reset"),
        ({"environment": "environments:Silent"}, "typed methods"),
        ({"environment": "environments:score"}, "task.tools"),
        ({"tools": "environments:untyped", "tokenizer": make_tokenizer(chat_template=TOOLS)}, "untyped.*type"),
        ({"tools": "environments:add"}, "chat template"),
        ({"tools": "environments:add", "tokenizer": CHAT}, "does not render tools.*task.environment"),
        ({"environment": "environments:Responding", "respond_seconds": 0.0}, "task.respond_seconds"),
        ({"environment": "environments:Responding", "respond_workers": 0}, "task.respond_workers"),
        ({"turns": 0}, "task.turns=0"),
        ({"environment": "environments:Responding", "reward": "environment"}, "get_reward"),
    ],
)
def test_what_cannot_answer_is_refused_at_the_start(rows, words, named):
    with pytest.raises(UserError, match=named):
        talking(rows, **words)


THINKING = (
    (
        "{% for m in messages %}TURN_START{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}TURN_END\n{% endfor %}"
        "{% if add_generation_prompt %}TURN_STARTassistant\n{% endif %}"
    )
    .replace("TURN_START", TURN_START)
    .replace("TURN_END", TURN_END)
)
NO_ANSWER = (
    (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}{{ raise_exception('no more') }}"
        "{% endif %}TURN_START{{ m.role }}\n{{ m.content }}TURN_END\n{% endfor %}"
    )
    .replace("TURN_START", TURN_START)
    .replace("TURN_END", TURN_END)
)


@pytest.mark.parametrize(("template", "named"), [(THINKING, "task.keep_reasoning=true"), (NO_ANSWER, "no more")])
def test_a_template_that_says_earlier_turns_in_other_words_is_refused(rows, template, named):
    with pytest.raises(UserError, match=named):
        talking(rows, make_tokenizer(chat_template=template), **RESPONDING)
    if template is THINKING:
        talking(rows, make_tokenizer(chat_template=template), **RESPONDING, keep_reasoning=True)


@pytest.mark.parametrize("template", [True, TOOLS, THINKING])
def test_the_next_context_is_what_was_read_and_said_and_what_the_template_adds(template):
    """Appended tokens are those of the template for the whole conversation, wherever it keeps turns as they were."""
    tokenizer = make_tokenizer(chat_template=template)
    prompting = Prompting(tokenizer, "{question}", None, use_chat_template=True)
    said = (("user", "q"), ("assistant", "a"), ("user", "b"))
    messages = [{"role": role, "content": content} for role, content in said]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    drawn = [*tokenizer.encode("a", add_special_tokens=False), tokenizer.convert_tokens_to_ids(TURN_END)]
    for turn in (drawn, drawn[:-1]):  # ended by itself, and by a stop string or a limit
        assert [*prompting.encode("q"), *turn, *prompting.between(turn, ["b"], "user")] == whole


def test_special_tokens_in_a_message_are_text():
    prompting = Prompting(CHAT, "{question}", None, use_chat_template=True)
    end = CHAT.convert_tokens_to_ids(TURN_END)
    plain, with_end = (prompting.between([end], [text], "user") for text in ("x", f"x{TURN_END}x"))
    assert plain.count(end) == with_end.count(end) and CHAT.decode(with_end).count(TURN_END) == plain.count(end) + 1
    on_paper = Prompting(PLAIN, "Q: {question}\nA:", None, use_chat_template=False)
    assert PLAIN.decode(on_paper.between([5], ["b"], "user")) == "\n\nQ: b\nA:"


def test_rewards_see_the_last_turn_and_own_functions_all_of_them(rows):
    prompt = talking(rows, **RESPONDING).prompts("train")[0]
    one, two = (rollout_of(prompt, text, PLAIN).token_ids for text in ("99", prompt.answer))
    spans = (Span(0, len(one)), Span(-3, 2), Span(0, len(two)))
    ids = (*one, 9, 9, *two)
    episode = Rollout(Request(prompt, 0, 0, Sampling.plain(99)), ids, (0.0,) * len(ids), Finish.EOS, 0, spans)
    for words, parts in (
        (RESPONDING, {"correct": 1.0}),
        ({**RESPONDING, "reward": "environments:score"}, {"correct": 1.0, "turns": 2.0}),
        ({"environment": "environments:Stepping", "reward": "environment"}, {"environment": 2.0}),
    ):
        (scored,) = score_all(talking(rows, **words), [Group(prompt, (episode,))])
        assert {name: scored.rewards[0].parts[name] for name in parts} == parts


def test_a_guess_narrows_the_range_and_a_calculator_adds_up():
    guess = made.task("guess", PLAIN, min_numbers=15, max_numbers=15)
    prompt = guess.prompts("eval")[0]
    number, low, high = map(int, prompt.answer.split(":"))
    encode = lambda text: PLAIN.encode(text, add_special_tokens=False)  # noqa: E731
    wrong = low if number != low else high
    left = f",{low + 1}+{(high - low - 1) // 2}=" if wrong == low else f",{low}+{(high - 1 - low) // 2}="
    assert guess.respond(prompt, [encode(str(wrong))]).result() == [left]
    assert guess.respond(prompt, [encode("x")]).result() == [f",{low}+{(high - low) // 2}="]
    assert guess.respond(prompt, [encode(str(wrong)), encode(str(number))]).result() is None
    calculator = made.task("calculator", PLAIN)
    asks = lambda text: calculator.respond(prompt, [encode(text)]).result()  # noqa: E731
    assert asks("12+7-5=") == ["14"] and asks("3+4=7+1=") == ["8"] and asks("__import__('os')=") == ["?"]
    assert asks("14") is None and asks("=") == ["?"] and asks("9" * 50 + "=") == ["?"]


@pytest.mark.parametrize("task", ["jsonl", "word_problems", "reasoning_gym"])
def test_a_word_that_no_task_of_text_has_is_refused_with_the_one_that_was_meant(task: str) -> None:
    with pytest.raises(UserError, match=r"task\.turn: .* takes no turn; did you mean turns\?"):
        made.ready("task", task, {}, turn=3)
