"""What training comes to: the default run, a real model, curricula and collectors, reused tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from claimed.words import (
    Claim,
    Column,
    Records,
    against,
    arms,
    between,
    difference,
    each,
    in_every_seed,
    interval,
    mean,
    over_seeds,
    percent,
    reached,
    seeds,
    share,
    table,
    values,
)

SAMPLED, GREEDY, CLOCK = "eval/pass@1", "eval/accuracy", "clock/train_seconds"
GIB = 2**30
END = "final_accuracy"
WAYS = {
    "epochs": "`epochs`",
    "dps": "`dps`",
    "target": "`target`",
    "mixed": "`mixed`",
    "profile": "`profile`",
    "dr_grpo": "`epochs`, `dr_grpo`",
    "dars": "`dars`, `dr_grpo`",
    **{
        f"{advantage} n={n}": f"`{advantage}`, n = {n}"
        for n, advantage in ((2, "rloo"), (3, "rloo"), (3, "grpo"), (3, "median"), (9, "grpo"), (9, "median"))
    },
}
PARTIAL = {
    "epochs": "`epochs`",
    "partial": "`collector=partial`, surplus 1",
    "partial tis ess": "with `tis` and `optim.ess=sqrt`",
    "partial tis": "with `tis`",
    "partial drawn": "with `decoupled` and `prox=drawn`",
    "partial fresh": "with `credit=fresh`",
}
REPLAY = {
    "epochs": "`epochs`",
    "fifo": "`fifo`",
    "fifo decoupled": "`fifo`, `decoupled`",
    "fifo decoupled ess": "`fifo`, `decoupled`, `ess`",
    "fifo young ess": "the same, `max_lag=4`",
    "fifo less ess": "the same, `fresh=0.75`",
}
RATES = {"belt_usual": "usual, 5e-4", "belt_twice": "2 times", "belt": "4 times"}


def claims(records: Records) -> dict[str, list[Claim]]:
    return {
        "default": _default(records),
        "learning": _learning(records),
        "frontier_a": _frontier_a(records),
        "frontier_b": _frontier_b(records),
    }


def texts(records: Records) -> dict[str, str]:
    a, b = records["frontier_a"]["results"], records["frontier_b"]["results"]
    return {
        "learning": _course(records["learning"]["rows"]),
        "frontier_a": arms(a, WAYS, _ways(a["epochs"])),
        "frontier_b/cost": _cost(b["cost"]),
        "frontier_b/learning": arms(b["learning"], PARTIAL, _reused(b["learning"]["epochs"])),
        "frontier_b/replay": arms(b["replay"], REPLAY, _reused(b["replay"]["epochs"])),
        "frontier_b/belt": _belt(b),
    }


def _default(records: Records) -> list[Claim]:
    runs, problems = records["default"]["results"], records["default"]["problems"]
    made = ("scripts/reproduce.sh default", ("default",))
    end = f"{between(values(runs, 'start_greedy'), 3)} to {each('final_greedy', 3)(runs)}; mean of the ends "
    minutes = [seconds / 60 for seconds in values(runs, "train_seconds")]
    peak = max(values(runs, "peak_memory_bytes")) / GIB
    return [
        Claim(
            f"`grpo train` with nothing set: greedy accuracy on {problems} held-out problems, before and at the end",
            end + interval(values(runs, "final_greedy")),
            seeds(len(runs)),
            *made,
        ),
        Claim("its training clock in minutes, other work beside it", between(minutes, 1), seeds(len(runs)), *made),
        Claim("its peak resident memory, at most", f"{peak:.2f} GiB", seeds(len(runs)), *made),
    ]


def evaluated(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if SAMPLED in row]


def _learning(records: Records) -> list[Claim]:
    rows = evaluated(records["learning"]["rows"])
    best, last = max(rows, key=lambda row: row[SAMPLED]), rows[-1]
    made = (seeds(1), "grpo train experiment=word_problems_smollm2", ("learning",))

    def at(row: Mapping[str, Any]) -> str:
        return f"{percent(row[SAMPLED])} sampled, {percent(row[GREEDY])} greedy"

    what = "SmolLM2-135M on word problems, right answers to held-out problems"
    return [
        Claim(
            f"{what}: before training; at the end, after {_minutes(last)} minutes", f"{at(rows[0])}; {at(last)}", *made
        ),
        Claim(
            f"{what}: the maximum over {len(rows)} evaluations, after {_minutes(best)} minutes",
            at(best),
            *made,
        ),
    ]


def _minutes(row: Mapping[str, Any]) -> str:
    return format(row.get(CLOCK, 0) / 60, ".0f")


def _course(rows: list[Mapping[str, Any]]) -> str:
    tried = evaluated(rows)
    return table(
        ["after steps", *(str(row["step"]) for row in tried)],
        [
            ["minutes of training", *(f"{row.get(CLOCK, 0) / 60:.1f}" for row in tried)],
            ["right, sampled", *(f"{row[SAMPLED]:.3f}" for row in tried)],
            ["right, greedy", *(f"{row[GREEDY]:.2f}" for row in tried)],
            ["tokens generated, k", *(f"{row.get('tokens/generated', 0) / 1e3:.0f}" for row in tried)],
        ],
    )


def _ways(base: Any) -> dict[str, Column]:
    return {
        "accuracy at the end": over_seeds(END),
        "less `epochs`, paired": against(base, END),
        "maximum over evaluations": over_seeds("best_accuracy"),
        "tokens to `epochs`' end, each seed": reached("share"),
        "mixed groups per million tokens": mean("mixed_per_million"),
        "of all groups": share("mixed_share"),
        "steps": mean("steps"),
    }


def _frontier_a(records: Records) -> list[Claim]:
    found = records["frontier_a"]["results"]
    base = found["epochs"]
    made = (seeds(len(base)), "scripts/reproduce.sh frontier_a", ("frontier_a",))

    def reaching(arm: str, what: str) -> Claim:
        ratios = [found[arm][seed]["share"] / base[seed]["share"] for seed in sorted(base)]
        return Claim(f"{what}: {tokens}", f"{', '.join(f'{r:.2f}' for r in ratios)}: {in_every_seed(ratios)}", *made)

    paired = "accuracy at the end and equal tokens, less `epochs`, paired"
    tokens = "tokens to the accuracy at which `epochs` ends, of those `epochs` takes, each seed"
    spent = [found["profile"][seed]["tokens"] / base[seed]["tokens"] for seed in sorted(base)]
    return [
        Claim(
            f"`curriculum=target`, the best of {len(found) - 1} arms: {paired}",
            difference(found["target"], base, END),
            *made,
        ),
        reaching("target", "`target`"),
        *(
            Claim(f"`{arm}`: {paired}{more}", difference(found[arm], base, END), *made)
            for arm, more in {
                "dps": "",
                "mixed": "",
                "profile": f" (it ended with {', '.join(f'{s:.3f}' for s in spent)} of the tokens)",
            }.items()
        ),
        Claim(
            f"`dars`, less `epochs` with its advantage ({_of(found, 'dars')} against {_of(found, 'dr_grpo')}), paired; "
            f"confounded: {mean('steps')(found['dars'])} steps against {mean('steps')(found['dr_grpo'])}",
            difference(found["dars"], found["dr_grpo"], END),
            *made,
        ),
        Claim(
            f"`rloo` with n = 2, which asks the most problems: {paired}",
            difference(found["rloo n=2"], base, END),
            *made,
        ),
        reaching("rloo n=2", "`rloo` with n = 2"),
        reaching("rloo n=3", "`rloo` with n = 3"),
    ]


def _of(found: Any, arm: str) -> str:
    return f"{statistics.fmean(values(found[arm], END)):.3f}"


def _reused(base: Any) -> dict[str, Column]:
    return {
        "pass@1 at the end": over_seeds(END),
        "less `epochs`, paired": against(base, END),
        "maximum over evaluations": over_seeds("best_accuracy"),
        "tokens to `epochs`' end, each seed": reached("token_share"),
        "decode steps a step": mean("engine/decode_steps"),
        "old tokens": share("off/token_share"),
        "mean lag": mean("off/lag_mean", ".1f"),
        "steps": mean("steps"),
    }


def _frontier_b(records: Records) -> list[Claim]:
    found = records["frontier_b"]["results"]
    learnt, cost = found["learning"], found["cost"]
    made = ("scripts/reproduce.sh frontier_b", ("frontier_b",))
    base, replay, usual = learnt["epochs"], found["replay"], found["belt_usual"]
    steps = {sampler: of["surplus 1"]["of_equal"] for sampler, of in cost.items()}
    return [
        Claim(
            "`collector=partial collector.surplus=1`: decode steps per trained group, of `equal`'s: "
            "`sampler=full`; `infinite`; `micro`",
            f"{steps['full']:.2f}; {steps['infinite']:.2f}; {steps['micro']:.2f}",
            "counts, one draw of lengths",
            *made,
        ),
        *(
            Claim(
                f"{what}: pass@1 at the end and equal tokens, less `epochs`, paired",
                difference(of[arm], base, END),
                seeds(len(base)),
                *made,
            )
            for what, of, arm in (
                ("partial rollouts", learnt, "partial"),
                ("the same, old tokens not trained on (`credit=fresh`)", learnt, "partial fresh"),
                ("`replay=fifo`", replay, "fifo"),
                ("`fifo`, `correction=decoupled`", replay, "fifo decoupled"),
                (
                    "`fifo`, `decoupled`, `optim.ess=sqrt`, a fourth stored: the best of five arms of replay",
                    replay,
                    "fifo less ess",
                ),
            )
        ),
        Claim(
            "three quarters of each step stored: pass@1 at the end; with `ess`; with `decoupled`; with both",
            "; ".join(
                interval(values(usual[f"usual fifo{more}"], END))
                for more in ("", " ess", " decoupled", " decoupled ess")
            ),
            seeds(len(base)),
            *made,
        ),
        *(
            Claim(
                f"the same: both less `{alone}` alone, paired",
                difference(usual["usual fifo decoupled ess"], usual[f"usual fifo {alone}"], END),
                seeds(len(base)),
                *made,
            )
            for alone in ("decoupled", "ess")
        ),
    ]


def _cost(found: Mapping[str, Any]) -> str:
    columns = [
        "sampler",
        "surplus",
        "decode steps per trained group, of `equal`'s",
        "slots in use",
        "prompt tokens read per group",
    ]
    rows = [
        [
            f"`{sampler}`",
            surplus.removeprefix("surplus "),
            f"{row['of_equal']:.2f}",
            f"{percent(row['utilisation'])} ({percent(of['equal']['utilisation'])})",
            f"{row['prefill_per_group']:.0f} ({of['equal']['prefill_per_group']:.0f})",
            percent(row["old_share"]),
            f"{row['lag_mean']:.2f}",
        ]
        for sampler, of in found.items()
        for surplus, row in of.items()
        if surplus in ("surplus 0.5", "surplus 1")
    ]
    return table([*columns, "tokens of older weights", "mean age in updates"], rows)


def _belt(found: Mapping[str, Any]) -> str:
    """Accuracy at the end, and how many seeds end below their start."""
    first = {"belt_usual": "usual", "belt_twice": "twice", "belt": "faster"}
    alone = {
        "belt_usual": found["learning"]["epochs"],
        "belt_twice": found["belt_twice"]["twice"],
        "belt": found["belt"]["faster"],
    }

    def cell(runs: Any) -> str:
        fell = sum(rise < 0 for rise in values(runs, "rise"))
        return f"{interval(values(runs, END))}, {fell or 'none'}"

    rows = [
        [
            shown,
            cell(alone[part]),
            *(cell(found[part][f"{first[part]} fifo{more}"]) for more in ("", " ess", " decoupled", " decoupled ess")),
        ]
        for part, shown in RATES.items()
    ]
    other = {"`ess=linear`": "faster linear ess", "`max_lag=4`": "faster young ess"}
    rows[-1].append("; ".join(f"{name} {cell(found['belt'][arm])}" for name, arm in other.items()))
    return table(
        ["rate", "new rollouts alone", "`fifo`", "with `ess=sqrt`", "with `decoupled`", "with both", "other"],
        [[*row, ""] if len(row) == 6 else row for row in rows],
    )
