"""Rollouts as a person reads them: `grpo show` in a terminal and in a pipe."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typed import done, refused

from grpo_cli.cli import show
from grpo_cli.report.rollouts import before_and_after

HOSTILE = "[red]\x1b[31m<script>alert(1)</script>\u202e\r\tend\nsecond line"


def row(**besides: Any) -> dict[str, Any]:
    named = {"prompt_id": "p", "sample": 0, "prompt": "1+1=", "reply": "2", "answer": "2", "reward": 1.0}
    fate = {"parts": {}, "length": 2, "finish": "eos", "kept": True, "reason": "kept", "advantage": 0.5}
    return {"step": 1, **named, **fate, **besides}


def run(folder: Path, *rows: dict[str, Any] | str, name: str = "rollouts.jsonl") -> str:
    """A run that has recorded these rows; a text is a line as it stands."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows))
    return str(folder)


def test_the_last_step_is_shown_prompt_by_prompt_with_what_became_of_each_rollout(tmp_path):
    dropped = {"kept": False, "reason": "not chosen", "advantage": None, "finish": "length"}
    rows = [
        row(step=1, reply="of the step before"),
        row(step=2, parts={"correct": 1.0, "form": 0.5}),
        row(step=2, prompt_id="q", prompt="2+2=", answer="4", reply="4", reward=0.25),
        row(step=2, sample=1, reply="3", reward=0.0, **dropped),
        row(step=2, sample=2, turns=[[False, "of the model"], [True, "of its environment"]]),
    ]
    lines = done("show", run(tmp_path / "r", *rows)).splitlines()
    assert [one for one in map(str.strip, lines) if one in ("1+1=", "2+2=", *"234")] == ["1+1=", "2", "3", "2+2=", "4"]
    assert {"    of the model", "      of its environment"} <= {*lines}
    first, dropped, _, other = (line for line in lines if line.startswith("  sample"))
    assert "correct 1, form 0.5" in first and "length  dropped: not chosen" in dropped and "advantage +0.5" in other


def test_a_report_has_one_prompt_s_first_and_last_rollouts_in_each_arm(tmp_path):
    """p, which both arms repeat and whose rewards changed, rather than q or the longer span of r."""
    rows = [row(step=1, prompt_id="r", prompt="r"), row(step=2, sample=1, reply="3", reward=0.0), row(step=2)]
    rows += [row(step=3, prompt_id="q"), row(step=4, reply="between"), row(step=5, prompt_id="q", reward=0.0)]
    rows += [row(step=6, reply="*\n2*"), row(step=9, prompt_id="r", prompt="r")]
    arms = {"a": Path(run(tmp_path / "a", *rows)), "b": Path(run(tmp_path / "b", *rows[:3], *rows[4:]))}
    text = before_and_after(arms)
    group = ["    1+1=", "Its answer:", "    2", "- reward 1, advantage +0.5, 2 tokens, eos, kept"]
    early = ["### Step 2, prompt p", *group, "        2", group[-1].replace("reward 1", "reward 0"), "        3"]
    both = [*early, "### Step 6, prompt p", *group, "        *", "        2*"]
    assert text is not None and [line for line in text.splitlines() if line][1:] == ["## a", *both, "## b", *both]
    once = before_and_after({"a": Path(run(tmp_path / "once", rows[0], rows[3]))})
    assert once is not None and "Step 1, prompt r" in once and "Step 3, prompt q" in once
    assert before_and_after({"a": Path(run(tmp_path / "one", rows[0]))}) is None


@pytest.mark.parametrize(
    ("options", "replies"),
    [("", "cdab"), ("--best 1 --worst 1", "bd"), ("--best 9 --worst 9", "bacd"), ("--prompt q --best 1", "c")],
)
def test_rollouts_are_chosen_by_prompt_and_rank(tmp_path, options, replies):
    """A reward that is no number is the worst of all."""
    some = [("c", "q", 0.0), ("d", "q", "NaN"), ("a", "p", 0.5), ("b", "p", 1.0)]
    rows = [row(reply=reply, prompt_id=of, reward=reward) for reply, of, reward in some]
    lines = done("show", run(tmp_path / "r", *rows), *options.split()).splitlines()
    assert [line.strip() for line in lines if line.strip() in tuple("abcd")] == [*replies]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_model_wrote_reaches_no_terminal_as_code_or_markup(tmp_path, monkeypatch, terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200, color_system=None)
    monkeypatch.setattr(show.terminal, "console", lambda: console)
    names = {"prompt_id": HOSTILE, "answer": HOSTILE, "reason": HOSTILE, "finish": HOSTILE, "parts": {HOSTILE: 1.0}}
    show.show_rollouts(Path(run(tmp_path / "r", row(prompt=HOSTILE, reply=HOSTILE, kept=False, **names))))
    text = screen.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text)
    readable = r"[red]\x1b[31m<script>alert(1)</script>\u202e\r\tend"
    assert {f"  {readable}", f"    {readable}", "    second line"} <= {line.rstrip() for line in text.splitlines()}


def test_damaged_lines_are_named_and_the_rest_is_shown(tmp_path):
    bare = ("step", "prompt_id", "sample", "prompt", "reply", "reward")  # all that a row needs
    whole = {name: value for name, value in row(reply="whole").items() if name in bare}
    odd = ["{\n", "[1]\n", "\n", row(sample="1"), row(reply=None)]
    said = done("show", run(tmp_path / "r", row(), *odd, whole, json.dumps(row())[:50]))
    assert "note: rollouts.jsonl: lines left out that cannot be read: 5, the first is line 2" in said
    assert "    whole" in said and "2 of 2 recorded" in said


def test_an_evaluation_has_no_steps_and_bad_input_is_answered_with_what_there_is(tmp_path):
    sample = row(kept=False, reason="greedy", advantage=None)
    del sample["step"]
    evaluation = run(tmp_path / "e", sample, name="samples.jsonl")
    said = done("show", evaluation)
    assert "e  evaluation: 1 of 1 recorded" in said and "2 tokens, eos  greedy" in said
    folder, empty = run(tmp_path / "r", row(), row(step=7), "{\n"), run(tmp_path / "empty")
    for words, way_out in (
        ((evaluation, "--step", "1"), "samples.jsonl"),
        ((folder, "--step", str(10**9)), "1 to 7"),
        ((folder, "--prompt", "pp"), "did you mean p?"),
        ((empty,), "record.rollouts=0"),
        ((f"{folder}/rollouts.jsonl",), "rollouts.jsonl"),
    ):
        assert way_out in refused("show", *words)
