"""The studies of training: what their YAML asks for, their arithmetic on numbers made by hand, and measured parts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import collecting_cost
import made
import pytest
import real_rollouts
import release_rule
import study
from small import scored

from grpo_cli.config.check import check
from grpo_cli.settings import Sampling
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span

in_all = pytest.mark.study


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    return tmp_path / "smollm2"


def asked(name: str, model: Path, *words: str) -> argparse.Namespace:
    needs = {"model": ["--model", str(model)], "data": ["--data", str(model / "config.json")]}
    args = study.options([name, "--seeds", "7", *words, *sum((needs[n] for n in study.plan_of(name).needs), [])])
    study.check_needs(args)
    return args


def all_runs(args: argparse.Namespace) -> list[study.Run]:
    return [study.run_of(args, part, arm, 7) for part, of in args.plan.parts.items() for arm in of.arms]


def figures(path: Path, *points: tuple[float, float], seconds: float = 1.0) -> list[dict[str, float]]:
    """A run's metrics, also in its folder: (step, accuracy) of its evaluations, every step alike."""
    accuracy = dict(points)
    rows = [{"step": 0, "eval/pass@1": accuracy[0], "eval/accuracy": 1.0}]
    for step in range(1, int(max(accuracy)) + 1):
        tried = {"eval/pass@1": accuracy[step], "eval/accuracy": 1.0} if step in accuracy else {}
        rows.append(tried | {"step": step, "clock/train_seconds": seconds * step, "time/step": seconds})
        rows[-1] |= {"tokens/generated": 100.0 * step, "tokens/trained": 25.0 * step, "time/rollout": 0.3 * seconds}
        rows[-1] |= {"time/update": 0.5 * seconds, "time/logprobs": 0.1 * seconds}
        rows[-1] |= {"group/zero_std": 0.5, "group/mixed": 4.0}
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


# What is asked for


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "pods" else in_all) for n in study.STUDIES])
def test_every_run_of_a_study_is_accepted(name: str, model: Path) -> None:
    args = asked(name, model, "--steps", "9")
    runs = all_runs(args)
    assert len({run.name for run in runs}) == len(runs), "a folder has one arm"
    for run in runs:
        settings = made.composed(*run.words)
        check(settings)
        assert (settings.seed, settings.train.steps) == (7, 9)
        if args.plan.needs:
            assert settings.model.path == str(model)
        if args.plan.sooner_than:
            assert (settings.n, settings.m) == {"grpo": (16, 16), "grpo_ga": (64, 64)}.get(run.arm, (64, 16))


def test_a_cache_is_named_by_its_keys() -> None:
    assert study.cache_words("dense+4") == ("sparsity=dense",)
    assert study.cache_words("rkv_20+4")[1:] == (
        *("sparsity.budget=20", "sparsity.buffer=4", "sparsity.window=8", "sparsity.protect_prompt=true"),
    )
    early = study.cache_words("rkv_24_whole_after_2+4")
    assert {"sparsity.window=2", "sparsity.protect_prompt=false"} <= set(early)
    assert "sparsity.window=8" in study.cache_words("h2o_16") and "sparsity.buffer=4" in study.cache_words("h2o_16")


def test_others_end_with_the_tokens_of_the_baseline_of_their_seed(tmp_path: Path) -> None:
    words = ["frontier_b", "--seeds", "1", "2", "--steps", "7", "--arms", "partial", "partial tis"]
    args = study.options(words)
    for run, steps in zip(study.baselines(args), (7, 5), strict=True):
        figures(tmp_path / run.name, (0, 0.1), (steps, 0.5))
    ends = {
        (run.arm, run.seed): [word for word in run.words if word.startswith(("train.steps", "train.max_generated"))]
        for run in study.others(args, tmp_path)
    }
    tokens = {1: "train.max_generated=700", 2: "train.max_generated=500"}
    assert ends == {
        (arm, seed): ["train.steps=28", tokens[seed]] for arm in ("partial", "partial tis") for seed in (1, 2)
    }


def test_each_part_ends_with_the_tokens_of_its_own_baseline(tmp_path: Path) -> None:
    args = study.options(["rivals", "--seeds", "1", "--arms", "random", "tail", "rkv"])
    for run, steps in zip(study.baselines(args), (7, 5, 3), strict=True):
        figures(tmp_path / run.name, (0, 0.1), (steps, 0.5))
    ends = {(run.arm, word) for run in study.others(args, tmp_path) for word in run.words if "max_generated" in word}
    tokens = {"random": 700, "tail": 500, "rkv": 300}
    assert ends == {(arm, f"train.max_generated={count}") for arm, count in tokens.items()}


def test_a_study_is_refused_before_anything_is_done(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="scripts/get_smollm2.sh .*nowhere"):
        study.main(["pods_real", "--model", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="--data"):
        real_rollouts.main(["--model", str(model), "--data", str(tmp_path / "none.jsonl")])


# Runs


# In place of Python: leaves what a finished run leaves, or breaks.
STUB = """#!{python}
import json, pathlib, sys
given = dict(word.lstrip("+").split("=", 1) for word in sys.argv if "=" in word)
folder = pathlib.Path(given["hydra.run.dir"].strip("'\\""))
with open({made!r}, "a") as made:
    print(folder, file=made)
if "broken" in given:
    sys.exit("error: it broke")
(folder / "metrics.jsonl").write_text(open({runs!r}[given.get("m") == "64"]).read())
(folder / "summary.json").write_text(json.dumps(dict(status="completed")))
"""


@pytest.fixture
def runs_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Runs are only pretended, that of m=64 at half the speed; returns which were made since it was last asked."""
    listed, stub = tmp_path / "made.txt", tmp_path / "python"
    figures(tmp_path / "fast", (0, 0.5), (5, 0.7), (10, 0.95))
    figures(tmp_path / "slow", (0, 0.5), (5, 0.7), (10, 0.9), seconds=2.0)
    runs = [str(tmp_path / name / "metrics.jsonl") for name in ("fast", "slow")]
    stub.write_text(STUB.format(python=sys.executable, made=str(listed), runs=runs))
    stub.chmod(0o755)
    monkeypatch.setattr(study, "sys", argparse.Namespace(executable=str(stub), argv=[]))

    def taken() -> set[str]:
        found = set(listed.read_text().split()) if listed.exists() else set()
        listed.unlink(missing_ok=True)
        return {Path(folder).name for folder in found}

    return taken


def test_finished_runs_are_not_made_again_and_others_are_not_overwritten(
    tmp_path: Path, runs_made: Callable[[], set[str]]
) -> None:
    out, words = tmp_path / "out", {"a": ("n=2",), "b": ("broken=1",), "c": ("n=4",)}
    args = argparse.Namespace(jobs=1, threads=1)
    (out / "a").mkdir(parents=True)
    (out / "a" / "half.txt").write_text("of an interrupted run, whose clock was stopped")
    with pytest.raises(SystemExit, match="go on with the same command\nb: it broke"):
        study.run_all("train", words, out, args)
    assert runs_made() == {"a", "b", "c"}, "one that fails stops no other"
    assert not (out / "a" / "half.txt").exists()
    with pytest.raises(SystemExit, match="it broke"):
        study.run_all("train", words, out, args)
    assert runs_made() == {"b"}
    with pytest.raises(SystemExit, match="other settings: give another --out"):
        study.run_all("train", {"a": ("n=3",)}, out, args)
    assert runs_made() == set()


@in_all
def test_results_say_what_the_runs_say(tmp_path: Path, runs_made: Callable[[], set[str]]) -> None:
    words = ["pods", "--seeds", "0", "1", "--arms", "grpo_ga", "maxvar", "--parts", "default"]
    args = study.options([*words, "--out", str(tmp_path / "out")])
    study.run_all("train", {run.name: run.words for run in study.others(args, tmp_path)}, tmp_path, args)
    found = study.results(args, tmp_path)["default"]
    assert found["maxvar"]["sooner_than"]["grpo_ga"] == {"ratios": [2.0, 2.0], "never": 0}
    run = found["grpo_ga"]["runs"][1]
    assert (run["best_accuracy"], run["final_accuracy"], run["tokens/generated"]) == (0.9, 0.9, 1000)
    assert (run["rollout_share"], run["update_share"]) == (pytest.approx(0.3), pytest.approx(0.6))
    assert found["maxvar"]["curves"][0]["accuracy"] == (0.5, 0.7, 0.95)


@in_all
def test_the_default_run_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "default.json"
    assert study.main(["default", "--quick", "--jobs", "1", "--out", str(tmp_path / "runs"), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    (run,) = found["results"].values()
    assert found["problems"] == 200 and run["steps"] == 2 and run["train_seconds"] > 0
    assert (tmp_path / "runs" / "report").is_dir()


# Arithmetic


def test_ratios_are_taken_seed_by_seed_and_who_never_arrives_is_counted(tmp_path: Path) -> None:
    # The baseline is at 99 % of its best (0.99) at 30 s, 20 s and 30 s; the arm at 10 s, 20 s and never.
    def curve(*accuracies: float) -> Any:
        return study.sampled(figures(tmp_path, *((10 * i, accuracy) for i, accuracy in enumerate(accuracies))))

    late, early = curve(0.1, 0.5, 0.9, 1.0), curve(0.1, 0.5, 1.0, 0.9)
    arm = {0: curve(0.1, 0.99, 0.2, 0.9), 1: early, 2: curve(0.1, 0.6, 0.98, 0.98)}
    assert study.sooner_than({0: late, 1: early, 2: late}, arm) == {"ratios": [3.0, 1.0], "never": 1}
    flat = {0: curve(0.5, 0.4)}
    assert study.sooner_than(flat, flat) == {"ratios": [], "never": 0}, "a baseline that learns nothing has no time"


def test_a_metric_is_followed_by_the_means_of_ten_steps() -> None:
    rows = [{"step": step, "x": float(step)} for step in range(1, 13)] + [{"step": 25, "y": 1.0}]
    assert study.by_tens(rows, "x") == [5.5, 11.5, None]


def test_a_run_is_told_by_itself_and_beside_the_baseline(tmp_path: Path) -> None:
    base, run = figures(tmp_path, (0, 0.2), (5, 0.6), (10, 0.5)), figures(tmp_path, (0, 0.2), (4, 0.1), (8, 0.55))
    assert study.token_share(run, base) == 800 / 1000
    assert study.token_share(figures(tmp_path, (0, 0.2), (10, 0.4)), base) is None
    # The shorter of the two trained 8 s, when the other was between 0.6 at 5 s and 0.5 at 10 s.
    seconds = study.equal_seconds([base, run])
    assert seconds == 8.0 and study.accuracy_after(run, seconds) == 0.55
    assert study.accuracy_after(base, seconds) == pytest.approx(0.54)
    found = study.of_run(run, ["group/zero_std", "off/lag_mean"])
    assert (found["lowest"], found["rise"], found["tokens"]) == (0.1, pytest.approx(0.35), 800)
    # 4 of 8 groups were mixed, 8 times.
    assert (found["mixed_share"], found["mixed_per_million"]) == (0.5, 40_000)
    assert (found["group/zero_std"], found["off/lag_mean"]) == (0.5, 0.0)
    held = {name: value for name, value in run[-1].items() if name != "group/zero_std"} | {"group/mixed": 0.0}
    again = study.of_run([*run, held], ["group/zero_std", "off/lag_mean"])
    assert (again["group/zero_std"], again["mixed_share"]) == (0.5, 0.5), "a step that made none counts in no mean"


def test_the_release_keeps_a_rollout_once_though_its_order_is_spoilt() -> None:
    assert release_rule.spoilt_order([0.0, 0.1, 0.4, 1.0], 2) == [2, 3, 2, 3]
    rewards = [0.0, 3.0, 1.0, 0.0, 2.0, 9.0]
    assert release_rule.spoilt_order(rewards, 5) == [4, 1, 5, 5, 3, 5]
    # What it would keep twice is kept once: the next of that order is 5 again, so of the others the first, 0.
    assert release_rule.maxvar_release(scored(*rewards), 5, Random(0)) == [0, 1, 3, 4, 5]


# Measured parts


@in_all
def test_what_was_measured_is_reported_and_measured_no_second_time(model: Path, tmp_path: Path) -> None:
    data, out, told = tmp_path / "t.jsonl", tmp_path / "out", tmp_path / "told.json"
    data.write_text("")
    (out / "16").mkdir(parents=True)
    for arm, speed in {"micro": 100, "infinite": 130}.items():
        trace = [{"step": 0, "prompt_id": "a", "sample": i, "length": 25} for i in range(4)]
        found = {"asked": {"tokens": 512, "seed": 0, "data": "t.jsonl"}, "tokens_per_cpu_second": speed, "trace": trace}
        (out / "16" / f"{arm}.json").write_text(json.dumps(found))
    words = ["--model", str(model), "--data", str(data), "--out", str(out), "--n", "16", "--arms", "infinite"]
    assert real_rollouts.main([*words, "--json", str(told)]) == 0
    found = json.loads(told.read_text())
    assert found["results"]["16"]["infinite"]["over_micro"] == 1.3 and found["lengths"] == {"16": [25] * 4}
    with pytest.raises(SystemExit, match="other settings: give another --out"):
        real_rollouts.main([*words, "--seed", "1"])


def test_an_arm_is_told_of_its_scheduler_predictor_and_slots(model: Path) -> None:
    args = real_rollouts.options(["--model", str(model), "--data", "x.jsonl"])
    words = real_rollouts.arm_words(args, 64, "infinite fptas oracle", model)
    assert {"scheduler=fptas", "predictor=oracle", "++sampler.slots=16"} <= set(words)


def test_what_steps_cost_is_told_for_a_trained_group() -> None:
    prompt, plain = Prompt("p", (1,), ""), Sampling.plain(9)

    def group(*spans: Span) -> ScoredGroup:
        count = sum(span.count for span in spans)
        one = Rollout(Request(prompt, 0, 0, plain), (5,) * count, (-1.0,) * count, Finish.EOS, 0, spans)
        return ScoredGroup(prompt, (one,), (Reward(1.0),))

    first = EngineStats(decode_steps=6, slots=4, slot_utilisation=0.5, prefill_tokens=10)
    second = EngineStats(decode_steps=4, slots=2, slot_utilisation=1.0, prefill_tokens=20)
    old = group(Span(10, 2), Span(11, 4))
    steps = [(first, [group(Span(10, 4))], 3.0), (second, [old, group(Span(11, 2))], 1.0)]
    found = collecting_cost.figures(steps, first=10)
    assert found["decode_steps_per_group"] == pytest.approx(10 / 3) and found["prefill_per_group"] == 10
    assert found["utilisation"] == pytest.approx((12 + 8) / (24 + 8))
    # Lengths 4, 6 and 2; two of twelve tokens are one update old.
    assert (found["length_mean"], found["variation"]) == (4.0, pytest.approx((8 / 3) ** 0.5 / 4))
    assert found["old_share"] == found["lag_mean"] == pytest.approx(2 / 12)
    assert (found["groups_per_step"], found["carried_tokens"]) == (1.5, 2.0)
    compared = collecting_cost.beside_equal({"equal": found, "surplus 1": found | {"decode_steps_per_group": 5 / 3}})
    assert compared["surplus 1"]["of_equal"] == pytest.approx(0.5)
