"""Rollouts with drafts (engine.draft) and without, of the same requests: passes of the policy, seconds, drafts kept.

    python scripts/bench/drafts.py tiny long smollm2 --json scripts/baselines/bench_drafts.json

tiny     the embedded model on task=arithmetic: 8 problems, 64 rollouts each, in 64 slots
long     a model like it for sums of 12 to 18 numbers in up to 350 tokens (scripts/reproduce.sh rivals_long makes it): 4
         problems, 16 rollouts each
smollm2  SmolLM2-135M as it comes on word problems, up to 256 tokens: 2 problems, 16 rollouts each

Each engine has made one call's rollouts before, so that what it measures of drafts is known; then arms take turns with
other requests in every round, the same for all. Seconds are the processor's, so that neighbours are not counted, and of
a token, since in bfloat16 a check's rounding may lead a rollout elsewhere.
`checking`: passes that checked drafts. `passes there`: those over the passes that would have been made in their place,
which are as many as `none` makes more, and they themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from common import (
    Check,
    Figures,
    bench_parser,
    clocked,
    engine_of,
    finish,
    in_turns,
    medians,
    over,
    parsed,
    settings_of,
)
from common import show as shown

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.instantiate import make
from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer

CASES = {
    "tiny": ("n=64", "train.prompts=8", "sampler=infinite", "sampler.slots=64"),
    "long": (
        *("model.path=models/long_sums", "task.min_terms=12", "task.max_terms=18", "sampling.max_new_tokens=400"),
        *("n=16", "train.prompts=4"),
    ),
    "smollm2": (
        *("model=smollm2_135m", "model.path=models/smollm2", "model.autocast=bfloat16", "task=word_problems"),
        *("sampling.max_new_tokens=256", "n=16", "train.prompts=2"),
    ),
}
ARMS = ("none", "ngram", "self")
COLUMNS = {
    "passes": ("passes", ".0f"),
    "checking": ("checking", ".0f"),
    "passes there": ("there", ".3f"),
    "kept": ("kept", ".3f"),
    "processor ms a token": ("per_token", ".3f"),
}


def arms_of(words: Sequence[str], kinds: Sequence[str]) -> dict[str, Callable[[], Figures]]:
    """What makes an arm's next rollouts. All have the model, and round by round the requests, in common."""
    settings = settings_of(*words)
    model, tokenizer = load_model(settings.model, torch.device("cpu")), load_tokenizer(settings.model)
    offered = {"tokenizer": tokenizer, "seed": 0, "warn": print}
    problems = make("task", settings.parts["task"], offered).prompts("train")
    calls = dict.fromkeys(kinds, 0)

    def arm(kind: str) -> Callable[[], Figures]:
        engine = engine_of(model, eos_token_ids(model, tokenizer), *words, f"engine.draft={kind}")

        def generate() -> Figures:
            first, calls[kind] = calls[kind] * settings.train.prompts, calls[kind] + 1
            prompts = [problems[first + index] for index in range(settings.train.prompts)]
            requests = requests_for(prompts, settings.n, settings.sampling, 0, calls[kind])
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.model.autocast == "bfloat16"):
                rollouts, seconds = clocked(lambda: list(engine.generate(requests)))
            stats, made = engine.stats(), float(sum(map(len, rollouts)))
            drafts = {name: stats.details.get(f"engine/draft_{name}", 0.0) for name in ("passes", "kept")}
            found = {"passes": float(stats.decode_steps), "tokens": made, "checking": drafts["passes"]}
            return {**found, **seconds, "kept": drafts["kept"], "per_token": 1e3 * seconds["cpu_seconds"] / made}

        generate()
        return generate

    return {kind: arm(kind) for kind in kinds}


def main(words: Sequence[str] | None = None) -> int:
    made = bench_parser(__doc__, rounds=5, threads=1)
    made.add_argument("cases", nargs="+", choices=sorted(CASES))
    made.add_argument("--kinds", nargs="+", choices=ARMS[1:], default=list(ARMS[1:]))
    args: argparse.Namespace = parsed(made, words, rounds=1)
    found, checks = {}, []
    for name in args.cases:
        turns = in_turns(arms_of(CASES[name], ("none", *args.kinds)), args.rounds)
        for turn in turns:
            for kind in args.kinds:
                checking, saved = turn[kind]["checking"], turn["none"]["passes"] - turn[kind]["passes"]
                turn[kind]["there"] = checking / (checking + saved) if checking else 1.0
            turn["none"]["there"] = 1.0
        found[name] = medians(turns)
        plain = [turn["none"] for turn in turns]
        for kind in args.kinds:
            mine = [turn[kind] for turn in turns]
            found[name][kind]["seconds over none"] = seconds = over(mine, plain, "per_token")
            if args.quick:  # a round says little
                continue
            checks.append(Check(f"{name}: processor seconds a token with draft={kind}, over none", seconds, most=1.02))
            if found[name][kind]["checking"] > 1 and found[name][kind]["tokens"] == found[name]["none"]["tokens"]:
                checks.append(Check(f"{name}: passes where draft={kind} is on", found[name][kind]["there"], most=0.8))
        shown(name, found[name], COLUMNS)
    return finish(args, {"found": found}, checks)


if __name__ == "__main__":
    raise SystemExit(main())
