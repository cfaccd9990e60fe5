"""How many greedy answers of a server are our engine's own: of an exported model, behind OpenAI's completions API.

    grpo export <run> out/
    vllm serve out/ --dtype float32            # or llama-server -m out.gguf
    python scripts/bench/served.py http://127.0.0.1:8000/v1 --words model=hf model.path=out task=word_problems

Where an answer differs, its `gap` is by how many nats the model prefers our token to the server's at the first place
where they part: in float32 some thousandths are rounding.
"""

from __future__ import annotations

import sys
from typing import Any

import httpx
import torch
from common import finish, parsed, parser, settings_of

from grpo_cli.evaluate import evaluate_with
from grpo_cli.experiment import set_up
from grpo_cli.settings import ExamSettings


def gap(bench: Any, prompt: tuple[int, ...], ours: str, theirs: str) -> float | None:
    """None where one answer is the beginning of the other."""
    mine, other = (bench.tokenizer.encode(text, add_special_tokens=False) for text in (ours, theirs))
    parts = [i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b]
    if not parts:
        return None
    with torch.no_grad():
        logits = bench.model(torch.tensor([[*prompt, *mine[: parts[0]]]])).logits[0, -1]
    return float(logits[mine[parts[0]]] - logits[other[parts[0]]])


def main(words: list[str] | None = None) -> int:
    made = parser(__doc__, threads=1)
    made.add_argument("url", nargs="?", default="http://127.0.0.1:8000/v1")
    made.add_argument("--words", nargs="*", default=[], help="of grpo eval: the model and the task")
    made.add_argument("--problems", type=int, default=50)
    made.add_argument("--tokens", type=int, default=24)
    args = parsed(made, words, problems=4)
    settings = settings_of(*args.words, f"sampling.max_new_tokens={args.tokens}")
    bench = set_up(settings, settings.model)
    exam = ExamSettings(problems=args.problems, k=0, temperature=1.0)
    ours = [example.reply for example in evaluate_with(bench, exam, settings.sampling, seed=0).examples]
    ends = bench.tokenizer.convert_ids_to_tokens(sorted({bench.tokenizer.eos_token_id}))
    differ = list[dict[str, Any]]()
    with httpx.Client(base_url=args.url, timeout=300) as client:
        model = client.get("models").raise_for_status().json()["data"][0]["id"]
        for prompt, own in zip(bench.task.prompts("eval")[: args.problems], ours, strict=True):
            text = bench.tokenizer.decode(prompt.token_ids)
            body = {"model": model, "prompt": text, "max_tokens": args.tokens, "temperature": 0}
            told = client.post("completions", json=body).raise_for_status().json()["choices"][0]["text"]
            own = own.removesuffix(ends[0]).strip()
            if told.strip() != own:
                differ.append({"ours": own, "theirs": told.strip(), "gap": gap(bench, prompt.token_ids, own, told)})
    print(f"{len(ours) - len(differ)} of {len(ours)} answers are equal", *differ, sep="\n")
    return finish(args, {"problems": len(ours), "equal": len(ours) - len(differ), "differ": differ})


if __name__ == "__main__":
    sys.exit(main())
