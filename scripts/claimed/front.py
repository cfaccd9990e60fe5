"""What the front page says: its sentences and its table of results, with interval and number of seeds."""

from __future__ import annotations

import statistics
from typing import Any

from claimed import rollouts, training
from claimed.evicted import of_dense, own
from claimed.words import Records, between, difference, each, percent, rounds, seeds, sooner, table, values


def texts(records: Records) -> dict[str, str]:
    return {
        "front/learning": _learning(records["learning"]["rows"]),
        "front/infinite": _infinite(records),
        "front/pods": _pods(records),
        "front/sparse": _sparse(records),
        "front/results": _results(records),
    }


def _learning(rows: list[Any]) -> str:
    tried = training.evaluated(rows)
    sampled, greedy = training.SAMPLED, training.GREEDY
    first, best, last = tried[0], max(tried, key=lambda row: row[sampled]), tried[-1]

    return (
        f"right {percent(first[sampled])} of the time before and {percent(last[sampled])} after "
        f"{last[training.CLOCK] / 60:.0f} minutes (greedy {percent(last[greedy])}; maximum over evaluations "
        f"{percent(best[sampled])}; one seed, no interval):"
    )


def _infinite(records: Records) -> str:
    return (
        f"{_embedded(records)} times the tokens/s of `micro` in as many slots (embedded model, 50 M; "
        f"medians); SmolLM2: {_smollm2(records)}."
    )


def _embedded(records: Records) -> str:
    found = [rollouts.over(rollouts.arms_of(records[name]), "infinite", "micro") for name in rollouts.FEWER_SLOTS]
    return between(map(statistics.median, found))


def _smollm2(records: Records) -> str:
    return between(rollouts.over_micro(records, name) for name in rollouts.REAL)


def _pods(records: Records) -> str:
    found = records["pods"]["results"]["default"]
    return (
        f"training on 16 of 64 is {sooner(found['maxvar']['sooner_than']['grpo_ga'])} times as soon at 99 % "
        "of the best accuracy of training on all (embedded task, 3 seeds)."
    )


def _sparse(records: Records) -> str:
    found, real = records["sparse_rl"]["results"], records["sparse_rl_real"]
    saved = (
        found["rkv sparse_rl"]["0"]["kv_saving_allocated"],
        real["training"]["rkv_12, corrected"]["0"]["engine/kv_saving_allocated"],
    )
    return (
        f"{between((100 * share for share in saved), 0)} % of the allocated KV cache saved at "
        f"{of_dense(found['rkv sparse_rl'], found['dense dense']).partition(',')[0]} of the dense run's accuracy "
        f"(embedded task, three seeds, 95 % interval); SmolLM2 {_real(records)}, one seed."
    )


def _real(records: Records) -> str:
    under = own(records["sparse_rl_real"])
    found = [under[f"rkv_12, {arm}"] / under["dense"] for arm in ("corrected", "uncorrected")]
    return f"{found[0]:.2f} ({found[1]:.2f})"  # uncorrected in brackets


def _results(records: Records) -> str:
    """Means with half of their 95 % interval, and of what."""
    pods, real = records["pods"]["results"]["default"], records["pods_real"]["results"]["word_problems"]
    ways, reused = records["frontier_a"]["results"], records["frontier_b"]["results"]
    default, step = records["default"]["results"], records["bench_step"]
    sparse = records["sparse_rl"]["results"]
    earlier = [ways["target"][seed]["share"] / ways["epochs"][seed]["share"] for seed in ways["epochs"]]
    cost = {sampler: f"{of['surplus 1']['of_equal']:.2f}" for sampler, of in reused["cost"].items()}
    end = "final_accuracy"
    rows = [
        [
            f"default run: greedy accuracy on {records['default']['problems']} held-out problems",
            f"{between(values(default, 'start_greedy'))} to {each('final_greedy', 3)(default)}",
            seeds(len(default)),
        ],
        [
            "one training step against TRL 1.16's `GRPOTrainer`, same model, one thread",
            f"{step['step_ratio']:.1f}x as fast",
            rounds(step["settings"]["rounds"]),
        ],
        [
            "`sampler=infinite` against `micro` with as many slots, tokens/s: up to 50 M; SmolLM2",
            f"{_embedded(records)}; {_smollm2(records)}",
            "1 to 3 rounds; 1 round each",
        ],
        [
            "PODS 64 -> 16 against GRPO-GA, times as soon at 99 % of its best: embedded task; SmolLM2",
            "; ".join(sooner(found["maxvar"]["sooner_than"]["grpo_ga"]) for found in (pods, real)),
            "; ".join(seeds(len(found["maxvar"]["runs"])) for found in (pods, real)),
        ],
        [
            f"`curriculum=target` less `epochs`, final accuracy, best of {len(ways) - 1} arms; tokens to `epochs`' end",
            f"{difference(ways['target'], ways['epochs'], end)}; {between(earlier)} of its own",
            seeds(len(earlier)),
        ],
        [
            "Sparse-RL, `rkv`, of the dense run's accuracy: embedded task; SmolLM2 (uncorrected)",
            f"{of_dense(sparse['rkv sparse_rl'], sparse['dense dense'])}; {_real(records)}",
            f"{seeds(len(sparse['dense dense']))}; 1 seed",
        ],
        [
            "`collector=partial collector.surplus=1`: decode steps, of `equal`'s, with `full`, `infinite`, `micro`; "
            "pass@1 less `equal`'s at equal tokens",
            f"{', '.join(cost[sampler] for sampler in ('full', 'infinite', 'micro'))}; "
            f"{difference(reused['learning']['partial'], reused['learning']['epochs'], end)}",
            f"counts; {seeds(len(reused['learning']['epochs']))}",
        ],
    ]
    return table(["what, on two shared CPU cores", "measured", "of"], rows)
