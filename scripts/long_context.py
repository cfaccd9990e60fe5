"""What a step of few, long completions takes on a GPU, lever by lever, each with all before it: predicted from shapes.

    python scripts/long_context.py          # Llama-3.1-8B: 8 rollouts of 20,000 tokens, adapters of rank 32
    python scripts/long_context.py model=smollm2_135m --tokens 4000

Neither a GPU nor weights are needed (see `grpo profile`). Left out is what CUDA, its kernels and its allocator take.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.profile.estimate import Prediction, total
from grpo_cli.profile.from_settings import estimator_of, shapes_of, step_of
from grpo_cli.profile.shapes import KV, Workload
from grpo_cli.types import Prompt

COLUMNS = ("rollouts", "their KV", "forward", "backward", "peak")
WHOLE = 10**9  # tokens: no micro-batch and no chunk is cut
LEVERS = {
    "none: bfloat16 below adapters": (f"train.micro_batch_tokens={WHOLE}", f"train.logprob_chunk={WHOLE}"),
    "logits in chunks": ("train.logprob_chunk=512",),
    "one sequence at a time": ("train.micro_batch_tokens=1",),
    "layers recomputed": ("model.gradient_checkpointing=true",),
    "4-bit base": ("model.quantize=4bit",),
    "activations on the CPU": ("model.offload_activations=true",),
    "AdamW's state on the CPU": ("optim.offload=true",),
    "half as many slots": ("sampler=infinite", "sampler.slots={half}"),
    "a quarter": ("sampler.slots={quarter}",),
}


def predictions(asked: argparse.Namespace) -> Iterator[tuple[str, Prediction]]:
    """The step with one lever after the other."""
    common = ["model=llama3_1_8b", "model.dtype=bfloat16", "model.autocast=bfloat16", f"model.lora.rank={asked.rank}"]
    common += ["device=cpu", "train.prompts=1", f"n={asked.n}", f"sampling.max_new_tokens={asked.tokens}", *asked.words]
    work = Workload.equal([Prompt("", (0,) * asked.prompt, "")], asked.n, asked.tokens)
    for name, words in LEVERS.items():
        common += [word.format(half=max(1, asked.n // 2), quarter=max(1, asked.n // 4)) for word in words]
        settings = settings_of(*common)
        shapes = shapes_of(settings.model)
        _, step = step_of(prepare(settings), False, seen=(work, None))
        yield name, estimator_of(settings, shapes, torch.device("cuda"), 0).predict(step)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="of a completion")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--n", type=int, default=8, help="rollouts")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("words", nargs="*", help="settings, as of grpo train")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options(arguments)
    print(f"{'GB, each lever with those above':31}" + "".join(f"{word:>10}" for word in COLUMNS))
    for name, found in predictions(asked):
        size = {phase: total(sizes) / 1e9 for phase, sizes in found.phases.items()}
        rollouts = max(size["prefill"], size["decode"])
        cells = (rollouts, found.exact[KV] / 1e9, size["forward"], size["backward"], found.peak / 1e9)
        print(f"{name:31}" + "".join(f"{cell:10.1f}" for cell in cells), flush=True)
    print(f"Shared prefix: the prompt's KV is held once for {asked.n} rollouts throughout.")


if __name__ == "__main__":
    main()
