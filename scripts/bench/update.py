"""One update (forward, backward, AdamW) of a model from a batch of random tokens, made in several ways.

    python scripts/bench/update.py prefix --prompt 256 --rounds 3     # padded, padding-free, with a shared prefix
    python scripts/bench/update.py entropy --model models/smollm2 --m 4 --prompt 32 --reply 64

prefix   padded rows, without padding, and with each group's prompt computed once (train.shared_prefix), of a random
         Qwen2 of 50 M parameters
entropy  with and without measuring the policy's entropy (policy/entropy), of the embedded model or of --model

All arms make the same updates of the same batch in one process, taking turns. Reported are medians over the rounds, in
seconds and in seconds of processor time (which neighbours on a busy machine do not touch), how long the first arm takes
over an arm, as the median of the rounds' ratios, and how far an arm's log-probabilities and gradient norm are from the
first one's. `--spread` draws reply lengths evenly from reply * (1 - spread) to reply * (1 + spread).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from arms import SHAPES
from common import Figures, bench_parser, clocked, finish, in_turns, medians, over, parsed, settings_of, show
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_cli.config.overrides import overrides
from grpo_cli.config.prepare import prepare
from grpo_cli.learner import learner as learning
from grpo_cli.learner import logprobs
from grpo_cli.model.load import load_model
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Batch

Updates = dict[str, Callable[[], tuple[Figures, Any]]]  # each arm's one update: its time, and what came of it
PREFIX = {
    "padded": ("train.padding_free=false", "train.shared_prefix=false"),
    "padding_free": ("train.padding_free=true", "train.shared_prefix=false"),
    "shared_prefix": ("train.padding_free=true", "train.shared_prefix=true"),
}
COLUMNS = {
    "seconds": ("seconds", ".3g"),
    "first over it": ("seconds_ratio", ".2f"),
    "CPU-s": ("cpu_seconds", ".3g"),
    "first over it, CPU": ("cpu_seconds_ratio", ".3f"),
    "log-probabilities differ by": ("logprob_difference", ".1g"),
    "gradient's norm by": ("norm_difference", ".1g"),
}


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


def learner_of(model: Any, *words: str) -> learning.Learner:
    settings = settings_of(*words)
    given = settings.model, settings.sampling, settings.train, settings.optim, NullMeter()
    return learning.Learner(model, prepare(settings).rules.loss, *given)


def updated(learner: learning.Learner, batch: Batch) -> tuple[Figures, Any]:
    update, clock = clocked(lambda: learner.update(batch, 0))
    assert update.fault is None, update.fault
    return clock, update


def prefix(args: argparse.Namespace) -> Updates:
    config = SHAPES[args.shape].config
    assert config is not None, "an arm is of random weights"
    context = {"max_position_embeddings": max(args.prompt + 2 * args.reply, 16)}
    batch, tokens = make_batch(args, config.vocab_size), f"train.micro_batch_tokens={args.micro_batch_tokens}"

    def arm(*words: str) -> Callable[[], tuple[Figures, Any]]:
        torch.manual_seed(args.seed)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | context), dtype=dtype)
        return partial(updated, learner_of(model.to(args.device), "optim.lr=1e-6", tokens, *words), batch)

    return {name: arm(*words) for name, words in PREFIX.items()}


def without_entropy(
    logits: Tensor, ids: Tensor, chosen: Tensor, factors: Tensor, temperature: float, entropy: Tensor
) -> None:
    """`logprobs._slope_in_parts` without the entropy."""
    for some, which, factor in logprobs.few_rows(logits, ids, factors):
        found = logprobs.log_softmax(some, temperature).exp_().mul_(-factor[:, None])
        some.copy_(found.scatter_add_(1, which[:, None], factor[:, None]))


class NoEntropy(logprobs.Entropy):
    def room(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.empty(rows.shape, device=rows.device)

    def share(self) -> Tensor:
        return torch.zeros(())


def entropy(args: argparse.Namespace) -> Updates:
    named = ("model=hf", *overrides({"model.path": args.model})) if args.model else ()
    words = (*named, "optim.lr=1e-9", "train.compile=false")
    model = load_model(settings_of(*words).model, torch.device("cpu"))
    learner, batch = learner_of(model, *words), make_batch(args, model.config.vocab_size)
    plain = replace(learner._forward, by_row=logprobs.ByRow(logprobs.PLAIN.chosen, without_entropy))
    whole = learner._forward

    def arm(forward: Any, kind: type[logprobs.Entropy]) -> tuple[Figures, Any]:
        learner._forward = forward
        with patch.object(learning, "Entropy", kind):
            return updated(learner, batch)

    return {"without": partial(arm, plain, NoEntropy), "with": partial(arm, whole, logprobs.Entropy)}


WHAT: Mapping[str, Callable[[argparse.Namespace], Updates]] = {"prefix": prefix, "entropy": entropy}


def compare(args: argparse.Namespace) -> dict[str, Figures]:
    """Figures by arm. The first update, from the same weights, is a warm-up, and what is compared."""
    arms = WHAT[args.what](args)
    first = {name: arm()[1] for name, arm in arms.items()}
    turns = in_turns({name: lambda arm=arm: arm()[0] for name, arm in arms.items()}, args.rounds)
    found, base = medians(turns), next(iter(arms))
    for name, figures in found.items():
        for of in ("seconds", "cpu_seconds"):
            figures[f"{of}_ratio"] = over([turn[base] for turn in turns], [turn[name] for turn in turns], of)
        figures["logprob_difference"] = float((first[name].logprobs - first[base].logprobs).abs().max())
        norms = [first[one].metrics["optim/grad_norm"] for one in (name, base)]
        figures["norm_difference"] = abs(norms[0] / norms[1] - 1)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=5, threads=1)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--shape", choices=[name for name, shape in SHAPES.items() if shape.config], default="50m")
    parser.add_argument("--model", help="of entropy: a model's folder")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--reply", type=int, default=256, help="tokens")
    parser.add_argument("--m", type=int, default=8, help="replies per prompt")
    parser.add_argument("--groups", type=int, default=1, help="prompts")
    parser.add_argument("--spread", type=float, default=0.0, help="of the replies' lengths, 0 to 1")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parsed(parser, words, rounds=1, shape="wide", prompt=16, reply=8, m=2)
    torch.set_num_threads(args.threads)
    found = compare(args)
    show(f"{args.groups} prompt(s) of {args.prompt}, {args.m} replies of {args.reply} tokens", found, COLUMNS)
    return finish(args, {"arms": found})


if __name__ == "__main__":
    sys.exit(main())
