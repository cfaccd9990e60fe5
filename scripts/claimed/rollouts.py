"""How fast rollouts and updates are, and what memory they take: schedules of slots, the real size, the update."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from claimed.words import Claim, Records, between, ratios, rounds, spread, table

SPEED, CPU_SPEED = "tokens_per_second", "tokens_per_cpu_second"
MIB, GIB = 2**20, 2**30
EMBEDDED = {
    "bench_rollout_tiny_n64": "1 prompt x 64, 16",
    "bench_rollout_tiny_n64_64_slots": "1 prompt x 64, 64",
    "bench_rollout_tiny_256": "16 prompts x 16, 64",
    "bench_rollout_tiny_256_256_slots": "16 prompts x 16, 256",
    "bench_rollout_tiny_1024": "16 prompts x 64, 256",
    "bench_rollout_50m": "50 M random parameters, n = 32, 8",
}
FEWER_SLOTS = [name for name in EMBEDDED if not name.endswith("_slots")]  # than rollouts
REAL = {"infinite_real_n16": "16", "infinite_real": "64", "infinite_real_n64_again": "64", "infinite_real_n256": "256"}
WAYS = {
    "micro": "`micro`",
    "infinite": "`infinite`",
    "infinite lpt prefix": "`infinite`, `lpt`, lengths predicted (`prefix`)",
    "infinite lpt oracle": "`infinite`, `lpt`, lengths known (`oracle`)",
    "infinite fptas prefix": "`infinite`, `fptas`, predicted",
    "infinite fptas oracle": "`infinite`, `fptas`, known",
    "full": "`full`, no slots",
    "budget": "`infinite` in the bytes that these slots would reserve at the limit",
}


def claims(records: Records) -> dict[str, list[Claim]]:
    return {
        "infinite_real": _infinite_real(records),
        "rollout": _embedded(records),
        "real": _real(records),
        "update": _update(records),
    }


def texts(records: Records) -> dict[str, str]:
    return {
        "infinite_real": _ways(records["infinite_real"]["results"]["64"]),
        "infinite_real/sizes": _sizes(records),
        "rollout/speed": _speeds(records),
        "rollout/memory": _memory(records),
        "rollout/schedules": _schedules(records),
        "real/rollout": _real_rollout(records),
        "real/train": _real_train(records),
        "real/kv": _real_kv(records),
        "update": _shared(records),
    }


def arms_of(record: Mapping[str, Any], comparison: int = 0) -> dict[str, Any]:
    """What every arm of a comparison measured, round by round; the first of each name."""
    found: dict[str, Any] = {}
    for row in record["comparisons"][comparison]["rows"]:
        if row["rounds"]:
            found.setdefault(row["arm"], row["rounds"])
    return found


def over(found: Mapping[str, Any], arm: str, base: str, key: str = SPEED) -> list[float]:
    return ratios(found[arm], found[base], key)


def over_micro(records: Records, name: str) -> float:
    (found,) = records[name]["results"].values()
    return float(found["infinite"]["over_micro"])


def _infinite_real(records: Records) -> list[Claim]:
    made = ("one round each", "scripts/reproduce.sh infinite_real --data FILE --n 16 64 256", tuple(REAL))
    found = records["infinite_real"]["results"]["64"]
    steps = [_steps(records[name]) for name in REAL]
    taus = [
        arm["predictor/kendall_tau"]
        for name in ("infinite_real", "infinite_real_n16")
        for arm in next(iter(records[name]["results"].values())).values()
        if 0 < arm.get("predictor/kendall_tau", 0) < 1
    ]
    return [
        Claim(
            f"`infinite` over `micro` in as many slots, SmolLM2-135M on GSM8K, tokens per processor second, n = "
            f"{', '.join(REAL.values())} (64 twice)",
            ", ".join(f"{over_micro(records, name):.2f}" for name in REAL),
            *made,
        ),
        Claim("its decode steps, of `micro`'s", between(steps), *made),
        Claim(
            "with lengths known (`lpt`), over `micro`, n = 64",
            f"{found['infinite lpt oracle']['over_micro']:.2f}",
            *made,
        ),
        Claim("Kendall's tau of predicted and true lengths of another problem's replies", between(taus), *made),
    ]


def _steps(record: Mapping[str, Any]) -> float:
    (found,) = record["results"].values()
    return float(found["infinite"]["decode_steps"] / found["micro"]["decode_steps"])


def _way(shown: str, row: Mapping[str, Any], micro: Mapping[str, Any]) -> list[str]:
    return [
        shown,
        f"{row[CPU_SPEED]:.0f}",
        f"{row['over_micro']:.2f}",
        f"{row['decode_steps'] / micro['decode_steps']:.2f}",
        f"{row['engine/rows_mean']:.1f}",
        f"{row['kv_mib']:.0f}",
        f"{row['peak_mib']:,.0f}",
    ]


WAY_COLUMNS = ["tokens/CPU-s", "over `micro`", "decode steps, of `micro`'s", "rows at a time", "KV MiB", "process MiB"]


def _ways(found: Mapping[str, Any]) -> str:
    rows = [_way(shown, found[arm], found["micro"]) for arm, shown in WAYS.items() if arm in found]
    return table(["arm", *WAY_COLUMNS], rows)


def _sizes(records: Records) -> str:
    rows = []
    for name in ("infinite_real_n16", "infinite_real_n64_again", "infinite_real_n256"):
        ((n, found),) = records[name]["results"].items()
        again = ", again" if name.endswith("again") else ""
        rows += [[f"{n}{again}", *_way(WAYS[arm], found[arm], found["micro"])] for arm in WAYS if arm in found]
    return table(["n", "arm", *WAY_COLUMNS], rows)


def asked(record: Mapping[str, Any], *more: str) -> str:
    """The command of a record of `rollout.py`; what is not given is the model's."""
    settings = record["settings"]
    words = {
        "--model": "50m" if settings["model"] == "50m" else None,
        "--prompts": settings["prompts"] if settings["prompts"] > 1 else None,
        "--n": " ".join(map(str, settings["n"] or ())),
        "--slots": settings["slots"],
        "--rounds": settings["rounds"],
    }
    given = [f"{name} {value}" for name, value in words.items() if value]
    return " ".join(["python scripts/bench/rollout.py", *given, *more])


def _embedded(records: Records) -> list[Claim]:
    n512, full = arms_of(records["bench_rollout_n512"]), arms_of(records["bench_rollout_n512"], 1)
    vllm = arms_of(records["bench_rollout_vllm_n64"])
    generate = arms_of(records["bench_rollout_tiny_256_256_slots"])
    order = records["bench_schedules"]["results"]["lognormal"]
    whole = "python scripts/bench/rollout.py --case n512"
    speeds = {name: over(arms_of(records[name]), "infinite", "micro") for name in FEWER_SLOTS}
    return [
        *(
            Claim(
                f"`infinite` over `micro` in as many slots, {EMBEDDED[name]} slots, tokens/s",
                spread(found),
                rounds(len(found)),
                asked(records[name]),
                (name,),
            )
            for name, found in speeds.items()
        ),
        Claim(
            "256 rollouts at once over `generate` of `transformers`, tokens/s",
            spread(over(generate, "infinite", "generate")),
            rounds(3),
            asked(records["bench_rollout_tiny_256_256_slots"]),
            ("bench_rollout_tiny_256_256_slots",),
        ),
        Claim(
            "64 rollouts in 16 slots over vLLM in as many, and over vLLM that may decode all at once, tokens/s",
            f"{spread(over(vllm, 'infinite', 'vllm-slots'))}; {spread(over(vllm, 'infinite', 'vllm'))}",
            rounds(3),
            asked(records["bench_rollout_vllm_n64"], "--arms infinite vllm vllm-slots"),
            ("bench_rollout_vllm_n64",),
        ),
        Claim(
            "peak memory of the process, n = 512 over n = 16, both in 16 slots",
            spread(ratios(n512["infinite"], n512["full"], "peak_bytes"), 3),
            rounds(3),
            whole,
            ("bench_rollout_n512",),
        ),
        Claim(
            "KV peak of slots = n/4 over `full`, all completions at full length",
            spread(ratios(full["infinite"], full["full"], "kv_peak_bytes"), 3),
            "by construction",
            whole,
            ("bench_rollout_n512",),
        ),
        Claim(
            "decode steps over the lower bound, predictions of Kendall's tau 0.4: `fifo`, `sjf`, `lpt`, `fptas`",
            ", ".join(
                f"{order[f'infinite prefix {name}']['bound_ratio']:.2f}" for name in ("fifo", "sjf", "lpt", "fptas")
            ),
            "counts, one draw of lengths",
            "python scripts/bench/schedules.py",
            ("bench_schedules",),
        ),
    ]


def _speeds(records: Records) -> str:
    def row(name: str, shown: str) -> list[str]:
        found = arms_of(records[name])
        cv = statistics.median(r["length_cv"] for r in found["infinite"])
        steps = over(found, "infinite", "micro", "steps")
        others = [spread(over(found, "infinite", other)) for other in ("micro", "full", "generate", "generate-slots")]
        return [shown, f"{cv:.2f}", f"{statistics.median(steps):.2f}", *others, str(len(steps))]

    columns = ["rollouts, slots", "CV", "steps, of `micro`'s", "over `micro`", "over `full`", "over `generate`"]
    return table(
        [*columns, "over `generate` in batches of as many", "rounds"], [row(*pair) for pair in EMBEDDED.items()]
    )


def _memory(records: Records) -> str:
    def row(name: str, shown: str) -> list[str]:
        found = arms_of(records[name])
        kept = ("full", "infinite", "generate", "generate-slots")
        return [shown, *(f"{max(r['kv_peak_bytes'] for r in found[arm]) / MIB:.1f}" for arm in kept)]

    columns = ["rollouts, slots", "`full`", "`infinite`", "`generate`", "`generate` in batches"]
    return table(columns, [row(*pair) for pair in EMBEDDED.items()])


def _schedules(records: Records) -> str:
    found = records["bench_schedules"]["results"]
    ways = {"oracle": "the truth", "prefix": "predictions", "mean": "the mean of earlier ones"}
    rows = [
        [
            lengths,
            shown,
            f"{of[f'infinite {way} lpt'].get('kendall_tau', 1):.2f}",
            *(f"{of[f'infinite {way} {order}']['bound_ratio']:.2f}" for order in ("fifo", "sjf", "lpt", "fptas")),
        ]
        for lengths, of in found.items()
        for way, shown in ways.items()
        if f"infinite {way} lpt" in of
    ]
    return table(["lengths", "known by", "Kendall's tau", "`fifo`", "`sjf`", "`lpt`", "`fptas`"], rows)


def _cases(record: Mapping[str, Any], part: str) -> dict[str, Any]:
    """By what they are measured on: arms with their rounds."""
    return {name.removeprefix(f"{part}: "): of for name, of in record["rounds"].items() if name.startswith(f"{part}: ")}


def _real(records: Records) -> list[Claim]:
    command = "python scripts/bench/real.py --model models/smollm2 --data FILE --parts"
    speed, train = _cases(records["bench_real_rollout"], "rollout"), _cases(records["bench_real_train"], "train")
    kv = _cases(records["bench_real_step"], "kv")
    once = {name: of for name, of in speed.items() if "vLLM" in of and "rows" in name and "50 M" not in name}
    one = (f"{command} rollout", ("bench_real_rollout",))
    return [
        Claim(
            "rollouts of SmolLM2-135M over vLLM on a processor, tokens per processor second, 16 and 64 rows, two "
            "precisions (wanted: 1.5)",
            between(over(of, "ours", "vLLM", "rate")[0] for of in once.values()),
            rounds(1),
            *one,
        ),
        Claim(
            "the same over `generate` of `transformers` (wanted: 3)",
            between(over(of, "ours", "generate", "rate")[0] for of in once.values()),
            rounds(1),
            *one,
        ),
        Claim(
            "a round of training over TRL 1.16, float32; under autocast; with `train.shared_prefix=true` (wanted: 3)",
            "; ".join(
                [f"{over(train[name], 'ours', 'TRL', 'rate')[0]:.2f}" for name in ("float32", "autocast")]
                + [between(over(of, "shared prefix", "TRL", "rate")[0] for of in train.values())]
            ),
            rounds(1),
            f"{command} train",
            ("bench_real_train",),
        ),
        Claim(
            "its peak memory, of TRL's",
            between(ratios(of["ours"], of["TRL"], "peak_bytes")[0] for of in train.values()),
            rounds(1),
            f"{command} train",
            ("bench_real_train",),
        ),
        Claim(
            "`sampler.kv_budget` over as many bytes in slots that reserve the limit, tokens per processor second, "
            "float32; bfloat16",
            "; ".join(spread(over(of, "ours", "reserved", "rate")) for of in kv.values()),
            rounds(3),
            f"{command} floor kv",
            ("bench_real_step",),
        ),
    ]


def _real_rollout(records: Records) -> str:
    speed = _cases(records["bench_real_rollout"], "rollout")
    floors = _cases(records["bench_real_step"], "floor")

    def row(name: str, of: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        floor = floors.get(name, {}).get("ours", [])
        ms = [statistics.median(r[key] for r in floor) for key in ("step_ms", "floor_ms")] if floor else []
        return [
            name,
            f"{of['ours'][0]['rate']:.0f}",
            *(f"{over(of, 'ours', other, 'rate')[0]:.2f}" if other in of else "" for other in ("vLLM", "generate")),
            ", ".join(f"{number:.0f}" for number in ms),
            spread([r["step_over_floor"] for r in floor]) if floor else "",
        ]

    columns = ["weights, rows", "tokens/CPU-s", "over vLLM", "over `generate`", "step, floor in ms", "step over floor"]
    return table(columns, [row(name, of) for name, of in speed.items()])


def _real_train(records: Records) -> str:
    found = _cases(records["bench_real_train"], "train")
    rows = [
        [
            f"{name}{', `train.shared_prefix=true`' * (arm == 'shared prefix')}",
            f"{of[arm][0]['cpu_seconds']:.0f}",
            ", ".join(f"{of[arm][0][part]:.1f}" for part in ("rollout", "forward", "backward")),
            f"{over(of, arm, 'TRL', 'rate')[0]:.2f}",
            f"{of[arm][0]['peak_bytes'] / GIB:.1f}, {of['TRL'][0]['peak_bytes'] / GIB:.1f}",
        ]
        for name, of in found.items()
        for arm in ("ours", "shared prefix")
    ]
    columns = ["precision", "processor s", "of it rollout, forward, backward", "over TRL 1.16", "peak GiB: ours, TRL's"]
    return table(columns, rows)


def _real_kv(records: Records) -> str:
    found = _cases(records["bench_real_step"], "kv")
    checks = {check["words"]: check for check in records["bench_real_step"]["checks"]}
    wanted = {
        "speed over reserved": "tokens/s over 8 slots that reserve the limit",
        "rows over reserved": "rows in flight over those",
        "KV over the budget": "KV allocated at the peak, of the budget",
        "KV given out over held": "KV allocated over held",
    }
    rows = []
    for words, shown in wanted.items():
        of = [checks[f"kv: {name}: {words}"] for name in found]
        rows.append([shown, *(f"{c['found']:.2f}" for c in of), f"{of[0].get('least', of[0].get('most')):g}"])
    return table(["at one `sampler.kv_budget`", *found, "wanted"], rows)


def _update(records: Records) -> list[Claim]:
    step, shared = records["bench_step"], records["bench_shared_prefix"]
    return [
        Claim(
            "one training step of the embedded model against TRL 1.16, same model, one thread, times as fast; no "
            "record of single rounds",
            f"{step['step_ratio']:.1f}",
            rounds(step["settings"]["rounds"]),
            "python scripts/bench/step.py --rounds 3 --steps 4",
            ("bench_step",),
        ),
        Claim(
            "`train.shared_prefix` over padded rows, one update of a random 50 M Qwen2, prompt and reply of 256 "
            "tokens, processor time",
            f"{shared['arms']['shared_prefix']['cpu_seconds_ratio']:.2f}",
            rounds(shared["arguments"]["rounds"]),
            "python scripts/bench/shared_prefix.py --rounds 3",
            ("bench_shared_prefix",),
        ),
    ]


def _shared(records: Records) -> str:
    names = {
        "padded": "padded",
        "padding_free": "`train.padding_free` (equal lengths: nothing to save)",
        "shared_prefix": "`train.shared_prefix`",
    }
    found = records["bench_shared_prefix"]["arms"]
    rows = [
        [
            shown,
            f"{found[arm]['cpu_seconds']:.1f}",
            f"{found[arm]['cpu_seconds_ratio']:.2f}",
            f"{found[arm]['logprob_difference']:.0e}",
        ]
        for arm, shown in names.items()
    ]
    return table(["way", "processor s", "times as fast", "log-probabilities differ by"], rows)
