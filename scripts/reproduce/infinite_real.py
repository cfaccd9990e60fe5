"""Infinite Sampling on a real model: what refilled slots and predicted lengths are worth on replies of GSM8K.

    scripts/reproduce.sh infinite_real --data train.jsonl
    scripts/reproduce.sh infinite_real --data train.jsonl --n 64 --arms micro infinite "infinite lpt prefix"

SmolLM2-135M-Instruct samples replies of at most 512 tokens to problems of GSM8K, n of each, in calls of `generate` one
after the other; the predictor learns from each. Nothing is trained, so that every arm makes the same replies: in
float32 on a CPU where the engine holds bits. Arms in a quarter of a call's rollouts as slots: `micro`, `infinite`, and
`infinite` with the longest first (lpt) and with the plan of least makespan (fptas), by lengths as predicted after a few
tokens (prefix) and as they will be (oracle: the best that any predictor could give). `full` takes all at once. `budget`
has as many bytes for keys and values as those slots would reserve at the limit, and nothing else to bound its rows.

Each measurement is a process of its own with one thread; rates are tokens per second of processor time, which its
neighbours do not touch. What is there is not measured again: the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smollm2
from common import Check, clocked, document, finish, parsed, parser, positive, settings_of, show, write

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.overrides import overrides
from grpo_cli.engine.kv.padding import round_up
from grpo_cli.experiment import set_up
from grpo_cli.support.memory import peak_bytes

# By n: prompts of a call of `generate`, and calls.
SIZES = {16: (4, 2), 64: (1, 2), 256: (1, 2)}
SHARE = 4  # rollouts of a call over slots
ARMS: Mapping[str, tuple[str, ...]] = {
    "full": ("sampler=full",),
    "micro": ("sampler=micro",),
    "infinite": ("sampler=infinite",),
    **{
        f"infinite {scheduler} {predictor}": ("sampler=infinite", f"scheduler={scheduler}", f"predictor={predictor}")
        for scheduler in ("lpt", "fptas")
        for predictor in ("prefix", "oracle")
    },
    "budget": ("sampler=infinite", "sampler.slots=null"),
}
TRACED = "micro"  # whose lengths oracles know
# Of one processor, replies of some 300 tokens, by n: for the time that is said beforehand.
ROLLOUTS_A_SECOND = {16: 0.37, 64: 0.37, 256: 0.7}
SPEED, ROWS, PEAK = "tokens_per_cpu_second", "engine/rows_mean", "peak_bytes"
COLUMNS = {
    "tokens/CPU-s": (SPEED, ",.0f"),
    "x micro": ("over_micro", ".2f"),
    "decode steps": ("decode_steps", ",.0f"),
    "rows at a time": (ROWS, ".1f"),
    "busy": ("slot_utilisation", ".0%"),
    "KV MiB": ("kv_mib", ",.0f"),
    "process MiB": ("peak_mib", ",.0f"),
    "tau": ("predictor/kendall_tau", ".2f"),
    "length": ("length_mean", ".0f"),
}


@dataclass(frozen=True)
class Measured:
    """An arm of a size, and where its figures are below the study's folder."""

    n: int
    arm: str

    @property
    def file(self) -> str:
        return f"{self.n}/{self.arm.replace(' ', '_')}.json"

    @property
    def prompts(self) -> int:
        return SIZES[self.n][0]

    @property
    def calls(self) -> int:
        return SIZES[self.n][1]

    @property
    def slots(self) -> int:
        return max(1, self.n * self.prompts // SHARE)

    @property
    def seconds(self) -> float:
        return self.n * self.prompts * self.calls / ROLLOUTS_A_SECOND[self.n]


def words_of(one: Measured, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of `grpo train` that say the same."""
    values = {"model.path": given["model"], "task.path": given["data"], "sampling.max_new_tokens": given["tokens"]}
    values |= {"seed": given["seed"], "run_dir": "outputs/bench"}
    arm = ARMS[one.arm]
    if arm[0] != "sampler=full" and "sampler.slots=null" not in arm:
        values["sampler.slots"] = one.slots
    if "predictor=oracle" in arm:
        values["predictor.lengths"] = given["trace"]
    words = ("model=smollm2_135m", "model.autocast=none", "task=gsm8k", "device=cpu", "logger=jsonl", *arm)
    return (*words, *overrides({**values, **given.get("more", {})}))


def reserved_bytes(one: Measured, given: Mapping[str, Any], prompt_tokens: int) -> int:
    """What keys and values of the slots' replies at the limit and of a call's prompts take in float32, in tiles of
    64."""
    shape = settings_of(*words_of(one, given)).model.architecture
    assert shape is not None, "the preset says the shape"
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    return token * (one.slots * round_up(given["tokens"], 64) + one.prompts * round_up(prompt_tokens, 64))


def measure(one: Measured, given: dict[str, Any]) -> dict[str, Any]:
    """All calls of one arm: their tokens over their processor time, and what the engine says of each."""
    if one.arm == "budget":
        given["more"] = {"sampler.kv_budget": reserved_bytes(one, given, given["prompt_tokens"])}
    settings = settings_of(*words_of(one, given))
    bench = set_up(settings, settings.model, print)
    problems = bench.task.prompts("train")
    list(bench.engine.generate(requests_for([problems[-1]], 2, settings.sampling, settings.seed, 0)))  # warmed up
    calls, trace = [], []
    for call in range(one.calls):
        prompts = [problems[one.prompts * call + place] for place in range(one.prompts)]
        requests = requests_for(prompts, one.n, settings.sampling, settings.seed, call)
        rollouts, clock = clocked(lambda: list(bench.engine.generate(requests)))  # noqa: B023 (done at once)
        stats = bench.engine.stats()
        trace += [
            {"step": call, "prompt_id": r.request.prompt.id, "sample": r.request.sample, "length": len(r)}
            for r in rollouts
        ]
        told = {name: value for name, value in stats.details.items() if name.startswith(("engine/", "predictor/"))}
        calls.append(
            {
                **clock,
                **told,
                "tokens": sum(map(len, rollouts)),
                "decode_steps": stats.decode_steps,
                "slot_utilisation": stats.slot_utilisation,
                "kv_peak_bytes": stats.kv_peak_bytes,
                "prompt_tokens": max(len(prompt.token_ids) for prompt in prompts),
            }
        )
    return {"calls": calls, "trace": trace, PEAK: peak_bytes("cpu"), "facts": dict(bench.engine.facts())}


def as_measured(one: Measured, args: argparse.Namespace, out: Path) -> None:
    """Measure an arm, unless it is there."""
    given = {"model": str(args.model), "data": str(args.data), "tokens": args.tokens, "seed": args.seed}
    asked = {"tokens": args.tokens, "seed": args.seed, "data": args.data.name, "calls": one.calls}
    traced = out / Measured(one.n, TRACED).file
    if one.arm != TRACED and not (out / one.file).is_file():
        found = json.loads(traced.read_text())
        lengths = traced.with_suffix(".jsonl")
        lengths.write_text("".join(json.dumps(row) + "\n" for row in found["trace"]))
        given |= {"trace": str(lengths), "prompt_tokens": max(call["prompt_tokens"] for call in found["calls"])}
    smollm2.measured(__file__, out / one.file, asked, str(one.n), one.arm, json.dumps(given))


def figures(one: Measured, out: Path) -> dict[str, float]:
    """Of all calls together; means where they are shares."""
    found = json.loads((out / one.file).read_text())
    calls = found["calls"]
    total = {name: sum(call[name] for call in calls) for name in ("tokens", "cpu_seconds", "seconds", "decode_steps")}
    means = {
        name: sum(call[name] for call in calls if name in call) / count
        for name in ("slot_utilisation", ROWS, "predictor/kendall_tau", "predictor/mean_absolute_error")
        if (count := sum(name in call for call in calls))
    }
    return {
        **total,
        **means,
        SPEED: total["tokens"] / total["cpu_seconds"],
        "length_mean": total["tokens"] / len(found["trace"]),
        "length_max": max(row["length"] for row in found["trace"]),
        "kv_mib": max(call["kv_peak_bytes"] for call in calls) / 2**20,
        "peak_mib": found[PEAK] / 2**20,
    }


def report(args: argparse.Namespace, out: Path) -> int:
    """A table for each n, and what is wanted: infinite over micro at equal slots, rows over full at equal bytes."""
    results: dict[int, dict[str, dict[str, float]]] = {}
    checks, lengths = list[Check](), dict[int, list[int]]()
    for n in args.n:
        found = {arm: figures(Measured(n, arm), out) for arm in args.arms if (out / Measured(n, arm).file).is_file()}
        for mine in found.values():
            mine["over_micro"] = mine[SPEED] / found["micro"][SPEED]
        slots = Measured(n, "micro").slots
        show(f"n={n}, {SIZES[n][0]} prompt(s) a call, {slots} slots, at most {args.tokens} tokens", found, COLUMNS)
        results[n] = found
        first = json.loads((out / Measured(n, TRACED).file).read_text())["trace"]
        asked = sorted(first, key=lambda row: (row["step"], row["prompt_id"], row["sample"]))
        lengths[n] = [row["length"] for row in asked if row["step"] == 0]
        # Without oracles, which nobody has.
        usual = (arm for arm in found if arm.startswith("infinite") and "oracle" not in arm)
        best = max((found[arm]["over_micro"] for arm in usual), default=0.0)
        checks.append(Check(f"infinite over micro at equal slots, n={n}", best, least=1.25))
        if "budget" in found:
            rows = found["budget"][ROWS] / slots
            checks.append(Check(f"rows in the bytes of {slots} reserved slots, over these, n={n}", rows, least=2.0))
    write(out / "results.json", document(args) | {"results": results, "lengths": lengths})
    return finish(args, {"results": results, "lengths": lengths}, checks)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, threads=1)
    smollm2.add_model(made)
    made.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    made.add_argument("--n", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="rollouts of a prompt")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--tokens", type=positive, default=512, help="of a reply, at most")
    made.add_argument("--jobs", type=positive, default=2, help="arms at a time")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("outputs/reproduce_infinite_real"))
    return parsed(made, words, n=[16], tokens=8, arms=["micro", "infinite", "infinite lpt oracle", "budget"])


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    out = (args.out.with_name(f"{args.out.name}_quick") if args.quick else args.out).resolve()
    args.model, args.data = args.model.resolve(), args.data.resolve()
    args.arms = list(dict.fromkeys([TRACED, *args.arms]))
    planned = [Measured(n, arm) for arm in args.arms for n in args.n]
    smollm2.check_model(args.model)
    smollm2.check_data(args.data)
    left = [one for one in planned if not (out / one.file).is_file()]
    smollm2.say(len(left), sum(one.seconds for one in left) / args.jobs)
    first = [one for one in planned if one.arm == TRACED]
    with ThreadPoolExecutor(args.jobs) as pool:
        for batch in (first, [one for one in planned if one.arm != TRACED]):
            list(pool.map(lambda one: as_measured(one, args, out), batch))
    return report(args, out)


def child(n: str, arm: str, given: str, out: str) -> None:
    Path(out).write_text(json.dumps(measure(Measured(int(n), arm), json.loads(given))))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else sys.exit(main())
