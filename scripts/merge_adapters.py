"""Saved adapters and the model below them, made into one ordinary model folder.

    python scripts/merge_adapters.py outputs/train/<run>/checkpoints/step_000100 merged
    python scripts/merge_adapters.py <checkpoint> merged --base ./my-llama --dtype bfloat16

The base is the one that the adapters name (or that lies beside them), unless --base says otherwise. Adapters trained on
4-bit or 8-bit weights are merged into the unquantised ones, and the result rounds differently from what was trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from grpo_cli.config.compose import model_of
from grpo_cli.errors import UserError
from grpo_cli.model.adapters import base_of
from grpo_cli.model.load import DTYPES, load_model, load_tokenizer, save_pretrained


def merge(checkpoint: Path, target: Path, base: str | None, dtype: str) -> None:
    """Raises UserError when either half cannot be read, or when `target` holds something."""
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty; name a new folder")
    words = model_of("hf", path=base or base_of(checkpoint), dtype=dtype, adapter=str(checkpoint))
    merged = load_model(words, torch.device("cpu")).merge_and_unload()
    save_pretrained(merged, load_tokenizer(model_of("hf", path=str(checkpoint))), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a folder with adapters")
    parser.add_argument("target", type=Path, help="where the model goes")
    parser.add_argument("--base", help="a folder or a hub id")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    args = parser.parse_args()
    try:
        merge(args.checkpoint, args.target, args.base, args.dtype)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{args.target} holds the merged model")


if __name__ == "__main__":
    main()
