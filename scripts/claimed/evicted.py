"""Rollouts from evicted caches: Sparse-RL on the embedded task and on a real model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from claimed.words import (
    Claim,
    Records,
    Runs,
    against,
    between,
    difference,
    interval,
    mean,
    over_seeds,
    percent,
    seeds,
    share,
    table,
    times,
    values,
)

END, PASS = "final_accuracy", "eval/pass@1"
POLICIES = ("h2o", "rkv", "snapkv", "streaming")
ARMS = {
    "dense dense": "dense",
    "rkv sparse": "`rkv`, uncorrected",
    "rkv sparse_rl": "`rkv`, corrected",
    "snapkv sparse": "`snapkv`, uncorrected",
    "snapkv sparse_rl": "`snapkv`, corrected",
}
TRAINED = {
    "dense": "whole cache",
    "rkv_12, uncorrected": "`rkv` 12, uncorrected",
    "rkv_12, corrected": "`rkv` 12, corrected",
    "streaming_8, uncorrected": "`streaming` 8, uncorrected",
    "streaming_8, corrected": "`streaming` 8, corrected",
}


def claims(records: Records) -> dict[str, list[Claim]]:
    return {"sparse_rl": _embedded(records), "sparse_rl_real": _real(records)}


def texts(records: Records) -> dict[str, str]:
    real = records["sparse_rl_real"]
    return {
        "sparse_rl": _arms(records),
        "sparse_rl/budget12": _few(records),
        "sparse_rl/speed": _speed(records),
        "sparse_rl_real/mismatch": _mismatch(real["mismatch"]),
        "sparse_rl_real/room": _room(real["room"]),
        "sparse_rl_real/training": _trained(real),
        "sparse_rl_real/evicted": _evicted(real["evaluations"]["dense/dense/seed0"]),
    }


def of_dense(runs: Runs, dense: Runs) -> str:
    return times([runs[seed][END] / dense[seed][END] for seed in sorted(runs)], 3)


def _embedded(records: Records) -> list[Claim]:
    found, few = records["sparse_rl"]["results"], records["sparse_rl_budget12"]["results"]
    made = (seeds(len(found["dense dense"])), "scripts/reproduce.sh sparse_rl", ("sparse_rl",))
    dense, corrected, plain = found["dense dense"], found["rkv sparse_rl"], found["rkv sparse"]
    paired = "final accuracy less the dense run's, paired"
    small = (
        seeds(len(few["dense dense"])),
        f"{made[1]} --policies rkv --budget 12",
        ("sparse_rl_budget12",),
    )
    return [
        Claim(
            "`rkv` in 20 + 4 entries, corrected: of the dense run's final accuracy", of_dense(corrected, dense), *made
        ),
        Claim(f"the same: {paired}", difference(corrected, dense, END), *made),
        Claim(f"`rkv`, uncorrected: {paired}", difference(plain, dense, END), *made),
        Claim(f"`snapkv`, corrected: {paired}", difference(found["snapkv sparse_rl"], dense, END), *made),
        Claim("`rkv`, corrected less uncorrected, paired", difference(corrected, plain, END), *made),
        Claim(
            "`rkv`: KV cache saved, of what is allocated; of what is held at the peak; of what is read",
            "; ".join(share(f"kv_saving_{of}")(corrected) for of in ("allocated", "peak", "mean")),
            *made,
        ),
        Claim(
            "`rkv` in 12 + 4 entries, corrected: final accuracy less the dense run's, paired",
            difference(few["rkv sparse_rl"], few["dense dense"], END),
            *small,
        ),
    ]


def _evaluated(record: Mapping[str, Any], arm: str, under: str) -> str:
    """Mean accuracy of an arm's policies under another cache, over seeds."""
    found = record["evaluations"]
    name = arm.replace(" ", "/")
    return interval((found[key][under][PASS] for key in sorted(found) if key.startswith(f"{name}/")), 3)


def _arms(records: Records) -> str:
    record = records["sparse_rl"]
    found = record["results"]
    dense = found["dense dense"]
    rows = [
        [
            shown,
            over_seeds(END)(found[arm]),
            against(dense, END)(found[arm]),
            "" if arm == "dense dense" else of_dense(found[arm], dense),
            _rejected(found[arm]) if arm.endswith("_rl") else "",
            mean("mismatch/log_ratio_q001", ".1f")(found[arm]).replace("-0.0", "0"),
            *(_evaluated(record, arm, under) for under in ("dense", "rkv", "snapkv")),
        ]
        for arm, shown in ARMS.items()
    ]
    columns = ["trained with", "final accuracy", "less dense, paired", "of dense", "rejected", "log xi, 0.1 % quantile"]
    return table([*columns, "evaluated dense", "under `rkv`", "under `snapkv`"], rows)


def _rejected(runs: Runs) -> str:
    return percent(statistics.fmean(values(runs, "mismatch/rejected")), 1)


def _few(records: Records) -> str:
    record = records["sparse_rl_budget12"]
    found = record["results"]
    rows = [
        [shown, *(_evaluated(record, arm, under) for under in ("rkv", "dense")), _rejected(found[arm])]
        for arm, shown in ARMS.items()
        if arm in found
    ]
    return table(["trained with", "under 12 + 4 entries", "evaluated dense", "rejected"], rows)


def _speed(records: Records) -> str:
    found = records["bench_sparsity"]["results"]
    models = {"tiny": "embedded", "wide": "wide"}
    rows = []
    for case, of in found.items():
        model, tokens = case.split("-")
        rows.append([models[model], tokens, *(f"{of[policy]['tokens_per_second_ratio']:.2f}" for policy in POLICIES)])
    return table(["model", "tokens", *(f"`{policy}`" for policy in POLICIES)], rows)


def _real(records: Records) -> list[Claim]:
    record = records["sparse_rl_real"]
    made = ("scripts/reproduce.sh sparse_rl_real --data FILE", ("sparse_rl_real",))
    trained, room, cut = record["training"], record["room"], record["evaluations"]["dense/dense/seed0"]
    dense, saved = cut["dense"][PASS], "engine/kv_saving_mean"
    kept = {name: row for name, row in cut.items() if "whole" in name and row[PASS] / dense >= 0.97}
    most = max(kept.values(), key=lambda row: row[saved])
    under = own(record)
    return [
        Claim(
            "`rkv` in 12 keys, corrected: right of 200 held-out problems in its own cache, of the dense policy's "
            f"({under['dense']:.3f}); uncorrected",
            f"{under['rkv_12, corrected'] / under['dense']:.2f}; {under['rkv_12, uncorrected'] / under['dense']:.2f}",
            seeds(1),
            *made,
        ),
        Claim(
            "`streaming` in 8 keys: the same, corrected; uncorrected (both fail)",
            f"{under['streaming_8, corrected'] / under['dense']:.2f}; "
            f"{under['streaming_8, uncorrected'] / under['dense']:.2f}",
            seeds(1),
            *made,
        ),
        Claim(
            "its slots' bytes saved",
            percent(trained["rkv_12, corrected"]["0"]["engine/kv_saving_allocated"]),
            "by construction",
            *made,
        ),
        Claim(
            "replies at a time in 450 MiB of keys and values, 64 keys of at most 512, over dense, four policies",
            between((row["over_dense"] for arm, row in room.items() if arm != "dense")),
            "one round",
            *made,
        ),
        Claim(
            "reads saved by evicting prompt and reply at 97 % of the dense accuracy (wanted: half)",
            f"at most {percent(most[saved])}",
            seeds(1),
            *made,
        ),
    ]


def own(record: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy of each trained policy in the cache that it was trained in."""
    found = {}
    for arm in TRAINED:
        cache, _, corrected = arm.partition(", ")
        key = {"": "dense", "uncorrected": "sparse", "corrected": "sparse_rl"}[corrected]
        found[arm] = record["evaluations"][f"{cache}/{key}/seed0"][cache][PASS]
    return found


def _mismatch(found: Mapping[str, Any]) -> str:
    quantiles = ("0.001", "0.01", "0.01_64_128", "0.01_128_256", "0.01_256_512")

    def row(shown: str, of: list[Mapping[str, Any]]) -> list[str]:
        log_xi = [_span([r[f"log_xi_{quantile}"] for r in of]) for quantile in quantiles]
        saved = [between((100 * r[key] for r in of), 0) + " %" for key in ("mean", "allocated")]
        return [shown, *log_xi, *saved, between((r["length_mean"] for r in of), 0)]

    rows = [row(f"`{policy}` 64", [found[f"{policy}_64"]]) for policy in POLICIES]
    rows += [row(f"the four, {keys}", [found[f"{policy}_{keys}"] for policy in POLICIES]) for keys in (128, 256)]
    columns = ["policy, keys of a reply", "log xi: 0.1 %", "1 %", "1 %, tokens 64-128", "128-256", "256-512"]
    return table([*columns, "saved: read", "allocated", "tokens of a reply"], rows)


def _span(numbers: list[float]) -> str:
    return between(numbers, 1).replace("-0.0", "0")


def _room(found: Mapping[str, Any]) -> str:
    dense = found["dense"]["tokens_per_cpu_second"]
    rows = [
        [
            arm if arm == "dense" else f"`{arm.removesuffix('_64')}`",
            f"{row['engine/rows_mean']:.1f}",
            f"{row['over_dense']:.2f}",
            f"{row['tokens_per_cpu_second']:.0f}",
            f"{row['tokens_per_cpu_second'] / dense:.2f}",
        ]
        for arm, row in found.items()
    ]
    return table(["policy, 64 keys", "replies at a time", "over dense", "tokens/CPU-s", "over dense"], rows)


def _trained(record: Mapping[str, Any]) -> str:
    at_home = own(record)

    def row(arm: str, shown: str) -> list[str]:
        run: Mapping[str, Any] = record["training"][arm]["0"]
        cache, _, corrected = arm.partition(", ")
        key = {"": "dense", "uncorrected": "sparse", "corrected": "sparse_rl"}[corrected]
        whole = record["evaluations"][f"{cache}/{key}/seed0"]["dense"][PASS]
        return [
            shown,
            f"{run[END]:.2f}",
            f"{run['best_accuracy']:.2f}",
            f"{at_home[arm]:.3f}",
            f"{whole:.3f}",
            percent(run["mismatch/rejected"], 1),
            f"{run['mismatch/log_ratio_q001']:.1f}",
            f"{run['response/length_mean']:.0f}",
        ]

    columns = ["trained in", "end, 100 problems", "maximum over evaluations", "200 problems: own cache", "whole cache"]
    more = ["rejected", "log xi, 0.1 %", "tokens of a reply, mean"]
    return table([*columns, *more], [row(arm, shown) for arm, shown in TRAINED.items()])


def _evicted(found: Mapping[str, Any]) -> str:
    dense = found["dense"][PASS]

    def row(name: str, of: Mapping[str, Any]) -> list[str]:
        policy, keys, *more = name.split("_")
        what = "prompt and reply" if "whole" in more else "reply, prompt kept"
        later = f", after {more[-1]}" if "after" in more else ""
        return [f"`{policy}` {keys}", f"{what}{later}", percent(of[PASS] / dense), percent(of["engine/kv_saving_mean"])]

    rows = [row(name, of) for name, of in found.items() if name != "dense"]
    return table(
        ["policy, keys", "of", "right, of the whole cache", "reads saved"], sorted(rows, key=lambda r: (r[1], r[0]))
    )
