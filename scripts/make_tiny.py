"""Make the embedded tiny model: a Qwen2-shaped character model that knows how to add and subtract, and often does not.

It is trained by plain supervised learning on the train split of `task=arithmetic`, in two phases. First on careful
solutions, one operation per line, until it has the skill. Then, for fewer updates, on the solutions of a careless
writer, who loses a term while copying a long problem and who jumps from any line straight to the end, which no model of
this size can follow. The model takes up both habits: greedy it loses terms wherever losing is likelier than not,
sampled it also guesses. The skill is still there, so reinforcement learning has something to bring out, and replies to
one prompt differ in length. With `--countdown` a share of the examples is solved problems of `task=countdown`. Nothing
held out is ever trained on, and no reward.

Seeded; a few minutes on one core. Prints sampled and greedy accuracy on held-out problems, per number of terms.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo_cli.config.instantiate import ready
from grpo_cli.model.load import save_pretrained
from grpo_cli.tasks.arithmetic import Sum, draw_sum, final_answer, worked_solution
from grpo_cli.tasks.countdown import draw_problem
from grpo_cli.tasks.generated import is_held_out

CHARACTERS = "0123456789+-*/()=,:"
PAD, EOS = "<pad>", "<eos>"
CONTEXT = 512
TASK = {"min_terms": 2, "max_terms": 8, "max_operand": 9, "max_value": 99}

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


def make_model(args: argparse.Namespace, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=args.init,
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
    if args.countdown and rng.random() < args.countdown:
        return draw_countdown(rng)
    num_terms = rng.choice(range(TASK["min_terms"], TASK["max_terms"] + 1))
    while is_held_out(str(problem := draw_sum(rng, num_terms, TASK["max_operand"], TASK["max_value"]))):
        pass
    return f"{problem}=", careless_solution(rng, problem, args) if careless else worked_solution(problem)


def draw_countdown(rng: Random) -> tuple[str, str]:
    """A train problem of countdown, as the task draws them by default, and a solution of it."""
    while True:
        problem, solution = draw_problem(rng, rng.choice((3, 4)), max_number=20, max_target=99)
        if not is_held_out(problem.key):
            return f"{problem}=", solution


def careless_solution(rng: Random, problem: Sum, args: argparse.Namespace) -> str:
    """A solution that may lose the third term on the way to its first line, and may jump from any line to the end.

    The longer the problem, the likelier the loss: `--lose` for each term after the second, at most `--lose-at-most`.
    What follows is true to what was written, and a jump ends in the right number for it.
    """
    num_terms = len(problem.terms)
    first, *rest = problem.after(1).terms
    loses = rng.random() < min(args.lose_at_most, args.lose * (num_terms - 2))
    if loses and all(0 <= value <= TASK["max_value"] for value in accumulate(rest[1:], initial=first)):
        rest = rest[1:]
    lines = []
    left = Sum((first, *rest))
    while len(left.terms) > 1 and rng.random() >= args.jump:
        lines.append(str(left))
        left = left.after(1)
    return "=".join([*lines, str(sum(left.terms))])


def batches(rng: Random, args: argparse.Namespace) -> Iterator[list[tuple[str, str]]]:
    """Batches of about `batch_tokens` tokens, sorted by length inside a pool so that little is padding."""
    made = 0
    while True:
        careless = made >= args.careful_steps
        pool = sorted(
            (draw_example(rng, args, careless) for _ in range(args.pool)), key=lambda example: len("".join(example))
        )
        found: list[list[tuple[str, str]]] = [[]]
        for example in pool:
            if (len(found[-1]) + 1) * (len("".join(example)) + 1) > args.batch_tokens:
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
        torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=args.weight_decay),
    )
    peaks = (args.muon_lr, args.lr)
    started = time.monotonic()
    losses: list[float] = []
    for step, examples in zip(range(args.steps), batches(rng, args), strict=False):
        progress = step / args.steps
        scale = min(1.0, (step + 1) / args.warmup) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        ids, labels = to_tensors(examples, tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % args.report_every == 0:
            log.info("step %5d  loss %.4f  %4.0f s", step + 1, sum(losses) / len(losses), time.monotonic() - started)
            losses.clear()
            if args.probe:
                model.eval()
                report(model, tokenizer, args, problems_each=16)
                model.train()


@torch.inference_mode()
def reply_to(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompts: list[str], temperature: float, seed: int
) -> list[str | None]:
    """One reply per prompt, None where the model did not stop. Prompts are padded on the left."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    made = model.generate(**inputs, max_new_tokens=128, **(sampling if temperature > 0 else {"do_sample": False}))
    replies: list[str | None] = []
    for tokens in made[:, inputs.input_ids.shape[1] :].tolist():
        ended = tokenizer.eos_token_id in tokens
        replies.append(tokenizer.decode(tokens[: tokens.index(tokenizer.eos_token_id)]) if ended else None)
    return replies


def report(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, args: argparse.Namespace, problems_each: int) -> None:
    """Print sampled and greedy accuracy on held-out problems, per number of terms and in all, and reply lengths."""
    num_counts = TASK["max_terms"] - TASK["min_terms"] + 1
    offered = {"tokenizer": tokenizer, "seed": args.seed}
    task = ready("task", "arithmetic", offered, eval_problems=problems_each * num_counts, **TASK)
    problems = task.prompts("eval")
    texts = [tokenizer.decode(list(problem.token_ids)) for problem in problems]
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        replies = reply_to(model, tokenizer, texts, temperature, args.seed)
        right = [
            float(reply is not None and final_answer(reply) == problem.answer)
            for reply, problem in zip(replies, problems, strict=True)
        ]
        per_count = [sum(right[i::num_counts]) / problems_each for i in range(num_counts)]
        lengths = torch.tensor([float(len(reply) + 1 if reply is not None else 128) for reply in replies])
        log.info(
            "%s %.3f   by terms %s   length %.1f, cv %.2f",
            f"{name:8s}",
            sum(right) / len(right),
            " ".join(f"{TASK['min_terms'] + i}: {share:.2f}" for i, share in enumerate(per_count)),
            lengths.mean().item(),
            (lengths.std() / lengths.mean()).item(),
        )


def write_folder(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    save_pretrained(model, tokenizer, folder)
    (folder / "model.safetensors").chmod(0o644)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "grpo_cli" / "model" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--careful-steps", type=int, default=1500, help="first updates, all one operation per line")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per update, padding included")
    parser.add_argument("--pool", type=int, default=1024, help="examples that are sorted by length together")
    parser.add_argument("--lose", type=float, default=0.16, help="chance to lose a term, per term after the second")
    parser.add_argument("--lose-at-most", type=float, default=0.65)
    parser.add_argument("--jump", type=float, default=0.12, help="chance of every line to be the last one")
    parser.add_argument("--countdown", type=float, default=0.0, help="share of countdown examples")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--intermediate", type=int, default=288)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--init", type=float, default=0.08, help="standard deviation of the initial weights")
    parser.add_argument("--threads", type=int, default=1, help="another number gives other roundings, so other weights")
    parser.add_argument("--report-every", type=int, default=500)
    parser.add_argument("--probe", action="store_true", help="measure accuracy at every report")
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(args, tokenizer)
    log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, tokenizer, args)
    model.eval()
    report(model, tokenizer, args, problems_each=64)
    write_folder(model, tokenizer, args.out)
    log.info("wrote %s", args.out)


if __name__ == "__main__":
    main()
