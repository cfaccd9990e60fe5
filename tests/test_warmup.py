"""`train.warmup=sft`: the first steps of a run imitate worked replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import small_model
from test_jsonl_task import write
from test_resume import rows
from tiny_hf import make_folder, make_tokenizer

from grpo_cli.collect.warmup import sft
from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build
from grpo_cli.learner.batch import collate, totals
from grpo_cli.learner.forward import Padded
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.demonstrations import conversations, demonstration
from grpo_cli.types import Prompt

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4<|im_end|>"},
]


def test_all_replies_of_a_conversation_are_learnt_and_nothing_else(tmp_path):
    """The tokens are the template's own, but for a special token that a reply spells: that is text."""
    tokenizer = make_tokenizer(chat_template=True)
    path = write(tmp_path / "talks.jsonl", {"messages": TALK})
    (found,) = conversations(path, tokenizer, {}, tokenizer.eos_token_id)
    learnt = [tokenizer.decode(list(turn)) for turn in found.turns]
    assert learnt == ["2<|im_end|>", "4<|im_end|><|im_end|>"] and found.turns[1].count(tokenizer.eos_token_id) == 1
    whole = [*found.request.prompt.token_ids, *found.token_ids]
    said = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(whole) == said.rstrip("\n")


CALLS = {**TALK[2], "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize("row", [[1], {"messages": TALK[:2]}, {"messages": []}, {"messages": [*TALK[:2], CALLS]}])
def test_what_is_no_conversation_is_refused_with_its_line(row, tmp_path):
    tokenizer = make_tokenizer(chat_template=True)
    with pytest.raises(UserError, match="talks.jsonl, line 2"):
        conversations(write(tmp_path / "talks.jsonl", {"messages": TALK}, row), tokenizer, {}, 3)


def test_the_loss_is_the_mean_negative_log_likelihood_of_replies():
    """Of two turns with what is said in between, against cross-entropy by hand."""
    model = small_model()
    shown = [
        demonstration(Prompt("a", (5, 6, 7), ""), [(False, [8, 9]), (True, [10, 11]), (False, [12, 1])]),
        demonstration(Prompt("b", (5, 6), ""), [(False, [13, 14, 1])]),
    ]
    warmup = sft(3, None, tuple(shown), per_step=2, seed=0)
    batch = collate(warmup.groups(0), version=5)
    found = warmup.loss(Padded(99, 512, 1.0).logprobs(model, batch), batch, totals(batch, 99))
    terms = []
    for tokens, learnt in (((5, 6, 7, 8, 9, 10, 11, 12, 1), (3, 4, 7, 8)), ((5, 6, 13, 14, 1), (2, 3, 4))):
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        terms += [-logs[place - 1, tokens[place]] for place in learnt]
    torch.testing.assert_close(found.loss, torch.stack(terms).mean())
    assert found.metrics["warmup/loss"] == found.loss


def test_each_epoch_shows_all_once_in_an_order_of_its_own():
    shown = tuple(demonstration(Prompt(str(i), (5,), ""), [(False, [i])]) for i in range(12))
    warmup = sft(9, None, shown, per_step=4, seed=0)
    names = [group.prompt.id for step in range(6) for group in warmup.groups(step)]
    assert sorted(names[:12]) == sorted(names[12:]) and len({*names}) == 12 and names[:12] != names[12:]


def run_of(folder: Path, *words: str) -> Any:
    lines = [{"question": f"{i}+1", "answer": str(i + 1), "solution": f"It is {i + 1}."} for i in range(40)]
    rows = write(folder.parent / "rows.jsonl", *lines)
    task = ("task=jsonl", f"task.path={rows}", "logger=jsonl", "eval.problems=4", "eval.k=1", "eval.every=3")
    short = ("n=4", "train.prompts=4", "train.steps=6", "sampling.max_new_tokens=12", "train.checkpoint_every=1")
    warm = ("train.warmup=sft", "train.warmup_steps=4", "optim.lr=1e-3", "model.autocast=none", f"run_dir={folder}")
    return build(settings_of(*task, *short, *warm, *words))


def shown_by(parts: Any) -> list[Any]:
    """Return the demonstrations of all steps of the warm-up, each once."""
    groups = [group for step in range(parts.warmup.steps) for group in parts.warmup.groups(step)]
    return [*{group.prompt.id: group.rollouts[0] for group in groups}.values()]


def test_the_solutions_of_a_task_are_right_and_of_one_turn(tmp_path):
    words = ("train.warmup=sft", "train.warmup_steps=1", "train.steps=2", "n=2", "train.prompts=3", "logger=jsonl")
    parts = build(settings_of(*words, f"run_dir={tmp_path}"))._parts
    shown = shown_by(parts)
    assert len(shown) == 6 and all(parts.runtime.task.reward(one.request.prompt, one).solved for one in shown)
    with pytest.raises(UserError, match="of one turn"):
        build(settings_of("task=calculator", *words, f"run_dir={tmp_path}"))


@pytest.mark.parametrize(("chat", "expected"), [(True, "It is 1.<|im_end|>"), (False, " It is 1.<|endoftext|>")])
def test_a_solution_goes_on_as_the_model_would(chat, expected, tmp_path):
    model = make_folder(tmp_path / "model", chat_template=chat)
    trainer = run_of(tmp_path / "run", "model=hf", f"model.path={model}")
    decode, shown = trainer._parts.runtime.tokenizer.decode, shown_by(trainer._parts)
    said = {decode(list(one.request.prompt.token_ids)): decode(list(one.token_ids)) for one in shown}
    assert {reply for prompt, reply in said.items() if " 0+1" in prompt or "\n0+1" in prompt} == {expected}


def test_a_run_warms_up_and_then_learns_from_rewards_and_resumes_inside(tmp_path, capsys):
    run_of(tmp_path / "alone", "train.warmup_lr=3e-3").fit()
    run: list[Any] = rows(tmp_path / "alone")
    assert ["warmup/loss" in row for row in run] == [False, True, True, True, True, False, False]
    assert ["reward/mean" in row for row in run] == [False] * 5 + [True] * 2
    assert run[4]["warmup/loss"] < run[1]["warmup/loss"] / 2
    assert [row["optim/lr"] for row in run[1:6]] == [3e-3] * 4 + [1e-3]
    assert run[1]["rollouts/trained"] == 16 and run[1]["tokens/generated"] == 0.0, "a place on the axis of tokens"
    stopped = run_of(tmp_path / "cut", "train.warmup_lr=3e-3")
    own = stopped._step.run
    stopped._step.run = lambda step, progress: own(step, progress) if step < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        stopped.fit()
    capsys.readouterr()
    run_of(tmp_path / "cut", "train.warmup_lr=3e-3", "optim.lr=2e-3", f"resume={tmp_path / 'cut'}")
    assert "learning rate of the next" not in "".join(capsys.readouterr()), "that is the warm-up's"
    run_of(tmp_path / "cut", "train.warmup_lr=3e-3", f"resume={tmp_path / 'cut'}").fit()
    one, other = (load_file(tmp_path / run / "checkpoints/step_000006/model.safetensors") for run in ("alone", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert rows(tmp_path / "cut") == run


def test_conversations_of_a_file_warm_a_chat_model_up(tmp_path):
    model = make_folder(tmp_path / "model", chat_template=True)
    long = {"messages": [{"role": "user", "content": "x" * 999}, TALK[2]]}  # longer than the context
    path = write(tmp_path / "talks.jsonl", {"messages": TALK[1:3]}, {"messages": TALK}, long)
    words = (f"train.warmup_path={path}", "model=hf", f"model.path={model}", "eval.every=0")
    trainer = run_of(tmp_path / "run", *words, "train.warmup_steps=2", "train.steps=3")
    assert len(shown_by(trainer._parts)) == 2
    trainer.fit()
    first, second = (row["warmup/loss"] for row in rows(tmp_path / "run") if "warmup/loss" in row)
    assert second < first  # type: ignore[operator]
