"""What holds the runs: folders that survive, rollouts on many machines, long runs, judges, memory, the machinery."""

from __future__ import annotations

from collections import Counter
from typing import Any

from claimed.words import Claim, Records, between, percent, ratios, rounds, spread, table


def claims(records: Records) -> dict[str, list[Claim]]:
    return {
        "crash_campaign": _crashes(records),
        "soak": _soak(records),
        "ray_engine": _ray(records),
        "judge": _judge(records),
        "memory": _memory(records),
        "overhead": _overhead(records),
    }


def texts(records: Records) -> dict[str, str]:
    return {
        "crash_campaign/kills": _kills(records["crash_kills"]["trials"]),
        "soak": _thousands(records["soak"]["results"]),
        "ray_engine": _rates(records),
        "memory": _predicted(records["bench_memory"]["results"]),
    }


def _crashes(records: Records) -> list[Claim]:
    kills, damage, doubles = (records[f"crash_{name}"]["trials"] for name in ("kills", "damage", "doubles"))
    command = "python scripts/crash_campaign.py"
    outcomes = Counter(trial["outcome"] for trial in damage)
    refused = sum(trial["outcome"] == "refused" for trial in doubles)
    bad = [trial for trial in kills if trial["faults"]]
    return [
        Claim(
            f"runs killed ({sum(trial['kills'] for trial in kills)} times) or stopped "
            f"({sum(trial['stops'] for trial in kills)}) at random moments and continued: those that end unlike "
            "a run left alone",
            f"{sum(any('differs' in fault for fault in trial['faults']) for trial in bad)} of {len(kills)}",
            "one campaign",
            f"{command} kills --count {len(kills)}",
            ("crash_kills",),
        ),
        Claim(
            "of them with another fault (a traceback at ctrl-C while libraries load; nothing was lost)",
            f"{len(bad)} of {len(kills)}",
            "one campaign",
            f"{command} kills --count {len(kills)}",
            ("crash_kills",),
        ),
        Claim(
            "a file of a killed run damaged, then resumed: silent differences",
            f"{outcomes['SILENT']} of {len(damage)} ("
            + ", ".join(f"{count} {word}" for word, count in outcomes.most_common() if word != "SILENT")
            + ")",
            "one campaign",
            f"{command} damage --count {len(damage)}",
            ("crash_damage",),
        ),
        Claim(
            "two commands that continue one run at a time: one refused, the other as if alone",
            f"{refused} of {len(doubles)}",
            "one campaign",
            f"{command} doubles --count {len(doubles)}",
            ("crash_doubles",),
        ),
    ]


def _kills(trials: list[dict[str, Any]]) -> str:
    names = dict.fromkeys(trial["config"] for trial in trials)
    of = {name: [trial for trial in trials if trial["config"] == name] for name in names} | {"all": trials}
    rows = [
        [
            name,
            str(len(these)),
            *(str(sum(trial[key] for trial in these)) for key in ("kills", "stops")),
            str(sum(any("differs" in fault for fault in trial["faults"]) for trial in these)),
            str(sum(bool(trial["faults"]) for trial in these)),
        ]
        for name, these in of.items()
    ]
    return table(["configuration", "runs", "kills", "stops by a signal", "not as left alone", "with any fault"], rows)


def _soak(records: Records) -> list[Claim]:
    record = records["soak"]
    tenths = list(record["results"].values())
    work = [tenth["yardsticks"] for tenth in tenths]
    made = ("one run", "OMP_NUM_THREADS=1 python scripts/bench/soak.py", ("soak",))
    steps = f"{record['settings']['steps']:,}"
    last, second = tenths[-1], tenths[1]
    return [
        Claim(
            f"{steps} steps in one process: processor time of a step in yardsticks (fixed work beside it), third tenth "
            "to last",
            f"{work[2]:.1f} to {work[-1]:.1f} ({work[-1] / work[2] - 1:+.0%})".replace("%", " %"),
            *made,
        ),
        Claim("its memory, last tenth over second", f"{last['mib'] / second['mib']:.3f}", *made),
        Claim(
            "its open files and threads, second tenth; last",
            "; ".join(f"{t['files']:.0f} and {t['threads']:.0f}" for t in (second, last)),
            *made,
        ),
    ]


def _thousands(found: dict[str, Any]) -> str:
    columns = {"yardsticks": ".1f", "cpu_seconds": ".4f", "mib": ".1f", "files": ".0f", "threads": ".0f"}
    rows = [[name, *(format(row[key], form) for key, form in columns.items())] for name, row in found.items()]
    return table(["steps", "yardsticks a step", "CPU-s a step", "MiB", "files", "threads"], rows)


def _turns(record: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [turn[arm] for turn in record["turns"]]


def _over(record: dict[str, Any], mine: str, base: str) -> list[float]:
    return ratios(_turns(record, mine), _turns(record, base), "tokens_per_second")


def _ray(records: Records) -> list[Claim]:
    command = "OMP_NUM_THREADS=1 python scripts/bench/ray_engine.py"
    many, few = records["bench_ray_rate_n64"], records["bench_ray_rate"]
    weights, lost, kills = (records[f"bench_ray_{name}"] for name in ("weights", "lost", "kills"))
    took = ratios(_turns(weights, "weights"), _turns(weights, "copy"), "seconds")
    more = [
        a["seconds"] - b["seconds"]
        for a, b in zip(_turns(lost, "one of three killed"), _turns(lost, "undisturbed"), strict=True)
    ]
    rates = (
        f"{len(many['turns'])} and {len(few['turns'])} rounds",
        f"{command} rate",
        ("bench_ray_rate_n64", "bench_ray_rate"),
    )

    def both(mine: str, base: str) -> str:
        return "; ".join(spread(_over(record, mine, base)) for record in (many, few))

    return [
        Claim(
            "one Ray worker over rollouts in this process, tokens/s: 8 x 64 rollouts; 8 x 16 (wanted: 0.9)",
            both("one worker", "in this process"),
            *rates,
        ),
        Claim("two workers over one: 8 x 64; 8 x 16 (wanted: 1.6)", both("two workers", "one worker"), *rates),
        Claim(
            f"{weights['bytes'] / 2**20:.0f} MiB of weights into the store and to a worker, over one copy in memory "
            "(wanted: at most 2)",
            spread(took),
            rounds(len(took)),
            f"{command} weights",
            ("bench_ray_weights",),
        ),
        Claim(
            "cutting requests into portions for 64 workers, for each request",
            f"{records['bench_ray_dealing']['microseconds_per_request']:.1f} us of processor time",
            rounds(records["bench_ray_dealing"]["settings"]["rounds"]),
            f"{command} dealing",
            ("bench_ray_dealing",),
        ),
        Claim(
            f"{kills['settings']['steps']} steps with three workers, {kills['kills']:.0f} of them killed "
            f"({kills['requests_again']:,.0f} requests dealt again): records and rollouts are those of `engine=torch`",
            "equal" if kills["equal"] else "not equal",
            "one run",
            f"{command} kills",
            ("bench_ray_kills",),
        ),
        Claim(
            "one of three workers killed half-way: seconds more",
            spread(more, 1),
            rounds(len(more)),
            f"{command} lost",
            ("bench_ray_lost",),
        ),
    ]


def _rates(records: Records) -> str:
    rows = []
    for name, shown in {"bench_ray_rate_n64": "8 x 64", "bench_ray_rate": "8 x 16"}.items():
        for arm, figures in records[name]["arms"].items():
            turns = [turn["tokens_per_second"] for turn in _turns(records[name], arm)]
            rows.append([shown, arm, spread(turns, 0), f"{figures['decode_steps']:.0f}"])
    return table(["rollouts", "made by", "tokens/s, median (lowest to highest)", "decode steps"], rows)


def _judge(records: Records) -> list[Claim]:
    found = records["bench_judge"]
    made = ("one round", "python scripts/bench/judge.py --gsm8k FOLDER", ("bench_judge",))
    hostile = found["hostile"]
    return [
        Claim(
            f"agreement with gold, `numbers`; `math`: {found['math']['replies']:,} GSM8K solutions, "
            "half of them with another final number",
            "; ".join(percent(found[judge]["agreement"]) for judge in ("numbers", "math")),
            *made,
        ),
        Claim(
            "replies judged a second by one process (by two), `numbers`; `math`",
            "; ".join(
                f"{found[j]['per_second_1']:,.0f} ({found[j]['per_second_2']:,.0f})" for j in ("numbers", "math")
            ),
            *made,
        ),
        Claim(
            f"{hostile['expressions']} hostile expressions, limit {hostile['limit_seconds']:.0f} s: the longest; "
            "called right",
            f"{hostile['longest_seconds']:.2f} s; {hostile['called_right']}",
            *made,
        ),
    ]


def _memory(records: Records) -> list[Claim]:
    found = records["bench_memory"]["results"]
    made = ("one run each", "OMP_NUM_THREADS=1 python scripts/bench/memory.py", ("bench_memory",))
    exact = [row[key] for row in found.values() for key in row if key.endswith("_ratio") and key != "peak_ratio"]
    peaks = "; ".join(f"{case} {row['peak_ratio']:.2f}" for case, row in found.items())
    return [
        Claim("weights, gradients, optimizer state and KV cache, predicted over measured", between(exact), *made),
        Claim("peak of the process on a CPU, predicted over measured", peaks, *made),
    ]


def _predicted(found: dict[str, Any]) -> str:
    names = dict.fromkeys(key for row in found.values() for key in row if key.endswith("_ratio"))
    rows = [
        [case, f"{row['peak_bytes'] / 2**20:,.0f}", *(f"{row[n]:.2f}" if n in row else "" for n in names)]
        for case, row in found.items()
    ]
    return table(["case", "peak, MiB", *(name.removesuffix("_ratio").replace("_", " ") for name in names)], rows)


def _overhead(records: Records) -> list[Claim]:
    command = "python scripts/bench/overhead.py"
    launcher, meter, report = (records[f"bench_{name}"] for name in ("launcher", "meter", "report"))
    jobs, hand = launcher["rounds"]["launcher"], launcher["rounds"]["hand"]
    further = {key: [a[key] - b[key] for a, b in zip(jobs, hand, strict=True)] for key in ("wall", "processor")}
    on = [a / b for a, b in zip(meter["seconds"]["on"], meter["seconds"]["off"], strict=True)]
    return [
        Claim(
            "`maxvar` from 1,000,000 rewards over `numpy.sort` of them, at most",
            f"{records['bench_downsample']['worst_maxvar_ratio']:.1f}",
            "fastest of the rounds",
            f"{command} downsample",
            ("bench_downsample",),
        ),
        Claim(
            "a further job of a sweep over running it by hand: seconds; of the processor",
            "; ".join(spread(further[key]) for key in ("wall", "processor")),
            rounds(len(jobs)),
            f"{command} launcher",
            ("bench_launcher",),
        ),
        Claim(
            "the meter of `grpo profile`, on over off, processor time of a step",
            spread(on, 3),
            rounds(len(on)),
            f"{command} meter",
            ("bench_meter",),
        ),
        Claim(
            f"`grpo report` of {report['settings']['runs']} runs of {report['settings']['steps']:,} steps",
            f"{report['seconds']:.1f} s",
            rounds(1),
            f"{command} report",
            ("bench_report",),
        ),
    ]
