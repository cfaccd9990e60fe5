"""Sudoku of 4 x 4: its grids, its problems, its judge."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from words import rollout_of

from grpo_cli.cli.main import app
from grpo_cli.model.load import load_tokenizer
from grpo_cli.tasks.sudoku import draw_puzzle, grids, in_rows
from grpo_cli.types import Finish, Prompt, Reward

TOKENIZER = load_tokenizer(made.model())
SOLVED = "1234/3412/2143/4321"


def is_solved(cells: str) -> bool:
    """By the rules, said anew: each row, column and quarter has all four."""
    rows = [cells[start : start + 4] for start in range(0, 16, 4)]
    columns = ["".join(row[i] for row in rows) for i in range(4)]
    quarters = [
        "".join(rows[top + i][left + j] for i, j in product((0, 1), repeat=2)) for top in (0, 2) for left in (0, 2)
    ]
    return all(sorted(part) == list("1234") for part in (*rows, *columns, *quarters))


def fillings(cells: str) -> list[str]:
    """All, by trying every number in the first empty cell and giving up where a rule is broken."""
    if "." not in cells:
        return [cells] if is_solved(cells) else []
    place = cells.index(".")
    row, column = divmod(place, 4)
    near = {
        cells[i] for i in range(16)
        if i // 4 == row or i % 4 == column or (i // 8 == place // 8 and i % 4 // 2 == column // 2)
    }  # fmt: skip
    return [full for n in "1234" if n not in near for full in fillings(cells[:place] + n + cells[place + 1 :])]


def judge(reply: str, finish: Finish = Finish.EOS) -> Reward:
    rollout = replace(rollout_of(Prompt("p", (3,), SOLVED), reply, TOKENIZER), finish=finish)
    return made.task("sudoku", TOKENIZER, eval_problems=1).reward(rollout.request.prompt, rollout)


def test_there_are_288_grids_and_all_keep_the_rules() -> None:
    assert len(set(grids())) == 288 and all(map(is_solved, grids()))


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_a_problem_has_so_many_empty_cells_and_one_solution(empty: int, seed: int) -> None:
    puzzle = draw_puzzle(Random(seed), empty)
    assert puzzle.cells.count(".") == empty and fillings(puzzle.cells) == [puzzle.solution]


def test_only_the_filled_grid_is_right_and_only_once_it_has_ended() -> None:
    assert judge(SOLVED).total == 1.0
    other = in_rows(next(grid for grid in grids() if in_rows(grid) != SOLVED))
    assert (judge(other).total, judge(other).parts) == (0.0, {"correct": 0.0, "well_formed": 1.0})
    for said in (SOLVED.replace("/", ""), SOLVED + "/", SOLVED + "=" + SOLVED, "1234/3412/2143/432.", ""):
        assert judge(said).parts == {"correct": 0.0, "well_formed": 0.0}, said
    assert judge(SOLVED, Finish.LENGTH).total == 0.0


def test_a_prompt_is_the_grid_with_its_empty_cells() -> None:
    task = made.task("sudoku", TOKENIZER, min_empty=3, max_empty=3)
    prompt = task.prompts("eval")[0]
    text = task.text(prompt.token_ids)
    cells = text.rstrip("=").replace("/", "")
    assert text == f"{in_rows(cells)}=" and fillings(cells) == [prompt.answer.replace("/", "")]


def test_a_run_imitates_solutions_and_then_learns_from_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user types first; and hints are refused, since there is no part of a solution to give."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "task=sudoku", "train.prompts=2", "n=2", "eval.every=0", "logger=jsonl", "hydra.run.dir=run"]
    warm = [*words, "train.warmup=sft", "train.warmup_steps=2", "train.steps=3"]
    assert CliRunner().invoke(app, warm).exit_code == 0
    refused = CliRunner().invoke(app, [*words[:-1], "hydra.run.dir=other", "collector=hint", "advantage=arms"])
    assert refused.exit_code != 0 and "solution" in refused.output
