"""Decoding under eviction beside dense decoding: tokens per second and bytes of keys and values, at equal slots.

    python scripts/bench_sparsity.py --json scripts/baselines/bench_sparsity.json
    python scripts/bench_sparsity.py --models wide --lengths 2048 --policies snapkv rkv --rounds 5

All arms make the same number of rollouts of the same length from the same prompts on the same weights, in one process;
no rollout ends before its limit, as no token ends it. budget + buffer is half the completion's length, so that every
arm but `dense` is given half the memory. Arms take turns, so that a machine that slows down slows all; reported are
medians over the rounds, and the median of each round's ratio to `dense`. `/CPU-s` is tokens per second of processor
time, which neighbours on a busy machine do not touch. `tiny` is the embedded model; `wide` has random weights, and
as many key-value heads as heads, so that reading keys is most of its work.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_cli.config.compose import model_of
from grpo_cli.config.instantiate import ready
from grpo_cli.engine.engine import TorchEngine
from grpo_cli.engine.predict import NoPredictor
from grpo_cli.engine.schedule import Fifo
from grpo_cli.engine.sparsity import Budget, Dense, H2o, Rkv, SnapKv, Streaming
from grpo_cli.model.load import load_model
from grpo_cli.processor import settle
from grpo_cli.rollout import seed_of
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request

POLICIES = ("streaming", "h2o", "snapkv", "rkv")
WINDOW = 8
PROMPT_TOKENS = 16


def make_model(name: str, device: torch.device) -> Any:
    if name == "tiny":
        model = load_model(model_of("tiny"), device)
        model.config.max_position_embeddings = 1 << 16  # a longer context than it has learnt; nobody reads what it says
        return model
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval().to(device)


def make_sparsity(policy: str, length: int, protect_prompt: bool) -> Dense | Budget:
    """`policy` with half of the memory that completions of `length` need, a quarter of it as the buffer."""
    room = length // 2
    words: dict[str, Any] = dict(budget=room - room // 4, buffer=room // 4, window=WINDOW, sinks=0)
    words |= dict(protect_prompt=protect_prompt, per_head=True)
    made: Mapping[str, Any] = {
        "dense": lambda: Dense(),
        "streaming": lambda: Streaming(**words | {"sinks": 4}),
        "h2o": lambda: H2o(**words | {"window": words["budget"] // 2}),
        "snapkv": lambda: SnapKv(**words, kernel=7),
        "rkv": lambda: Rkv(**words, kernel=7, importance=0.1, threshold=0.5),
    }
    return made[policy]()


def make_requests(prompts: int, n: int, length: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling.plain(length)
    found = []
    for name in range(prompts):
        ids = tuple(torch.randint(2, 21, (PROMPT_TOKENS,), generator=generator).tolist())
        prompt = Prompt(f"p{name}", ids, "")
        found += [Request(prompt, sample, seed_of(name, sample), sampling) for sample in range(n)]
    return found


def measured(model: Any, sparsity: Dense | Budget, requests: Sequence[Request], slots: int) -> dict[str, float]:
    """One `generate`, from its first prompt to its last token."""
    engine = TorchEngine(
        model, (), ready("sampler", "infinite", slots=slots), Fifo(), NoPredictor(), sparsity, cuda_graph=False
    )
    wall, processor = time.perf_counter(), time.process_time()
    tokens = sum(len(rollout) for rollout in engine.generate(requests))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    stats = engine.stats()
    return {
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / processor,
        "kv_peak_bytes": float(stats.kv_peak_bytes),
        **{name.removeprefix("engine/"): value for name, value in stats.details.items()},
    }


def compare(args: argparse.Namespace, name: str, length: int) -> dict[str, dict[str, float]]:
    """Medians by arm, all arms taking turns."""
    model = make_model(name, torch.device(args.device))
    requests = make_requests(args.prompts, args.n, length)
    arms = {p: make_sparsity(p, length, not args.evict_prompts) for p in ("dense", *args.policies)}
    for sparsity in arms.values():
        measured(model, sparsity, make_requests(1, 2, length // 2 + 8), args.slots)
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(args.rounds):
        order = list(arms)[turn % len(arms) :] + list(arms)[: turn % len(arms)]
        rounds.append({arm: measured(model, arms[arm], requests, args.slots) for arm in order})
    found = {}
    for arm in arms:
        numbers = {key: statistics.median(turn[arm][key] for turn in rounds) for key in rounds[0][arm]}
        for key in ("tokens_per_second", "tokens_per_cpu_second"):
            numbers[f"{key}_ratio"] = statistics.median(turn[arm][key] / turn["dense"][key] for turn in rounds)
        numbers["kv_bytes_ratio"] = numbers["kv_peak_bytes"] / rounds[0]["dense"]["kv_peak_bytes"]
        found[arm] = numbers
    return found


def show(console: Console, title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("", "tokens/s", "of dense", "/CPU-s", "of dense", "KV MiB", "of dense", "reads saved", title=title)
    for arm, numbers in found.items():
        table.add_row(
            arm,
            f"{numbers['tokens_per_second']:.0f}",
            f"{numbers['tokens_per_second_ratio']:.2f}x",
            f"{numbers['tokens_per_cpu_second']:.0f}",
            f"{numbers['tokens_per_cpu_second_ratio']:.2f}x",
            f"{numbers['kv_peak_bytes'] / 2**20:.2f}",
            f"{numbers['kv_bytes_ratio']:.3f}x",
            f"{numbers['kv_saving_mean']:.0%}" if "kv_saving_mean" in numbers else "",
        )
    console.print(table)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", "wide"), default=["tiny", "wide"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of each completion")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--n", type=int, default=16, help="rollouts per prompt")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--evict-prompts", action="store_true", help="protect_prompt=false")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    console, found = Console(), {}
    for name in args.models:
        for length in args.lengths:
            key = f"{name}-{length}"
            found[key] = compare(args, name, length)
            show(console, f"{name}, {args.slots} slots, {length} tokens each", found[key])
    if args.json:
        words = {key: value for key, value in vars(args).items() if key != "json"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        machine = platform.processor() or platform.machine()
        result = {"settings": words, "versions": versions, "machine": machine, "results": found}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    settle()
    main()
