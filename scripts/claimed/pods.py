"""Down-sampling: training on few of many rollouts, on the embedded task and on a real model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from claimed.words import Claim, Records, difference, each, mean, over_seeds, seeds, share, sooner, table, times

END = "final_accuracy"
RULES = {
    "grpo_ga": "GRPO-GA, 64 of 64",
    "maxvar": "PODS 64 -> 16, `maxvar`",
    "percentile": "`percentile`",
    "release": "`maxvar` as its multi-GPU release computes it",
    "maxreward": "`maxreward`",
    "random": "`random`",
    "grpo": "GRPO, 16 of 16",
}


def claims(records: Records) -> dict[str, list[Claim]]:
    return {"pods": _pods(records), "pods_real": _pods_real(records)}


def texts(records: Records) -> dict[str, str]:
    return {"pods": _pods_table(records), "pods_real": _pods_real_table(records)}


def _pods(records: Records) -> list[Claim]:
    default, bound = (records["pods"]["results"][setting] for setting in ("default", "update_bound"))
    made = (seeds(len(default["grpo_ga"]["runs"])), "scripts/reproduce.sh pods", ("pods",))
    both = " (two updates a step: "

    def time(arm: str, other: str) -> str:
        return f"{sooner(default[arm]['sooner_than'][other])}{both}{sooner(bound[arm]['sooner_than'][other])})"

    def end(arm: str, other: str) -> str:
        first, second = (difference(of[arm]["runs"], of[other]["runs"], END) for of in (default, bound))
        return f"{first}{both}{second})"

    def speed(arm: str, other: str) -> str:
        ratios = [of[arm]["sooner_than"]["grpo_ga"]["ratios"] for of in (default, bound)]
        beside = [of[other]["sooner_than"]["grpo_ga"]["ratios"] for of in (default, bound)]
        pairs = [list(zip(mine, his, strict=True)) for mine, his in zip(ratios, beside, strict=True)]
        found = [times([a / b for a, b in of]) for of in pairs]
        return f"{found[0]}{both}{found[1]})"

    ga = "than training on all 64 reaches 99 % of its own best accuracy"
    return [
        Claim(
            f"PODS 64 -> 16, `maxvar`, reaches that accuracy so many times sooner {ga}",
            time("maxvar", "grpo_ga"),
            *made,
        ),
        Claim(f"16 of 64 at random: so many times sooner {ga}", time("random", "grpo_ga"), *made),
        Claim("choosing by variance over choosing at random, ratio of these times", speed("maxvar", "random"), *made),
        Claim("final accuracy, `maxvar` less `random`, paired", end("maxvar", "random"), *made),
        Claim(
            "`maxreward` less all 64, final accuracy, paired",
            difference(default["maxreward"]["runs"], default["grpo_ga"]["runs"], END),
            *made,
        ),
        Claim(
            "plain GRPO with 16: `maxvar` reaches 99 % of its best accuracy so many times sooner (below 1: later)",
            time("maxvar", "grpo"),
            *made,
        ),
    ]


def _pods_table(records: Records) -> str:
    found = records["pods"]["results"]
    blank = ("", "", "")

    def cells(of: Mapping[str, Any], arm: str) -> tuple[str, ...]:
        if arm not in of:
            return blank
        runs = of[arm]["runs"]
        time = "1" if arm == "grpo_ga" else sooner(of[arm]["sooner_than"]["grpo_ga"])
        return over_seeds(END)(runs), time, share("update_share")(runs)

    rows = [
        [shown, *cells(found["default"], arm), *cells(found["update_bound"], arm)]
        for arm, shown in RULES.items()
        if arm in found["default"]
    ]
    columns = ["final accuracy", "sooner than GRPO-GA", "time in updates"]
    return table(["arm", *(f"`default`: {c}" for c in columns), *(f"`update_bound`: {c}" for c in columns)], rows)


def _pods_real(records: Records) -> list[Claim]:
    found = records["pods_real"]["results"]["word_problems"]
    made = (seeds(len(found["grpo_ga"]["runs"])), "scripts/reproduce.sh pods_real", ("pods_real",))
    ga, maxvar = found["grpo_ga"], found["maxvar"]
    answers = 128  # 64 problems, two samples of each
    wanted = {seed: 0.99 * answers * max(curve["accuracy"]) for seed, curve in ga["curves"].items()}
    right = {seed: [round(answers * a) for a in curve["accuracy"]] for seed, curve in maxvar["curves"].items()}
    late = [seed for seed in sorted(right) if max(right[seed][:-1]) < wanted[seed]]
    told = "".join(
        f"; seed {seed} gets there at its last evaluation only, with {right[seed][-1]} right answers of {answers} "
        f"where {wanted[seed]:.1f} are needed"
        for seed in late
    )
    return [
        Claim(
            f"PODS 64 -> 16, `maxvar`, SmolLM2-135M: times as soon at 99 % of the best that GRPO-GA reached{told}",
            f"{', '.join(f'{ratio:.2f}' for ratio in maxvar['sooner_than']['grpo_ga']['ratios'])}; mean "
            f"{sooner(maxvar['sooner_than']['grpo_ga'])}",
            *made,
        ),
        *(
            Claim(
                f"final accuracy, `{other}` less `maxvar`, paired, as many steps",
                difference(found[other]["runs"], maxvar["runs"], END),
                *made,
            )
            for other in ("random", "maxreward", "release")
        ),
        Claim("plain GRPO with 16: final accuracy of each seed", each(END)(found["grpo"]["runs"]), *made),
    ]


def _pods_real_table(records: Records) -> str:
    found = records["pods_real"]["results"]["word_problems"]
    runs = {arm: of["runs"] for arm, of in found.items()}
    named = {arm: shown for arm, shown in RULES.items() if arm in found}
    rows = [
        [
            shown,
            str(found[arm]["curves"]["0"]["steps"][-1]),
            each(END)(runs[arm]),
            "1" if arm == "grpo_ga" else _each_ratio(found[arm]["sooner_than"]["grpo_ga"]),
            mean("seconds_per_step", ".0f")(runs[arm]),
            share("update_share")(runs[arm]),
            share("group/zero_std_kept")(runs[arm]),
            mean("tokens/generated")(runs[arm]),
        ]
        for arm, shown in named.items()
    ]
    columns = ["arm", "steps", "final accuracy, each seed", "sooner than GRPO-GA, each seed", "s/step", "of it updates"]
    return table([*columns, "kept groups without variance", "tokens generated"], rows)


def _each_ratio(found: Mapping[str, Any]) -> str:
    told = [f"{ratio:.2f}" for ratio in found["ratios"]] + ["never"] * found["never"]
    return ", ".join(told)
