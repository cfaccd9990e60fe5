"""One update with padded rows, without padding, and with each group's prompt computed once (train.shared_prefix).

    python scripts/bench/shared_prefix.py --prompt 256 --rounds 3 --json scripts/baselines/bench_shared_prefix.json

All arms make the same updates (forward, backward, AdamW) of the same random Qwen2 of 50 M parameters from the same
batch of random tokens, in one process, taking turns. Reported are medians over the rounds, in seconds and in seconds of
processor time (which neighbours on a busy machine do not touch), how many times as fast as `padded` an arm is as the
median of the rounds' ratios, and how far its log-probabilities and its gradient's norm are from `padded`'s. `--spread`
draws reply lengths evenly from reply * (1 - spread) to reply * (1 + spread).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from arms import SHAPES
from common import Figures, bench_parser, clocked, finish, in_turns, medians, over, parsed, settings_of, show
from transformers import AutoModelForCausalLM

from grpo_cli.config.prepare import prepare
from grpo_cli.learner.learner import Learner
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Batch

ARMS = {
    "padded": ("train.padding_free=false", "train.shared_prefix=false"),
    "padding_free": ("train.padding_free=true", "train.shared_prefix=false"),
    "shared_prefix": ("train.padding_free=true", "train.shared_prefix=true"),
}
COLUMNS = {
    "seconds": ("seconds", ".3g"),
    "padded over it": ("seconds_ratio", ".2f"),
    "CPU-s": ("cpu_seconds", ".3g"),
    "padded over it, CPU": ("cpu_seconds_ratio", ".2f"),
    "log-probabilities differ by": ("logprob_difference", ".1g"),
    "gradient's norm by": ("norm_difference", ".1g"),
}


def add_batch(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """What `make_batch` asks for."""
    words = {"prompt": "tokens", "reply": "tokens", "m": "replies per prompt", "groups": "prompts"}
    for name, help in words.items():
        parser.add_argument(f"--{name}", type=int, default=sizes[name], help=help)
    parser.add_argument("--spread", type=float, default=0.0, help="of the replies' lengths, 0 to 1")


def make_batch(args: argparse.Namespace, vocabulary: int) -> Batch:
    """`groups` prompts of `prompt` tokens, `m` replies to each."""
    generator = torch.Generator().manual_seed(args.seed)
    low, high = round(args.reply * (1 - args.spread)), round(args.reply * (1 + args.spread))
    replies = torch.randint(max(low, 1), high + 1, (args.groups * args.m,), generator=generator)
    width = args.prompt + int(replies.max())
    ids = torch.randint(0, vocabulary, (len(replies), width), generator=generator)
    ids[:, : args.prompt] = ids[:: args.m, : args.prompt].repeat_interleave(args.m, dim=0)
    places = torch.arange(width)
    mask = (places >= args.prompt) & (places < args.prompt + replies[:, None])
    return Batch(
        input_ids=ids * (places < args.prompt + replies[:, None]),
        response_mask=mask,
        loss_mask=mask,
        weights=mask.float(),
        sampler_logprobs=torch.zeros(mask.shape),
        policy_logprobs=None,
        ref_logprobs=None,
        advantages=torch.randn(len(replies), generator=generator),
        lengths=args.prompt + replies,
    )


def make_learner(args: argparse.Namespace, arm: str) -> Learner:
    context = max(args.prompt + 2 * args.reply, 16)
    shape = SHAPES[args.model].config
    config = type(shape)(**shape.to_dict() | {"max_position_embeddings": context})
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(args.device)
    tokens = f"train.micro_batch_tokens={args.micro_batch_tokens}"
    settings = settings_of("optim.lr=1e-6", tokens, *ARMS[arm])
    loss = prepare(settings).rules.loss
    return Learner(model, loss, settings.model, settings.sampling, settings.train, settings.optim, NullMeter())


def measured(learner: Learner, batch: Batch, kept: dict[str, Any] | None = None) -> Figures:
    """One update; its log-probabilities and its gradient's norm go to `kept`."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    update, clock = clocked(lambda: learner.update(batch, 0))
    assert update.fault is None, update.fault
    if kept is not None:
        kept |= {"logprobs": update.logprobs, "norm": update.metrics["optim/grad_norm"]}
    return clock | {"peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}


def compare(args: argparse.Namespace) -> dict[str, Figures]:
    """Figures by arm. The first update, from the same weights, is a warm-up, and what is compared."""
    learners = {arm: make_learner(args, arm) for arm in ARMS}
    batch = make_batch(args, SHAPES[args.model].config.vocab_size)
    first: dict[str, dict[str, Any]] = {arm: {} for arm in ARMS}
    for arm, learner in learners.items():
        measured(learner, batch, first[arm])
    turns = in_turns({arm: partial(measured, learner, batch) for arm, learner in learners.items()}, args.rounds)
    found, padded = medians(turns), [turn["padded"] for turn in turns]
    for arm, figures in found.items():
        for name in ("seconds", "cpu_seconds"):
            figures[f"{name}_ratio"] = over(padded, [turn[arm] for turn in turns], name)
        figures["logprob_difference"] = float((first[arm]["logprobs"] - first["padded"]["logprobs"]).abs().max())
        figures["norm_difference"] = abs(first[arm]["norm"] / first["padded"]["norm"] - 1)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=5, threads=1)
    parser.add_argument("--model", choices=[name for name, shape in SHAPES.items() if shape.config], default="50m")
    add_batch(parser, prompt=256, reply=256, m=8, groups=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parsed(parser, words, rounds=1, model="wide", prompt=16, reply=8, m=2)
    torch.set_num_threads(args.threads)
    found = compare(args)
    show(f"{args.groups} prompt(s) of {args.prompt}, {args.m} replies of {args.reply} tokens", found, COLUMNS)
    return finish(args, {"arms": found})


if __name__ == "__main__":
    sys.exit(main())
