"""The study of reused tokens: what it asks for, and its arithmetic on numbers made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import frontier_a
import frontier_b
import partial_cost
import pytest
import study
from made import infinite
from small import make_engine
from test_partial import MODEL, PROBLEMS
from test_pods import enumerate_tens, rows

from grpo_cli.collect.resuming import begun, joined, rest_of
from grpo_cli.config.check import check
from grpo_cli.config.compose import settings_of
from grpo_cli.profile.forced_lengths import NEVER
from grpo_cli.settings import Sampling
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span

TRAINED = [(part, arm) for part, of in frontier_b.ARMS.items() for arm in of]


def accepted(arm: str) -> Any:
    settings = settings_of(*frontier_b.run_of(arm, 3, "train.steps=9").words)
    check(settings)
    assert (settings.n, settings.m, settings.train.prompts, settings.seed) == (8, 8, 16, 3)
    assert settings.train.steps == 9
    return settings


@pytest.mark.parametrize("arm", frontier_b.ALL)
def test_every_run_of_the_study_is_accepted(arm: str) -> None:
    accepted(arm)


def test_the_belt_is_tried_at_four_times_the_rate_at_twice_and_at_the_usual_one() -> None:
    usual = accepted(frontier_b.BASELINE).optim.lr
    for part, times in (("belt", 4), ("belt_twice", 2), ("belt_usual", 1)):
        for arm in frontier_b.ARMS[part]:
            settings = accepted(arm)
            assert settings.optim.lr == pytest.approx(times * usual)
            assert (settings.optim.ess != "none") == arm.endswith(" ess"), "what the check goes by"
            assert ("replay.fresh=0.25" in frontier_b.ALL[arm]) == (arm not in ("faster", "twice"))


def test_no_picture_has_more_arms_than_colours() -> None:
    assert all(len(of) + 1 <= 8 for of in frontier_b.ARMS.values())
    assert len({arm.replace(" ", "_") for arm in frontier_b.ALL}) == 1 + len(TRAINED), "a folder has one arm"


def test_both_studies_of_problems_that_come_back_have_one_baseline() -> None:
    mine = frontier_b.run_of("epochs", 1, "train.steps=5").words
    assert mine == frontier_a.run_of("epochs", 1, frontier_a.options([]), "train.steps=5").words


def test_others_end_with_the_tokens_of_the_baseline_of_their_seed_and_the_belt_after_its_steps(tmp_path: Path) -> None:
    args = frontier_b.options(["--seeds", "1", "2", "--steps", "7", "--arms", "partial", "fifo", "faster fifo"])
    for run, steps in zip(frontier_b.baselines(args), (7, 5), strict=True):
        (tmp_path / run.name).mkdir(parents=True)
        lines = [json.dumps(row) + "\n" for row in rows((0, 0.1), (steps, 0.5))]
        (tmp_path / run.name / "metrics.jsonl").write_text("".join(lines))
    ends = {
        run.name: [word for word in run.words if word.startswith(("train.steps", "train.max_generated"))]
        for runs in frontier_b.others(args, tmp_path).values()
        for run in runs
    }
    by_tokens = {1: ["train.steps=28", "train.max_generated=700"], 2: ["train.steps=28", "train.max_generated=500"]}
    assert ends == {
        **{f"reused/{arm}/seed{seed}": by_tokens[seed] for arm in ("partial", "fifo") for seed in (1, 2)},
        **{f"reused/faster_fifo/seed{seed}": ["train.steps=7"] for seed in (1, 2)},
    }


def test_parts_that_compare_with_no_other_run_need_no_baseline(tmp_path: Path) -> None:
    args = frontier_b.options(["--parts", "cost", "belt"])
    assert frontier_b.baselines(args) == [] and frontier_b.others(args, tmp_path).keys() == {"belt"}


def test_a_run_is_told_beside_the_baseline_of_its_seed() -> None:
    base = rows(*enumerate_tens((0.2, 0.5, 0.6, 0.55)))  # ends at 0.55, which it has first after 20 of 30 steps
    mine = rows(*enumerate_tens((0.2, 0.1, 0.4, 0.5, 0.6, 0.7)))
    for row in mine[1:]:
        row |= {"tokens/generated": 50.0 * row["step"], "off/token_share": 0.5, "engine/decode_steps": 30.0}
    found = frontier_b.of_run(mine) | frontier_b.beside(mine, base)
    assert found["gain"] == pytest.approx(0.15) and found["rise"] == pytest.approx(0.5)
    assert (found["start"], found["lowest"], found["best_accuracy"]) == (0.2, 0.1, 0.7)
    # At 0.6 after 40 steps, of the baseline's 30, and 2,000 tokens, of its 3,000.
    assert (found["token_share"], found["step_share"]) == (pytest.approx(2 / 3), pytest.approx(4 / 3))
    assert found["accuracy_by_then"] == 0.5, "after 30 steps"
    assert (found["steps"], found["tokens"], found["off/token_share"], found["off/lag_mean"]) == (50, 2500.0, 0.5, 0.0)
    assert found["ess"] is None, "nothing was old that it could be measured of"
    mine[3]["off/ess"], mine[9]["off/ess"] = 0.5, 0.7
    assert (ess := frontier_b.of_run(mine)["ess"]) == pytest.approx(0.6)
    column = frontier_b.COLUMNS["belt"]["effective sample size"]
    assert column([{"ess": ess}, {"ess": None}]) == "0.60" and column([{"ess": None}]) == ""
    itself = frontier_b.beside(base, base)
    assert itself["token_share"] == itself["step_share"] == pytest.approx(2 / 3)
    assert frontier_b.beside(base, mine)["token_share"] is None
    assert study.share_reaching(mine, base, cost=700) == pytest.approx(0.9)


def test_shares_that_some_never_reach_and_differences_without_one_sign_are_said() -> None:
    share, sign = study.reaching("x"), study.signs("x")
    assert share([{"x": 0.5}, {"x": None}, {"x": 0.7}]) == "0.6 ± 0.14 (1 of 3 never)"
    assert share([{"x": None}]) == " (1 of 1 never)"
    assert sign([{"x": 0.1}, {"x": 0.2}]) == "better in every seed"
    assert sign([{"x": -0.1}, {"x": -0.2}]) == "worse in every seed"
    assert sign([{"x": 0.1}, {"x": -0.2}, {"x": 0.0}]) == "null: 1 of 3 better"


def test_two_of_three_have_arrived_where_the_second_has() -> None:
    assert frontier_b.most_by([0.4, None, 0.6], 2 / 3) == 0.6
    assert frontier_b.most_by([None, 0.4, None], 2 / 3) == math.inf
    assert frontier_b.most_by([0.7], 2 / 3) == 0.7


def test_what_was_wanted_is_checked_arm_by_arm() -> None:
    def runs(name: str, *values: float | None) -> dict[int, dict[str, Any]]:
        return {seed: {name: value} for seed, value in enumerate(values)}

    found: dict[str, Mapping[str, Mapping[int, Mapping[str, Any]]]] = {
        "learning": {"partial": runs("token_share", 9.0)},
        "replay": {
            "epochs": runs("token_share", 1.0, 1.0, 1.0),
            "fifo": runs("token_share", 0.5, 0.6, None),
            "fifo decoupled": runs("token_share", 0.5, 0.7, 0.7),
        },
        "belt": {"faster fifo": runs("rise", -0.2, 0.1), "faster fifo ess": runs("rise", 0.1, 0.0)},
        "belt_twice": {"twice": runs("rise", 0.2), "twice fifo ess": runs("rise", 0.3, -0.1)},
    }
    made = frontier_b.checks(found)
    assert [(check.words.split(":")[0], check.found, check.holds) for check in made] == [
        ("replay", 0.6, True),
        ("replay", 0.7, False),
        ("belt", 0.0, True),
        ("belt_twice", -0.1, False),
    ]
    assert frontier_b.said_of_the_belt(found["belt"]) == "Runs end below their start in: faster fifo."
    calm = {"faster fifo": runs("rise", 0.1), "faster fifo ess": runs("rise", -0.1)}
    assert frontier_b.said_of_the_belt(calm).startswith("Null: no run without optim.ess ends below its start")
    assert frontier_b.checks({}) == []


# What collecting costs


def test_lengths_vary_and_are_those_of_the_problem_and_sample() -> None:
    lengths = [partial_cost.length_of(f"q{i}", sample) for i in range(500) for sample in range(8)]
    assert lengths == [partial_cost.length_of(f"q{i}", sample) for i in range(500) for sample in range(8)]
    mean = sum(lengths) / len(lengths)
    deviation = math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    assert mean == pytest.approx(partial_cost.MEAN, rel=0.05) and deviation / mean > 0.9
    assert min(lengths) >= 1 and max(lengths) <= partial_cost.LONGEST


def test_replies_are_as_long_as_they_are_to_be_though_they_are_resumed() -> None:
    engine = partial_cost.Given(make_engine(MODEL, eos_token_ids=(NEVER,), sampler=infinite(slots=6)))
    requests = [
        Request(prompt, sample, 100 * i + sample, Sampling.plain(partial_cost.LONGEST))
        for i, prompt in enumerate(PROBLEMS[:5])
        for sample in range(3)
    ]
    left, made = [begun(request) for request in requests], dict[int, Rollout]()
    rounds = 0
    while left:
        asked, rounds = [rest_of(rollout) for rollout in left], rounds + 1
        of = {(r.prompt.id, r.sample): rollout for r, rollout in zip(asked, left, strict=True)}
        got = [
            joined(of[r.request.prompt.id, r.request.sample], r, rounds)
            for r in engine.generate(asked, lambda rollout: True)
        ]
        made |= {rollout.request.seed: rollout for rollout in got if rollout.finish is not Finish.PARTIAL}
        left = [rollout for rollout in got if rollout.finish is Finish.PARTIAL]
    assert rounds > 3
    for request in requests:
        assert len(made[request.seed]) == partial_cost.length_of(request.prompt.id, request.sample)


def test_what_steps_cost_is_told_for_a_trained_group() -> None:
    def group(*spans: tuple[Span, ...]) -> ScoredGroup:
        prompt = Prompt("p", (1,), "")
        rollouts = tuple(
            Rollout(
                Request(prompt, i, 0, Sampling.plain(9)),
                (5,) * (count := sum(s.count for s in of)),
                (-1.0,) * count,
                Finish.EOS,
                0,
                of,
            )
            for i, of in enumerate(spans)
        )
        return ScoredGroup(prompt, rollouts, (Reward(1.0),) * len(rollouts))

    first = (
        EngineStats(decode_steps=6, slots=4, slot_utilisation=0.5, prefill_tokens=10),
        [group((Span(10, 4),))],
        3.0,
    )
    old = (Span(10, 2), Span(11, 4))
    second = (
        EngineStats(decode_steps=4, slots=2, slot_utilisation=1.0, prefill_tokens=20),
        [group(old), group((Span(11, 2),))],
        1.0,
    )
    found = partial_cost.figures([first, second], first=10)
    assert found["decode_steps_per_group"] == pytest.approx(10 / 3) and found["prefill_per_group"] == 10
    assert found["utilisation"] == pytest.approx((12 + 8) / (24 + 8))
    # Lengths 4, 6 and 2; two of twelve tokens are one update old.
    assert (found["length_mean"], found["variation"]) == (4.0, pytest.approx(math.sqrt(8 / 3) / 4))
    assert found["old_share"] == found["lag_mean"] == pytest.approx(2 / 12)
    assert (found["groups_per_step"], found["carried_tokens"]) == (1.5, 2.0)


def test_collectors_are_compared_with_the_plain_one_of_their_sampler() -> None:
    plain = dict.fromkeys((name for name, _ in partial_cost.COLUMNS.values()), 0.0)
    plain |= {"decode_steps_per_group": 10.0, "variation": 0.9}
    found = {"full": partial_cost.beside_equal({"equal": plain, "surplus 1": {**plain, "decode_steps_per_group": 8.0}})}
    assert found["full"]["equal"]["of_equal"] == 1 and found["full"]["surplus 1"]["of_equal"] == 0.8
    assert [check.holds for check in partial_cost.checks(found)] == [True, False]
    assert len(partial_cost.checks({"micro": found["full"]})) == 1
    assert "| full | surplus 1 | 8.00 | 0.80 |" in partial_cost.table(found) and "Null" not in partial_cost.table(found)
    still = {"micro": partial_cost.beside_equal({"equal": plain, "surplus 1": plain})}
    assert partial_cost.table(still).endswith("Null: under sampler=micro a surplus saves no decode steps.")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["cost", "learning", "replay", "belt", "belt_usual"])
def test_a_part_works_at_a_small_size_and_leaves_its_figures(part: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = ["--arms", *list(frontier_b.ARMS.get(part, {"partial": ()}))[-1:]]
    words = [
        "--quick",
        "--parts",
        part,
        *few,
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert frontier_b.main(words) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["results"].keys() == {part} and found["settings"]["quick"] is True
    assert (tmp_path / f"{part}.png").stat().st_size > 10_000
    assert part in (tmp_path / "results.md").read_text()
