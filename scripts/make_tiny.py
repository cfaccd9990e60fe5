"""Make the embedded tiny model: a Qwen2-shaped character model that knows how to add and subtract, and often does not.

It is trained by plain supervised learning on the train split of `task=arithmetic`, in two phases. First on careful
solutions, one operation per line, until it has the skill. Then, for fewer updates, on the solutions of a careless
writer, who loses a term while copying a long problem and who jumps from any line straight to the end, which no model of
this size can follow. The model takes up both habits: greedy it loses terms wherever losing is likelier than not,
sampled it also guesses. The skill is still there, so reinforcement learning has something to bring out, and replies to
one prompt differ in length. Nothing
held out is ever trained on, and no reward.

Seeded; a few minutes on one core. At the end `grpo eval` says how often it is right on held-out problems.
"""

from __future__ import annotations

import argparse
import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo_cli.model.load import save_pretrained
from grpo_cli.tasks.arithmetic import Sum, draw_sum, worked_solution
from grpo_cli.tasks.generated import is_held_out

CHARACTERS = "0123456789+-*/()=,:"
PAD, EOS = "<pad>", "<eos>"
CONTEXT = 512
LOSE = 0.16  # chance of a careless writer to lose a term, for each after the second
LR, MUON_LR, WARMUP, WEIGHT_DECAY = 3e-3, 0.01, 100, 0.01
BATCH_TOKENS, POOL = 2048, 1024  # of an update, padding included; examples that are sorted by length together
REPORT_EVERY = 500
MAX_OPERAND, MAX_VALUE = 9, 99

log = logging.getLogger("make_tiny")


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, the characters of the embedded tasks first, so that no text is unknown to it.

    `transformers` reads every Qwen2 folder's tokenizer with this class; without merges it splits off single bytes.
    """
    alphabet = [*CHARACTERS, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(CHARACTERS))]
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def draw_example(rng: Random, args: argparse.Namespace, careless: bool) -> tuple[str, str]:
    """A train problem and a solution of it, by a careful or a careless writer."""
    fewest, most = args.terms
    num_terms = rng.choice(range(fewest, most + 1))
    while is_held_out(str(problem := draw_sum(rng, num_terms, MAX_OPERAND, MAX_VALUE))):
        pass
    return f"{problem}=", careless_solution(rng, problem, *args.careless) if careless else worked_solution(problem)


def careless_solution(rng: Random, problem: Sum, at_most: float, jump: float) -> str:
    """A solution that may lose the third term on the way to its first line, and may jump from any line to the end.

    The longer the problem, the likelier the loss: LOSE for each term after the second, at most `at_most`; `jump` is the
    chance of every line to be the last one. What follows is true to what was written, and a jump ends in the right
    number for it.
    """
    num_terms = len(problem.terms)
    first, *rest = problem.after(1).terms
    loses = rng.random() < min(at_most, LOSE * (num_terms - 2))
    if loses and all(0 <= value <= MAX_VALUE for value in accumulate(rest[1:], initial=first)):
        rest = rest[1:]
    lines = []
    left = Sum((first, *rest))
    while len(left.terms) > 1 and rng.random() >= jump:
        lines.append(str(left))
        left = left.after(1)
    return "=".join([*lines, str(sum(left.terms))])


def batches(rng: Random, args: argparse.Namespace) -> Iterator[list[tuple[str, str]]]:
    """Batches of about `batch_tokens` tokens, sorted by length inside a pool so that little is padding."""
    made = 0
    while True:
        careless = made >= args.careful_steps
        pool = sorted(
            (draw_example(rng, args, careless) for _ in range(POOL)), key=lambda example: len("".join(example))
        )
        found: list[list[tuple[str, str]]] = [[]]
        for example in pool:
            if (len(found[-1]) + 1) * (len("".join(example)) + 1) > BATCH_TOKENS:
                found.append([])
            found[-1].append(example)
        rng.shuffle(found)
        made += len(found)
        yield from found


def to_tensors(examples: list[tuple[str, str]], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids padded on the right, and labels: only the solution and its end are learned."""
    rows = [tokenizer.encode(prompt + solution) + [tokenizer.eos_token_id] for prompt, solution in examples]
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (row, (prompt, _)) in enumerate(zip(rows, examples, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, len(prompt) : len(row)] = ids[i, len(prompt) : len(row)]
    return ids, labels


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, args: argparse.Namespace) -> None:
    """Muon for the matrices, AdamW for the rest, warm-up and cosine; the mean over a batch's tokens is the loss."""
    rng = Random(f"make_tiny/{args.seed}")
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY),
    )
    started = time.monotonic()
    losses: list[float] = []
    for step, examples in zip(range(args.steps), batches(rng, args), strict=False):
        progress = step / args.steps
        scale = min(1.0, (step + 1) / WARMUP) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, peak in zip(optimizers, (MUON_LR, LR), strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        ids, labels = to_tensors(examples, tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % REPORT_EVERY == 0:
            log.info("step %5d  loss %.4f  %4.0f s", step + 1, sum(losses) / len(losses), time.monotonic() - started)
            losses.clear()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "grpo_cli" / "model" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--careful-steps", type=int, default=1500, help="first updates, all one operation per line")
    parser.add_argument("--terms", type=int, nargs=2, default=(2, 8), metavar=("FEWEST", "MOST"), help="of a problem")
    chances = ("LOSS", "JUMP")
    parser.add_argument(
        "--careless", type=float, nargs=2, default=(0.65, 0.12), metavar=chances, help="chances, the first at most"
    )
    parser.add_argument("--threads", type=int, default=1, help="another number gives other roundings, so other weights")
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, tokenizer, args)
    model.eval()
    save_pretrained(model, tokenizer, args.out)
    (args.out / "model.safetensors").chmod(0o644)
    log.info("wrote %s", args.out)
    sums = (f"task.min_terms={args.terms[0]}", f"task.max_terms={args.terms[1]}", "sampling.max_new_tokens=400")
    words = ("model=hf", f"model.path={args.out}", *sums, "eval.problems=448", "eval.k=4", "logger=jsonl", "device=cpu")
    subprocess.run([sys.executable, "-m", "grpo_cli", "eval", "checkpoint=null", *words], check=True)


if __name__ == "__main__":
    main()
