"""Sparse-RL on a real model: how far evicted caches lead a sampler from its policy, and what training makes of it.

    scripts/reproduce.sh sparse_rl_real --data train.jsonl
    scripts/reproduce.sh sparse_rl_real --data train.jsonl --budgets 64 --no-training

Three parts, of SmolLM2-135M-Instruct. `mismatch`: replies to GSM8K of at most 512 tokens, sampled with each eviction
policy at each budget, and log xi = log policy - log sampler of each token under the dense policy: quantiles, also by
position, and the share of replies with a token that the dense policy finds impossible (xi below the published 1e-4),
which Sparse-RL rejects. `room`: as many replies at a time as the keys and values of 16 dense ones at the limit leave
room for. `training`: word problems (conf/experiment/word_problems_smollm2.yaml) dense and in caches of a few keys,
uncorrected and corrected, at a raised learning rate; then what is left of each policy's accuracy in other caches, of
the dense one's also where prompts are evicted as well (`whole`), which are four fifths of what these replies read.

Else prompts' keys are kept (sparsity.protect_prompt). Rates are tokens per second of processor time, one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import smollm2
import sparse_rl
import study
import torch
from common import Check, clocked, document, finish, parsed, parser, positive, settings_of, show, write
from study import Run

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.overrides import overrides
from grpo_cli.engine.kv.padding import round_up
from grpo_cli.experiment import set_up
from grpo_cli.learner.logprobs import token_logprobs

VETO = 1e-4  # xi below which a token rejects its reply (arXiv 2601.10079)
QUANTILES = (0.001, 0.01, 0.05, 0.5)
POSITIONS = ((0, 64), (64, 128), (128, 256), (256, 512))  # tokens of a reply
PROMPTS, SAMPLES = 16, 2  # of `mismatch`
ROOM_PROMPTS, ROOM_SAMPLES, ROOM_SLOTS = 8, 16, 16
TRIED, BUFFER = 8, 4  # keys of the reply in which every eviction is tried, and steps between two, as of the training
# In which the dense policy is tried too: keys of the reply, and of prompt and reply, at most about 60 and 14.
KEPT, WHOLE = (4,), (16, 24, 40)
TRAINING = (
    *("experiment=word_problems_smollm2", "train.prompts=2", "n=16", "m=16", "downsample=all", "optim.lr=4e-5"),
    *("eval.every=10", "eval.problems=100", "eval.k=2"),
)
# Of a processor, to be expected of one.
SECONDS = {"mismatch": 150.0, "room": 200.0, "training": 1200.0, "evaluation": 60.0}
COLUMNS = {
    "log xi 0.1 %": ("log_xi_0.001", ".2f"),
    "1 %": ("log_xi_0.01", ".2f"),
    "5 %": ("log_xi_0.05", ".2f"),
    **{f"1 %, {low}-{high}": (f"log_xi_0.01_{low}_{high}", ".2f") for low, high in POSITIONS},
    "rejected": ("rejected", ".0%"),
    "right": ("reward_mean", ".0%"),
    "KV saved: read": ("mean", ".0%"),
    "allocated": ("allocated", ".0%"),
    "length": ("length_mean", ".0f"),
}
ROOM = {
    "rows at a time": ("engine/rows_mean", ".1f"),
    "x dense": ("over_dense", ".2f"),
    "tokens/CPU-s": ("tokens_per_cpu_second", ",.0f"),
    "KV MiB": ("kv_mib", ",.0f"),
}


@dataclass(frozen=True)
class Cache:
    """An eviction policy with a budget, or none (`dense`, 0)."""

    policy: str
    budget: int
    whole: bool = False  # of prompt and reply
    window: int | None = None  # a reply's first tokens, before which its prompt stays whole; or as in the training

    @property
    def name(self) -> str:
        early = "" if self.window is None else f"_after_{self.window}"
        return f"{self.policy}_{self.budget}{'_whole' * self.whole}{early}" if self.budget else self.policy

    def words(self, buffer: int) -> tuple[str, ...]:
        asked = argparse.Namespace(budget=self.budget, buffer=buffer, evict_prompts=self.whole)
        return sparse_rl.sparsity_words(self.policy, asked, self.window)


DENSE = Cache("dense", 0)
# The first has fewer keys than most replies to begin with and evicts by place, the second twice as many by attention.
TRAINED = {cache.name: cache for cache in (Cache("streaming", 8), Cache("rkv", 12))}
# Prompts cut down after fewer tokens of the reply, by which most is read.
EARLY = tuple(
    Cache(policy, budget, True, window)
    for policy, budget, window in (
        *(("h2o", 16, 4), ("streaming", 24, 4), ("rkv", 16, 4)),
        *(("rkv", 20, 4), ("rkv", 24, 4), ("rkv", 24, 2)),
    )
)


def settings_for(cache: Cache, given: Mapping[str, Any], *more: str) -> Any:
    values = {"model.path": given["model"], "task.path": given["data"], "sampling.max_new_tokens": given["tokens"]}
    values |= {"seed": given["seed"], "run_dir": "outputs/bench"}
    words = (
        "model=smollm2_135m",
        "model.autocast=none",
        "task=gsm8k",
        "device=cpu",
        "logger=jsonl",
        "sampler=infinite",
    )
    return settings_of(*words, *cache.words(max(1, cache.budget // 4)), *more, *overrides(values))


def log_ratios(model: Any, rollouts: Sequence[Any], pad: int) -> list[np.ndarray]:
    """log xi of each token of each reply, under the dense policy."""
    found = []
    for rollout in rollouts:
        prompt = rollout.request.prompt.token_ids
        ids = torch.tensor([[*prompt, *rollout.token_ids]])
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        mask[:, len(prompt) :] = True
        with torch.no_grad():
            policy = token_logprobs(model, ids, mask, rollout.request.sampling.temperature, 256)
        found.append(policy[0, len(prompt) :].numpy() - np.array(rollout.sampler_logprobs, dtype=np.float32))
    return found


def mismatch(cache: Cache, given: Mapping[str, Any]) -> dict[str, Any]:
    """Replies of a cache beside the dense policy."""
    settings = settings_for(cache, given, "sampler.slots=32")
    bench = set_up(settings, settings.model, print)
    problems = bench.task.prompts("train")
    prompts = [problems[i] for i in range(PROMPTS)]
    requests = requests_for(prompts, SAMPLES, settings.sampling, settings.seed, 0)
    rollouts = list(bench.engine.generate(requests))
    ratios = log_ratios(bench.model, rollouts, bench.pad_token_id)
    every = np.concatenate(ratios)
    found = {f"log_xi_{q}": float(np.quantile(every, q)) for q in QUANTILES}
    for low, high in POSITIONS:
        there = np.concatenate([ratio[low:high] for ratio in ratios])
        if len(there):
            found |= {f"log_xi_{q}_{low}_{high}": float(np.quantile(there, q)) for q in QUANTILES}
    lengths, details = [len(rollout) for rollout in rollouts], bench.engine.stats().details
    rewards = [bench.task.reward(rollout.request.prompt, rollout).total for rollout in rollouts]
    return found | {
        "rejected": float(np.mean([ratio.min() < np.log(VETO) for ratio in ratios])),
        "reward_mean": float(np.mean(rewards)),
        **{name: details.get(f"engine/kv_saving_{name}", 0.0) for name in ("mean", "peak", "allocated")},
        "length_mean": float(np.mean(lengths)),
        "tokens": sum(lengths),
    }


def room(cache: Cache, given: Mapping[str, Any]) -> dict[str, Any]:
    """Replies at a time, and their rate, in the bytes of ROOM_SLOTS dense ones at the limit."""
    shape = settings_for(DENSE, given).model.architecture
    assert shape is not None, "the preset says the shape"
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    budget = token * (ROOM_SLOTS * round_up(given["tokens"], 64) + ROOM_PROMPTS * 256)
    settings = settings_for(cache, given, "sampler.slots=null", f"sampler.kv_budget={budget}")
    bench = set_up(settings, settings.model, print)
    problems = bench.task.prompts("train")
    prompts = [problems[i] for i in range(ROOM_PROMPTS)]
    requests = requests_for(prompts, ROOM_SAMPLES, settings.sampling, settings.seed, 0)
    rollouts, clock = clocked(lambda: list(bench.engine.generate(requests)))
    stats, tokens = bench.engine.stats(), sum(map(len, rollouts))
    return {
        **clock,
        "tokens": tokens,
        "tokens_per_cpu_second": tokens / clock["cpu_seconds"],
        "engine/rows_mean": stats.details["engine/rows_mean"],
        "kv_mib": stats.kv_peak_bytes / 2**20,
        "budget_mib": budget / 2**20,
    }


def caches_of(args: argparse.Namespace) -> list[Cache]:
    return [DENSE, *(Cache(policy, budget) for policy, budget in product(args.policies, args.budgets))]


def rooms_of(args: argparse.Namespace) -> list[Cache]:
    return [DENSE, *(Cache(policy, min(args.budgets)) for policy in args.policies)]


def trained(args: argparse.Namespace) -> list[Run]:
    """The training runs: dense, and in each of the caches uncorrected and corrected."""

    def run(cache: Cache, arm: str, seed: int) -> Run:
        correction = sparse_rl.CORRECTIONS.get(arm, "none")
        more = (f"correction={correction}", f"seed={seed}", f"train.steps={args.steps}")
        folder = tuple(word.lstrip("+") for word in overrides({"model.path": str(args.model)}))
        return Run(cache.name, arm, seed, (*TRAINING, *folder, *cache.words(BUFFER), *more, *study.QUIET))

    few = [TRAINED[name] for name in args.trained]
    arms = [(DENSE, "dense"), *product(few, sparse_rl.CORRECTIONS)]
    return study.in_turns([[run(cache, arm, seed) for cache, arm in arms] for seed in args.seeds])


def evaluated(args: argparse.Namespace, arm: str) -> dict[str, tuple[str, ...]]:
    """Caches in which a trained policy is tried: none evicted and those of all trainings, the dense policy in more."""
    caches = [DENSE, *(TRAINED[name] for name in args.trained)]
    if arm == "dense":
        kept = [Cache(policy, budget) for policy, budget in product(args.policies, (*KEPT, TRIED))]
        # Its four sinks and as many keys of the window always stay.
        caches += [cache for cache in kept if cache.policy != "streaming" or cache.budget >= 8]
        caches += [Cache(policy, budget, whole=True) for policy, budget in product(args.policies, WHOLE)]
        caches += [cache for cache in EARLY if cache.policy in args.policies]
    return {cache.name: cache.words(BUFFER) for cache in caches}


def evaluate(runs: Sequence[Run], args: argparse.Namespace, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run in runs:
        found |= sparse_rl.evaluate_all([run], args, out, evaluated(args, run.arm))
    return found


def report(args: argparse.Namespace, out: Path) -> int:
    """Tables to the screen, all figures as JSON."""
    found = {cache.name: _read(out / "mismatch" / f"{cache.name}.json") for cache in caches_of(args)}
    show(f"{PROMPTS} x {SAMPLES} replies to GSM8K of at most {args.tokens} tokens", found, COLUMNS)
    rooms = {cache.name: _read(out / "room" / f"{cache.name}.json") for cache in rooms_of(args)}
    for figures in rooms.values():
        figures["over_dense"] = figures["engine/rows_mean"] / rooms["dense"]["engine/rows_mean"]
    show(f"at a time, in the bytes of {ROOM_SLOTS} dense replies at the limit", rooms, ROOM)
    results: dict[str, Any] = {"mismatch": found, "room": rooms}
    checks: list[Check] = []
    if args.training:
        runs = trained(args)
        rows = {arm: {run.seed: study.read_rows(run, out) for run in of} for arm, of in sparse_rl.by_arm(runs).items()}
        of_runs = {arm: {seed: sparse_rl.of_run(r) for seed, r in seeds.items()} for arm, seeds in rows.items()}
        tried = evaluate(runs, args, out)
        print(f"\n{sparse_rl.results_table(of_runs)}\n")
        print(sparse_rl.robustness_table(sparse_rl.by_arm(runs), tried, list(evaluated(args, "sparse"))))
        print(f"\n{of_dense(runs, tried)}")
        results |= {"training": of_runs, "evaluations": tried}
        checks = [_reads(runs, tried), _bytes(of_runs, runs, tried)]
    write(out / "results.json", document(args) | results)
    return finish(args, results, checks)


def of_dense(runs: Sequence[Run], tried: Mapping[str, Any]) -> str:
    """What the policy that was trained without eviction keeps of its accuracy, and what is saved for it."""
    lines = [
        [name, study.spread(accuracies), f"{accuracy:.0%}", f"{saved:.0%}"]
        for name, (accuracies, accuracy, saved) in _kept(runs, tried).items()
    ]
    return study.markdown(("dense policy in", "pass@1", "of dense", "reads saved, prompts included"), lines)


def _kept(runs: Sequence[Run], tried: Mapping[str, Any]) -> dict[str, tuple[list[float], float, float]]:
    """By cache the accuracies of the dense arm's seeds, their mean over that in a dense cache, and the share saved."""
    of_arm = [tried[run.name] for run in runs if run.arm == "dense"]
    dense = float(np.mean([found["dense"][study.ACCURACY] for found in of_arm]))
    kept = {}
    for name in of_arm[0]:
        accuracies = [found[name][study.ACCURACY] for found in of_arm]
        saved = float(np.mean([found[name]["engine/kv_saving_mean"] for found in of_arm]))
        kept[name] = (accuracies, float(np.mean(accuracies)) / dense, saved)
    return kept


def _reads(runs: Sequence[Run], tried: Mapping[str, Any]) -> Check:
    """The dense policy's accuracy where at least half of the keys that are read are saved, prompts included."""
    best = max((accuracy for _, accuracy, saved in _kept(runs, tried).values() if saved >= 0.5), default=0.0)
    return Check("accuracy with half of the reads saved, over dense", best, least=0.97)


def _bytes(found: Mapping[str, Mapping[int, Any]], runs: Sequence[Run], tried: Mapping[str, Any]) -> Check:
    """Accuracy in its own cache of the best arm that was trained in half the bytes of dense slots, or fewer, over the
    dense arm's in a dense one: ratios of each seed, their mean."""
    dense = {run.seed: tried[run.name]["dense"][study.ACCURACY] for run in runs if run.arm == "dense"}
    best = 0.0
    for title, of_arm in sparse_rl.by_arm(runs).items():
        if min(figures["engine/kv_saving_allocated"] for figures in found[title].values()) >= 0.5:
            ratios = [tried[run.name][run.setting][study.ACCURACY] / dense[run.seed] for run in of_arm]
            best = max(best, float(np.mean(ratios)))
    return Check("accuracy trained and tried in half of the bytes, over dense", best, least=0.97)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return {name: value for name, value in found.items() if name != "asked"}


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, threads=1)
    smollm2.add_model(made)
    made.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    made.add_argument("--policies", nargs="+", choices=sparse_rl.POLICIES, default=list(sparse_rl.POLICIES))
    made.add_argument("--budgets", type=positive, nargs="+", default=[64, 128, 256], help="keys of a reply")
    made.add_argument("--tokens", type=positive, default=512, help="of a reply, at most")
    made.add_argument("--training", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--trained", nargs="+", choices=TRAINED, default=list(TRAINED), help="caches of the training")
    made.add_argument("--steps", type=positive, default=60, help="of training")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], help="of training")
    made.add_argument("--eval-problems", type=int, default=200, help="in each cache after training")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--jobs", type=positive, default=2, help="at a time")
    made.add_argument("--out", type=Path, default=None, help="default: outputs/reproduce_sparse_rl_real")
    return parsed(made, words, policies=["rkv"], budgets=[8], tokens=16, training=False)


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    args.model, args.data = args.model.resolve(), args.data.resolve()
    smollm2.check_model(args.model)
    smollm2.check_data(args.data)
    out = study.folder(args, "sparse_rl_real")
    runs = [run for run in trained(args) if not study.is_there(run, out)] if args.training else []
    smollm2.check_disk(out, len(runs), args.jobs)
    parts = [("mismatch", cache) for cache in caches_of(args)] + [("room", cache) for cache in rooms_of(args)]
    left = [part for part, cache in parts if not (out / part / f"{cache.name}.json").is_file()]
    untried = [
        cache
        for run in (trained(args) if args.training else [])
        for cache in evaluated(args, run.arm)
        if not (out / "evaluations" / run.name / cache / "summary.json").is_file()
    ]
    seconds = sum(SECONDS[part] for part in left) + len(runs) * SECONDS["training"]
    seconds += len(untried) * SECONDS["evaluation"]
    smollm2.say(len(left) + len(runs) + len(untried), seconds / args.jobs)
    given = {"model": str(args.model), "data": str(args.data), "tokens": args.tokens, "seed": args.seed}
    asked = {"tokens": args.tokens, "seed": args.seed, "data": args.data.name}

    def one(part: str, cache: Cache) -> None:
        words = (part, cache.policy, str(cache.budget), json.dumps(given))
        smollm2.measured(__file__, out / part / f"{cache.name}.json", asked, *words)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda given: one(*given), parts))
    if args.training:
        study.run_all("train", {run.name: run.words for run in trained(args)}, out, args)
    return report(args, out)


def child(part: str, policy: str, budget: str, given: str, out: str) -> None:
    measure = {"mismatch": mismatch, "room": room}[part]
    Path(out).write_text(json.dumps(measure(Cache(policy, int(budget)), json.loads(given))))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else sys.exit(main())
