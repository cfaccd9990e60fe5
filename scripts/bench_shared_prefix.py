"""One update with padded rows, without padding, and with each group's prompt computed once (train.shared_prefix).

    python scripts/bench_shared_prefix.py --prompt 256 --rounds 3 --json scripts/baselines/bench_shared_prefix.json

All arms make the same updates (forward, backward, AdamW) of the same random Qwen2 of 50 M parameters from the same
batch of random tokens, in one process, taking turns, so that a machine that slows down slows all. Reported are medians
over the rounds, in seconds and in seconds of processor time (which neighbours on a busy machine do not touch), each
arm's ratio to `padded` as the median of the rounds' ratios, and how far its log-probabilities and its gradient's norm
are from `padded`'s. `--spread` draws reply lengths evenly from reply * (1 - spread) to reply * (1 + spread).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rollout_arms import SHAPES
from transformers import AutoModelForCausalLM

from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import ready
from grpo_cli.learner.learner import Learner
from grpo_cli.processor import settle
from grpo_cli.types import Batch

ARMS = {
    "padded": dict(padding_free=False, shared_prefix=False),
    "padding_free": dict(padding_free=True, shared_prefix=False),
    "shared_prefix": dict(padding_free=True, shared_prefix=True),
}
SETTINGS = settings_of("optim.lr=1e-6", "optim.warmup_steps=0")


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
    config = SHAPES[args.model].config
    assert config is not None, "the embedded model is no shape"
    config = replace_context(config, args.prompt + 2 * args.reply)
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(args.device)
    train = replace(SETTINGS.train, micro_batch_tokens=args.micro_batch_tokens, **ARMS[arm])
    return Learner(model, ready("loss", "grpo"), SETTINGS.model, train, SETTINGS.optim)


def replace_context(config: Any, tokens: int) -> Any:
    return type(config)(**(config.to_dict() | {"max_position_embeddings": max(tokens, 16)}))


def measured(learner: Learner, batch: Batch, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    wall, processor = time.perf_counter(), time.process_time()
    update = learner.update(batch, 1.0, 1, 0)
    if device == "cuda":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert update.fault is None, update.fault
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    norm = update.metrics["optim/grad_norm"]
    return {"seconds": wall, "cpu_seconds": processor, "peak_bytes": peak, "norm": norm, "logprobs": update.logprobs}


def compare(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures by arm. The first round is a warm-up; its first update, from the same weights, is compared."""
    learners = {arm: make_learner(args, arm) for arm in args.arms}
    shape = SHAPES[args.model].config
    batch = make_batch(args, shape.vocab_size if shape else 0)
    first = {arm: measured(learner, batch, args.device) for arm, learner in learners.items()}
    plain = first["padded"]
    rounds = [
        {arm: measured(learner, batch, args.device) for arm, learner in learners.items()} for _ in range(args.rounds)
    ]
    result = {}
    for arm in args.arms:
        result[arm] = {
            name: statistics.median(turn[arm][name] for turn in rounds)
            for name in ("seconds", "cpu_seconds", "peak_bytes")
        }
        for name in ("seconds", "cpu_seconds"):
            result[arm][f"{name}_ratio"] = statistics.median(t["padded"][name] / t[arm][name] for t in rounds)
        result[arm]["logprob_difference"] = float((first[arm]["logprobs"] - plain["logprobs"]).abs().max())
        result[arm]["norm_difference"] = abs(first[arm]["norm"] / plain["norm"] - 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name, shape in SHAPES.items() if shape.config], default="50m")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--reply", type=int, default=256, help="tokens")
    parser.add_argument("--spread", type=float, default=0.0, help="of the replies' lengths, 0 to 1")
    parser.add_argument("--m", type=int, default=8, help="replies per prompt")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "padded" not in args.arms:
        parser.error("--arms must name padded: it is what the others are compared with")
    torch.set_num_threads(args.threads)
    result = compare(args)
    for arm, figures in result.items():
        print(f"{arm:14}" + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    if args.json:
        machine = {"threads": args.threads, "load": os.getloadavg()[0], "platform": platform.platform()}
        machine |= {"torch": torch.__version__, "transformers": transformers.__version__}
        words = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"arguments": words, "machine": machine, "arms": result}, indent=2) + "\n")


if __name__ == "__main__":
    settle()
    main()
