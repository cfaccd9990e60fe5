"""PODS on a real model where right answers are rare: does it pay to make more rollouts, and to choose among them?

    scripts/reproduce.sh pods_real
    scripts/reproduce.sh pods_real --seeds 0 --arms grpo_ga maxvar

SmolLM2-135M-Instruct (scripts/get_smollm2.sh) learns word problems, of which it gets one sample in fifteen right when
it begins (conf/experiment/word_problems_smollm2.yaml, with one prompt per step). Arms, tables and ratios are those of
`scripts/reproduce.sh pods`; besides the rules of the package there is `release`: max-variance as the multi-GPU release
of PODS computes it (release_rule.py), which keeps 54 % of the best variance where rewards are 0 or 1 and a group's
share of right answers is anything; all of it as long as at most half of `m` are right.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pods
import smollm2
import study
from pods import GROUPS, Plan
from study import Run

RULES = {
    **{rule: f"downsample={rule}" for rule in ("maxvar", "random", "maxreward")},
    "release": "downsample._target_=release_rule.maxvar_release",
}
PLAN = Plan(
    name="pods_real",
    task="word problems, SmolLM2-135M-Instruct",
    rules=RULES,
    settings={
        "word_problems": (
            ("experiment=word_problems_smollm2", "train.prompts=1", "eval.every=10", "eval.problems=64", "eval.k=2"),
            (*GROUPS, *RULES),
        )
    },
    steps={"grpo": 60, "grpo_ga": 30} | dict.fromkeys(RULES, 50),
)
# Of a processor, to be expected of a step with its share of the evaluations.
SECONDS = {"grpo": 11.0, "grpo_ga": 28.0} | dict.fromkeys(RULES, 18.0)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = pods.study_options(PLAN, __doc__)
    smollm2.add_model(made)
    made.set_defaults(seeds=[0, 1])
    return pods.parsed(made, words, PLAN)


def planned(args: argparse.Namespace) -> list[Run]:
    """Every run, by the weights of `--model`."""
    folder = f"model.path={args.model.resolve()}"
    runs = pods.planned(args, PLAN)
    return [replace(run, words=(*run.words, folder)) for run in runs]


def main(words: Sequence[str] | None = None) -> None:
    args = options(words)
    smollm2.check_model(args.model)
    runs = planned(args)
    out = study.folder(args, PLAN.name)
    left = [run for run in runs if not study.is_there(run, out)]
    smollm2.check_disk(out, len(left), args.jobs)
    steps = {arm: args.steps or PLAN.steps[arm] for arm in PLAN.arms}
    smollm2.say(len(left), sum(steps[run.arm] * SECONDS[run.arm] for run in left) / args.jobs)
    study.conduct(args, PLAN.name, runs, partial(pods.report, plan=PLAN))


if __name__ == "__main__":
    main()
