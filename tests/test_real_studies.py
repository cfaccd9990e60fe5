"""The studies of a real model: what they refuse before they begin, what they plan, and the rule of the release."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import mean, pvariance
from typing import Any

import infinite_real
import pods_real
import pytest
import release_rule
import smollm2
import sparse_rl_real
import study
from test_downsample import scored

from grpo_cli.config.check import check
from grpo_cli.config.compose import settings_of


def kept_by_the_release(binary: bool, n: int, m: int) -> tuple[float, float]:
    """The share of random groups in which what it keeps is not of maximal variance, and how much of that it keeps."""
    rng, worse, shares = Random(0), 0, list[float]()
    for _ in range(300):
        p = rng.random()
        rewards = [float(rng.random() < p) if binary else rng.random() for _ in range(n)]
        order = sorted(rewards)
        best = max(pvariance(order[: m - high] + order[n - high :]) for high in range(m + 1))
        found = pvariance([rewards[i] for i in release_rule.spoilt_order(rewards, m)[:m]])
        worse += found < best - 1e-12
        shares += [found / best] if best else []
    return worse / 300, mean(shares)


def test_the_release_keeps_as_much_of_the_best_variance_as_was_counted_in_it() -> None:
    assert release_rule.spoilt_order([0.0, 0.1, 0.4, 1.0], 2) == [2, 3, 2, 3]
    assert kept_by_the_release(True, 64, 16) == pytest.approx((0.72, 0.54), abs=0.05)
    assert kept_by_the_release(False, 64, 16) == pytest.approx((1.0, 0.15), abs=0.02)
    assert kept_by_the_release(True, 16, 4)[1] == pytest.approx(0.85, abs=0.04)
    assert kept_by_the_release(False, 16, 4) == pytest.approx((1.0, 0.43), abs=0.03)


def test_what_the_release_would_keep_twice_is_kept_once() -> None:
    rewards = [0.0, 3.0, 1.0, 0.0, 2.0, 9.0]
    assert release_rule.spoilt_order(rewards, 5) == [4, 1, 5, 5, 3, 5]
    # The next of that order is 5 again, so of the others the first: 0.
    assert release_rule.maxvar_release(scored(rewards), 5, Random(0)) == [0, 1, 3, 4, 5]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    return tmp_path / "smollm2"


def test_every_run_of_the_study_is_accepted(model: Path) -> None:
    runs = pods_real.planned(pods_real.options(["--seeds", "3", "--model", str(model)]))
    assert [run.arm for run in runs] == ["grpo", "grpo_ga", "maxvar", "random", "maxreward", "release"]
    for run in runs:
        settings = settings_of(*run.words)
        check(settings)
        n, m = {"grpo": (16, 16), "grpo_ga": (64, 64)}.get(run.arm, (64, 16))
        assert (settings.n, settings.m, settings.seed, settings.train.steps) == (n, m, 3, pods_real.PLAN.steps[run.arm])
        assert settings.model.path == str(model)


def test_a_study_is_refused_before_anything_is_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="nowhere holds no model: scripts/get_smollm2.sh .*nowhere makes it"):
        pods_real.main(["--model", str(tmp_path / "nowhere")])
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 9 * 2**30})())
    with pytest.raises(
        SystemExit, match="12 runs leave a checkpoint of 1.5 GiB each, .* 22 GiB, and .* has 9 GiB free"
    ):
        pods_real.main(["--model", str(model), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="is no file: give --data"):
        infinite_real.main(["--model", str(model), "--data", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit):
        infinite_real.main(["--model", str(model)])


def measured(speed: float, **more: Any) -> dict[str, Any]:
    call = {"tokens": 100, "cpu_seconds": 100 / speed, "seconds": 9.0, "decode_steps": 10, "slot_utilisation": 0.5}
    call |= {"kv_peak_bytes": 2**20, "engine/rows_mean": 4.0, "prompt_tokens": 9} | more
    trace = [{"step": 0, "prompt_id": "a", "sample": i, "length": 25} for i in range(4)]
    return {
        "asked": {"tokens": 512, "seed": 0, "data": "t.jsonl", "calls": 2},
        "calls": [call],
        "trace": trace,
        "peak_bytes": 2**30,
    }


def test_what_was_measured_is_reported_and_measured_no_second_time(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "t.jsonl", tmp_path / "out"
    data.write_text("")
    (out / "16").mkdir(parents=True)
    figures = {"micro": measured(100), "infinite": measured(130), "budget": measured(90, **{"engine/rows_mean": 40.0})}
    for arm, found in figures.items():
        (out / "16" / f"{arm}.json").write_text(json.dumps(found))
    words = ["--model", str(model), "--data", str(data), "--out", str(out), "--n", "16"]
    assert infinite_real.main([*words, "--arms", "infinite", "budget"]) == 0
    said = capsys.readouterr().out
    assert "holds  infinite over micro at equal slots, n=16: 1.300" in said
    assert "holds  rows in the bytes of 16 reserved slots, over these, n=16: 2.500" in said
    assert json.loads((out / "results.json").read_text())["lengths"] == {"16": [25] * 4}
    with pytest.raises(SystemExit, match="was measured with other settings: give another --out"):
        infinite_real.main([*words, "--seed", "1", "--arms", "infinite"])


def test_slots_at_the_limit_reserve_what_the_model_needs_for_them(model: Path) -> None:
    given = {"model": str(model), "data": "x.jsonl", "tokens": 512, "seed": 0, "trace": "x.jsonl"}
    one = infinite_real.Measured(16, "budget")
    # 2 x 30 layers x 3 heads x 64 numbers of 4 bytes a token; 16 slots of 512, 4 prompts of 128.
    assert infinite_real.reserved_bytes(one, given, 100) == 46_080 * (16 * 512 + 4 * 128)
    words = infinite_real.words_of(infinite_real.Measured(64, "infinite fptas oracle"), given)
    assert {"scheduler=fptas", "predictor=oracle", "++sampler.slots=16"} <= set(words)


def test_the_study_of_eviction_plans_its_caches_and_its_training(model: Path) -> None:
    args = sparse_rl_real.options(
        ["--model", str(model), "--data", "t.jsonl", "--policies", "h2o", "rkv", "--steps", "9"]
    )
    caches = [cache.name for cache in sparse_rl_real.caches_of(args)]
    assert caches == ["dense", "h2o_64", "h2o_128", "h2o_256", "rkv_64", "rkv_128", "rkv_256"]
    assert [cache.name for cache in sparse_rl_real.rooms_of(args)] == ["dense", "h2o_64", "rkv_64"]
    runs = {(run.setting, run.arm): settings_of(*run.words) for run in sparse_rl_real.trained(args)}
    for settings in runs.values():
        check(settings)
        assert (settings.train.steps, settings.n, settings.m, settings.optim.lr) == (9, 16, 16, 4e-5)
    assert "Dense" in runs["dense", "dense"].parts["sparsity"]["_target_"]
    parts = {name: settings.parts for name, settings in runs.items() if name[1] != "dense"}
    assert {name: (part["sparsity"]["budget"], part["correction"]["rejection"]) for name, part in parts.items()} == {
        ("streaming_8", "sparse"): (8, "none"),
        ("streaming_8", "sparse_rl"): (8, "veto"),
        ("rkv_12", "sparse"): (12, "none"),
        ("rkv_12", "sparse_rl"): (12, "veto"),
    }
    every = ["dense", "streaming_8", "rkv_12"]
    assert list(sparse_rl_real.evaluated(args, "sparse")) == every
    kept = ["h2o_4", "h2o_8", "rkv_4", "rkv_8"]
    whole = [f"{policy}_{budget}_whole" for policy in ("h2o", "rkv") for budget in (16, 24, 40)]
    dense = sparse_rl_real.evaluated(args, "dense")
    early = ["h2o_16_whole_after_4", *(f"rkv_{b}_whole_after_{w}" for b, w in ((16, 4), (20, 4), (24, 4), (24, 2)))]
    assert list(dense) == [*every, *kept, *whole, *early]
    for words in dense.values():
        check(settings_of(*words))
    assert "sparsity.window=2" in dense["rkv_24_whole_after_2"] and "sparsity.window=8" in dense["rkv_24_whole"]


def test_half_of_the_reads_saved_are_asked_for_most_of_the_accuracy() -> None:
    def run(arm: str) -> study.Run:
        return study.Run("s", arm, 0, ())

    def found(**tried: tuple[float, float]) -> dict[str, dict[str, float]]:
        return {
            name: {study.ACCURACY: accuracy, "engine/kv_saving_mean": saved}
            for name, (accuracy, saved) in tried.items()
        }

    # rkv_16 saves too little to be asked, rkv_4 saves the most and is worse; the run that evicted is not asked.
    dense = found(dense=(0.8, 0.0), rkv_4=(0.5, 0.7), rkv_8=(0.78, 0.5), rkv_16=(0.8, 0.49))
    tried = {"s/dense/seed0": dense, "s/sparse/seed0": found(dense=(0.1, 0.0), rkv_4=(0.9, 0.9))}
    wanted = sparse_rl_real._reads([run("dense"), run("sparse")], tried)
    assert wanted.found == pytest.approx(0.975) and wanted.holds


def test_training_in_half_of_the_bytes_is_asked_for_its_accuracy_in_its_own_cache() -> None:
    def run(setting: str, arm: str, seed: int) -> study.Run:
        return study.Run(setting, arm, seed, ())

    settings = ("dense", "dense"), ("rkv_12", "sparse"), ("h2o_8", "sparse")
    runs = [run(*setting, seed) for setting in settings for seed in (0, 1)]
    # The dense arm's seeds have 0.8 and 0.5, that of rkv 0.6 and 0.5: 0.75 and 1 of them. That of h2o has more, in too
    # many bytes once.
    accuracies = {"dense": (0.8, 0.5), "rkv_12": (0.6, 0.5), "h2o_8": (0.8, 0.6)}
    tried = {
        run.name: {"dense": {study.ACCURACY: 0.1}} | {run.setting: {study.ACCURACY: accuracies[run.setting][run.seed]}}
        for run in runs
    }
    saved = {"dense": (0.0, 0.0), "rkv_12": (0.5, 0.6), "h2o_8": (0.7, 0.4)}
    found = {
        title: {run.seed: {"engine/kv_saving_allocated": saved[run.setting][run.seed]} for run in of_arm}
        for title, of_arm in sparse_rl_real.sparse_rl.by_arm(runs).items()
    }
    wanted = sparse_rl_real._bytes(found, runs, tried)
    assert wanted.found == pytest.approx(0.875) and not wanted.holds
