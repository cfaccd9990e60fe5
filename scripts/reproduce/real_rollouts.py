"""Rollouts of a real model on GSM8K, arm by arm: slots, predicted lengths and evicted caches, with no training.

    scripts/reproduce.sh infinite_real --data train.jsonl
    scripts/reproduce.sh infinite_real --data train.jsonl --n 64 --arms micro infinite "infinite lpt prefix"

SmolLM2-135M-Instruct samples replies of at most 512 tokens, n of each problem, in calls of `generate` one after the
other; the predictor learns from each. Nothing is trained, so that every arm makes the same replies: in float32 on a CPU
where the engine holds bits. Arms in a quarter of a call's rollouts as slots: `micro`, `infinite`, and `infinite` with
the longest first (lpt) and with the plan of least makespan (fptas), by lengths as predicted after a few tokens (prefix)
and as they will be (oracle: the best that any predictor could give). `full` takes all at once. `budget` has as many
bytes for keys and values as those slots would reserve at the limit, and nothing else to bound its rows.

`mismatch` and `room` are parts of the study sparse_rl_real: log xi = log policy - log sampler of each token under the
dense policy, with the share of replies that hold a token which that finds impossible (xi below the published 1e-4); and
the replies at a time in the bytes of 16 dense ones at the limit. There prompts' keys are kept.

Each measurement is a process of its own with one thread; rates are tokens per second of processor time, which other
work on the machine does not touch. What is there is not measured again: the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import cache_words, check_data, check_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from arms import reserved_bytes
from common import ROOT, clocked, finish, in_a_process, parsed, parser, positive, settings_of, show, write

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.overrides import overrides
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import set_up
from grpo_cli.learner.logprobs import logprobs_at
from grpo_cli.support.memory import peak_bytes

SIZES = {16: (4, 2), 64: (1, 2), 256: (1, 2)}  # by n: prompts of a call of `generate`, and calls
SHARE = 4  # rollouts of a call over slots
ARMS: Mapping[str, tuple[str, ...]] = {
    "full": ("sampler=full",),
    "micro": ("sampler=micro",),
    "infinite": ("sampler=infinite",),
    **{
        f"infinite {scheduler} {predictor}": ("sampler=infinite", f"scheduler={scheduler}", f"predictor={predictor}")
        for scheduler, predictor in product(("lpt", "fptas"), ("prefix", "oracle"))
    },
    "budget": ("sampler=infinite", "sampler.slots=null"),
}
TRACED = "micro"  # whose lengths oracles know
VETO = 1e-4  # xi below which a token rejects its reply (arXiv 2601.10079)
QUANTILES = (0.001, 0.01, 0.05, 0.5)
POSITIONS = ((0, 64), (64, 128), (128, 256), (256, 512))  # tokens of a reply
CACHES = [f"{policy}_{budget}" for policy in ("h2o", "rkv", "snapkv", "streaming") for budget in (64, 128, 256)]
ROOM_SLOTS, ROOM_PROMPTS = 16, 8
COLUMNS = {
    "tokens/CPU-s": ("tokens_per_cpu_second", ",.0f"),
    "x micro": ("over_micro", ".2f"),
    "decode steps": ("decode_steps", ",.0f"),
    "rows at a time": ("engine/rows_mean", ".1f"),
    "KV MiB": ("kv_mib", ",.0f"),
    "tau": ("predictor/kendall_tau", ".2f"),
    "length": ("length_mean", ".0f"),
}


def measure(words: Sequence[str], prompts: int, samples: int, calls: int, compared: bool = False) -> dict[str, Any]:
    """All calls: their tokens over their processor time, and what the engine says of them, together or as means.

    `compared`: also the replies' tokens under the dense policy.
    """
    settings = settings_of(*words)
    bench = set_up(prepare(settings), settings.model, print)
    problems = bench.task.prompts("train")
    list(bench.engine.generate(requests_for([problems[-1]], 2, settings.sampling, settings.seed, 0)))  # warmed up
    found, trace, ratios = list[dict[str, Any]](), list[dict[str, Any]](), list[np.ndarray]()
    for call in range(calls):
        asked = [problems[prompts * call + place] for place in range(prompts)]
        requests = requests_for(asked, samples, settings.sampling, settings.seed, call)
        rollouts, clock = clocked(lambda: list(bench.engine.generate(requests)))  # noqa: B023 (done at once)
        stats = bench.engine.stats()
        named = {name: v for name, v in stats.details.items() if name.startswith(("engine/", "predictor/"))}
        rewards = [bench.task.reward(rollout.request.prompt, rollout).total for rollout in rollouts]
        named |= {"decode_steps": stats.decode_steps, "slot_utilisation": stats.slot_utilisation}
        named |= {"kv_mib": stats.kv_peak_bytes / 2**20, "tokens": sum(map(len, rollouts))}
        found.append({**clock, **named, "reward_mean": float(np.mean(rewards))})
        trace += [
            {"step": call, "prompt_id": r.request.prompt.id, "sample": r.request.sample, "length": len(r)}
            for r in rollouts
        ]
        ratios += log_ratios(bench.model, rollouts) if compared else []
    total = {name: sum(call[name] for call in found) for name in ("tokens", "seconds", "cpu_seconds", "decode_steps")}
    means = {name: float(np.mean([call[name] for call in found if name in call])) for call in found for name in call}
    return means | total | quantiles(ratios) | {
        "tokens_per_cpu_second": total["tokens"] / total["cpu_seconds"],
        "length_mean": total["tokens"] / len(trace),
        "length_max": max(row["length"] for row in trace),
        "peak_mib": peak_bytes("cpu") / 2**20,
        "prompt_tokens": max(len(prompt.token_ids) for prompt in asked),
        "trace": trace,
    }  # fmt: skip


def log_ratios(model: Any, rollouts: Sequence[Any]) -> list[np.ndarray]:
    """log xi of each token of each reply, under the dense policy."""
    found = []
    for rollout in rollouts:
        prompt = rollout.request.prompt.token_ids
        ids = torch.tensor([[*prompt, *rollout.token_ids]])
        columns = torch.arange(len(prompt), ids.shape[1])
        with torch.no_grad():
            policy = logprobs_at(model, ids, 0 * columns, columns, rollout.request.sampling.temperature, 256)
        found.append(policy.numpy() - np.array(rollout.sampler_logprobs, dtype=np.float32))
    return found


def quantiles(ratios: Sequence[np.ndarray]) -> dict[str, float]:
    """Of log xi, of all tokens and by their place; and the share of replies that are rejected."""
    if not ratios:
        return {}
    found = {f"log_xi_{q}": float(np.quantile(np.concatenate(ratios), q)) for q in QUANTILES}
    for low, high in POSITIONS:
        there = np.concatenate([ratio[low:high] for ratio in ratios])
        found |= {f"log_xi_{q}_{low}_{high}": float(np.quantile(there, q)) for q in QUANTILES if len(there)}
    return found | {"rejected": float(np.mean([ratio.min() < np.log(VETO) for ratio in ratios]))}


def measured(file: Path, asked: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """What `measure` finds in a process of its own goes into `file` with what it was asked with; unless it is there.
    SystemExit where that was asked with something else, or nothing comes of it."""
    if not file.is_file():
        print(f"measuring {file.parent.name}/{file.stem}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            found, reason = in_a_process(__file__, json.dumps(given), threads=1, folder=Path(scratch))
        if found is None:
            raise SystemExit(f"{file.stem}: {reason}; go on with the same command")
        write(file, {"asked": asked, **found})
    found = json.loads(file.read_text(encoding="utf-8"))
    if found.pop("asked") != asked:
        raise SystemExit(f"{file} was measured with other settings: give another --out, or remove it")
    return dict(found)


def common_words(args: argparse.Namespace, tokens: int) -> tuple[str, ...]:
    values = {"model.path": str(args.model), "task.path": str(args.data), "sampling.max_new_tokens": tokens}
    words = ("model=smollm2_135m", "model.autocast=none", "task=gsm8k", "device=cpu", "logger=jsonl")
    return (*words, *overrides(values))


def mismatch(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Of the study sparse_rl_real, by cache: replies beside the dense policy."""
    found = _in_caches(args, out / "mismatch", ["dense", *CACHES], ("sampler.slots=32",), (16, 2, 1), True)
    saved = {cache: {n: of.get(f"engine/kv_saving_{n}", 0.0) for n in ("mean", "allocated")} for cache, of in found}
    return {cache: of | saved[cache] for cache, of in found}


def room(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The same in the smallest caches: replies at a time, and their rate, in the bytes of ROOM_SLOTS dense ones."""
    tokens = 16 if args.quick else int(args.variables["tokens"])
    model = settings_of(*common_words(args, tokens)).model
    budget = reserved_bytes(model, ROOM_SLOTS, tokens, ROOM_PROMPTS, 256)
    words = ("sampler.slots=null", f"sampler.kv_budget={budget}")
    caches = ["dense", *(cache for cache in CACHES if cache.endswith("_64"))]
    found = dict(_in_caches(args, out / "room", caches, words, (ROOM_PROMPTS, 16, 1), False))
    rows = "engine/rows_mean"
    return {cache: of | {"over_dense": of[rows] / found["dense"][rows]} for cache, of in found.items()}


def _in_caches(
    args: argparse.Namespace,
    out: Path,
    caches: Sequence[str],
    more: Sequence[str],
    sizes: Sequence[int],
    compared: bool,
) -> list[tuple[str, dict[str, Any]]]:
    tokens = 16 if args.quick else int(args.variables["tokens"])
    asked = {"tokens": tokens, "data": args.data.name}
    caches = caches[:2] if args.quick else caches
    words = (*common_words(args, tokens), "sampler=infinite", *more)
    prompts, samples, calls = (1, 2, 1) if args.quick else sizes

    def one(cache: str) -> dict[str, Any]:
        given = dict(prompts=prompts, samples=samples, calls=calls, compared=compared)
        found = measured(out / f"{cache}.json", asked, words=[*words, *cache_words(cache)], **given)
        return {name: value for name, value in found.items() if name != "trace"}

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(zip(caches, pool.map(one, caches), strict=True))


def slots_of(n: int) -> int:
    return max(1, n * SIZES[n][0] // SHARE)


def arm_words(args: argparse.Namespace, n: int, arm: str, out: Path) -> tuple[str, ...]:
    """Those of `grpo train`. Oracles are given the lengths of TRACED, `budget` the bytes of its slots."""
    words = (*common_words(args, args.tokens), f"seed={args.seed}", *ARMS[arm])
    if arm == "budget":
        longest = json.loads((out / str(n) / f"{TRACED}.json").read_text())["prompt_tokens"]
        budget = reserved_bytes(settings_of(*words).model, slots_of(n), args.tokens, SIZES[n][0], longest)
        return (*words, f"sampler.kv_budget={budget}")
    if "predictor=oracle" in words:
        words = (*words, *overrides({"predictor.lengths": str(out / str(n) / "lengths.jsonl")}))
    return words if arm == "full" else (*words, *overrides({"sampler.slots": slots_of(n)}))


def infinite(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Figures by n and arm, and the lengths of each n's first call."""
    asked = {"tokens": args.tokens, "seed": args.seed, "data": args.data.name}
    results: dict[str, Any] = {"results": {}, "lengths": {}}
    for n in args.n:
        prompts, calls = SIZES[n]

        def one(arm: str, n: int = n, prompts: int = prompts, calls: int = calls) -> dict[str, Any]:
            file, words = out / str(n) / f"{arm.replace(' ', '_')}.json", arm_words(args, n, arm, out)
            return measured(file, asked, words=words, prompts=prompts, samples=n, calls=calls)

        trace = one(TRACED)["trace"]
        lines = "".join(json.dumps(row) + "\n" for row in trace)
        (out / str(n) / "lengths.jsonl").write_text(lines)
        with ThreadPoolExecutor(args.jobs) as pool:
            found = dict(zip(args.arms, pool.map(one, args.arms), strict=True))
        micro = found[TRACED]["tokens_per_cpu_second"]
        results["results"][n] = {
            arm: {name: v for name, v in of.items() if name != "trace"}
            | {"over_micro": of["tokens_per_cpu_second"] / micro}
            for arm, of in found.items()
        }
        first = sorted((row for row in trace if row["step"] == 0), key=lambda row: (row["prompt_id"], row["sample"]))
        results["lengths"][n] = [row["length"] for row in first]
        show(f"n={n}, {prompts} prompt(s) a call, {slots_of(n)} slots", results["results"][n], COLUMNS)
    return results


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, threads=1)
    made.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="of scripts/get_smollm2.sh")
    made.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    made.add_argument("--n", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="rollouts of a prompt")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--tokens", type=positive, default=512, help="of a reply, at most")
    made.add_argument("--jobs", type=positive, default=2, help="arms at a time")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("outputs/reproduce_infinite_real"))
    args = parsed(made, words, n=[16], tokens=8, arms=["micro", "infinite", "infinite lpt oracle", "budget"])
    args.arms = list(dict.fromkeys([TRACED, *args.arms]))
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    check_model(args.model)
    check_data(args.data)
    args.model, args.data = args.model.resolve(), args.data.resolve()
    out = (args.out.with_name(f"{args.out.name}_quick") if args.quick else args.out).resolve()
    return finish(args, infinite(args, out))


def child(given: str, out: str) -> None:
    Path(out).write_text(json.dumps(measure(**json.loads(given))))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else sys.exit(main())
