"""What measuring the policy's entropy (policy/entropy) adds to an update.

    python scripts/bench/entropy.py --json scripts/baselines/bench_entropy_tiny.json
    python scripts/bench/entropy.py --words model=smollm2_135m model.path=models/smollm2 --m 4 --groups 1 \\
        --prompt 32 --reply 64 --json scripts/baselines/bench_entropy_smollm2.json

Both arms make the same updates (forward, backward, AdamW) of one model from the same batch of random tokens, in one
process, taking turns; `without` has the backward pass over the logits without the entropy in it. Reported are medians
over the rounds in seconds and in seconds of processor time (which neighbours on a busy machine touch less), and what
`with` takes of `without` in the same round: the median, and the least and the most of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from common import Figures, bench_parser, finish, in_turns, medians, parsed, settings_of, show
from shared_prefix import add_batch, make_batch, measured
from torch import Tensor

from grpo_cli.config.prepare import prepare
from grpo_cli.learner import learner as learning
from grpo_cli.learner import logprobs
from grpo_cli.model.load import load_model
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Batch

COLUMNS = {
    "seconds": ("seconds", ".3g"),
    "CPU-s": ("cpu_seconds", ".3g"),
    "of without": ("ratio", ".3f"),
    "least": ("ratio_min", ".3f"),
    "most": ("ratio_max", ".3f"),
}


def slope(logits: Tensor, ids: Tensor, chosen: Tensor, factors: Tensor, temperature: float, entropy: Tensor) -> None:
    """`logprobs._slope_in_parts` without the entropy."""
    for some, which, factor in logprobs._few_rows(logits, ids, factors):
        found = logprobs._log_softmax(some, temperature).exp_().mul_(-factor[:, None])
        some.copy_(found.scatter_add_(1, which[:, None], factor[:, None]))


class NoEntropy(logprobs.Entropy):
    def room(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.empty(rows.shape, device=rows.device)

    def share(self) -> Tensor:
        return torch.zeros(())


def updated(learner: learning.Learner, batch: Batch, forward: Any, entropy: type[logprobs.Entropy]) -> Figures:
    learner._forward = forward
    with patch.object(learning, "Entropy", entropy):
        return measured(learner, batch)


def compare(args: argparse.Namespace) -> dict[str, Figures]:
    settings = settings_of("optim.lr=1e-9", "train.compile=false", *args.words)
    model = load_model(settings.model, torch.device("cpu"))
    given = settings.model, settings.sampling, settings.train, settings.optim, NullMeter()
    learner = learning.Learner(model, prepare(settings).rules.loss, *given)
    batch, forward = make_batch(args, model.config.vocab_size), learner._forward
    without = replace(forward, by_row=logprobs.ByRow(logprobs.PLAIN.chosen, slope))
    arms = {
        "without": partial(updated, learner, batch, without, NoEntropy),
        "with": partial(updated, learner, batch, forward, logprobs.Entropy),
    }
    for arm in arms.values():
        arm()
    turns = in_turns(arms, args.rounds)
    found = medians(turns)
    ratios = [turn["with"]["cpu_seconds"] / turn["without"]["cpu_seconds"] for turn in turns]
    found["with"] |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=7, threads=1)
    parser.add_argument("--words", nargs="+", default=[], help="of grpo train: another model")
    add_batch(parser, prompt=16, reply=32, m=16, groups=16)
    args = parsed(parser, words, rounds=1, prompt=8, reply=8, m=2, groups=1)
    torch.set_num_threads(args.threads)
    found = compare(args)
    show(f"{args.groups} prompt(s) of {args.prompt}, {args.m} replies of {args.reply} tokens", found, COLUMNS)
    return finish(args, {"arms": found})


if __name__ == "__main__":
    sys.exit(main())
