"""Episodes of several turns, in place and round by round: time, decode steps and prefilled tokens of the same ones.

A made-up environment answers every turn by the same number of tokens, and may take its time: `--delays` are decode
steps (looks of the engine) until an answer is there. In place a row keeps its slot and its keys; a round draws one turn
of everybody and reads all histories again. Turns are as long as they may be, or with `--vary` of random length.

    python scripts/bench/turns.py --model models/smollm2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Check, Figures, bench_parser, clocked, engine_of, finish, in_turns, medians, over, parsed, show

from grpo_cli.collect import episodes
from grpo_cli.collect.episodes import Spent, play
from grpo_cli.collect.requests import seed_of
from grpo_cli.collect.resuming import begun
from grpo_cli.config.read import model_of
from grpo_cli.engine.costs import together
from grpo_cli.model.load import load_model
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request, Rollout

NEVER = -1  # a token that no model draws: nobody ends a turn by himself


class Later(Future):
    """There once it has been looked at so often."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def done(self) -> bool:
        if self._left == 0:
            self.set_result(["answered"])
        self._left -= 1
        return super().done()


class Environment:
    """Answers each turn by `reply` tokens."""

    def __init__(self, turns: int, reply: int, delay: int, ends: Sequence[str]) -> None:
        self.turns, self._reply, self._delay, self.turn_ends = turns, reply, delay, tuple(ends)

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Any]:
        return Later(self._delay)

    def between(self, turns: Sequence[Sequence[int]], said: Sequence[str]) -> Sequence[int]:
        return [5 + (len(turns) * 7 + i) % 90 for i in range(self._reply)]

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def prompts(self, split: str) -> Any:
        raise NotImplementedError

    def reward(self, prompt: Prompt, rollout: Rollout) -> Any:
        raise NotImplementedError


class InRounds:
    """The engine, which says no more that it answers in place."""

    def __init__(self, engine: Any) -> None:
        self.generate, self.stats = engine.generate, engine.stats


def requests_of(args: argparse.Namespace, vocabulary: int) -> list[Request]:
    generator = torch.Generator().manual_seed(args.seed)
    most = args.turns * args.tokens + (args.turns - 1) * args.reply
    sampling = replace(Sampling.plain(most + 1), max_turn_tokens=args.tokens)
    found = []
    for name in range(args.prompts):
        ids = tuple(torch.randint(5, vocabulary, (args.prompt,), generator=generator).tolist())
        prompt = Prompt(f"p{name}", ids, "")
        found += [Request(prompt, i, seed_of(args.seed, name, i), sampling) for i in range(args.n // args.prompts)]
    return found


def measured(engine: Any, args: argparse.Namespace, requests: Sequence[Request], delay: int) -> Figures:
    ends = ("0 ",) if args.vary else ()
    spent = Spent()
    made, figures = clocked(
        lambda: list(
            play(engine, Environment(args.turns, args.reply, delay, ends), [*map(begun, requests)], spent=spent)
        )
    )
    cost = together(spent.costs)
    assert all(len(one.turns) == args.turns for one in made), "every episode has all its turns"
    return figures | {
        "decode_steps": cost.decode_steps,
        "prefill_tokens": cost.prefill_tokens,
        "slots_busy": cost.slot_utilisation,
        "tokens": sum(map(len, made)),
    }


def main(words: Sequence[str] | None = None) -> int:
    made = bench_parser(__doc__, rounds=2)
    made.add_argument("--model", type=Path, default=Path("tiny"), help="tiny, or a folder")
    made.add_argument("--dtype", default="float32")
    for name, default in dict(n=64, prompts=1, slots=16, turns=5, tokens=60, reply=20, prompt=80).items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--vary", action="store_true", help="turns of random length, at most --tokens")
    made.add_argument("--delays", type=int, nargs="*", default=[20])
    args = parsed(made, words, n=8, slots=4, turns=3, tokens=12, reply=4, prompt=20, rounds=1)
    torch.set_num_threads(args.threads)
    name = "tiny" if str(args.model) == "tiny" else "hf"
    settings = model_of(name, path=str(args.model), dtype=args.dtype)
    model = load_model(settings, torch.device("cpu"))
    requests = requests_of(args, model.config.vocab_size)
    slots = ("sampler=infinite", f"sampler.slots={args.slots}")
    text = lambda ids: " ".join(map(str, [*ids, ""]))  # noqa: E731
    engine = engine_of(model, (NEVER,), *slots, decode=text, rollouts_per_step=args.n)
    arms: dict[str, Callable[[], Figures]] = {
        "in place": partial(measured, engine, args, requests, 0),
        "rounds": partial(measured, InRounds(engine), args, requests, 0),
    }
    for delay in args.delays:
        arms[f"in place, answers after {delay}"] = partial(measured, engine, args, requests, delay)
    episodes.GRACE = episodes.POLL = 0.0
    arms["in place"]()  # warm
    turns = in_turns(arms, args.rounds)
    found = medians(turns)
    columns = {"seconds": ("seconds", ".1f"), "decode steps": ("decode_steps", ".0f")}
    columns |= {"prefilled": ("prefill_tokens", ".0f"), "slots busy": ("slots_busy", ".3f")}
    show(f"{args.n} episodes in {args.slots} slots: {args.turns} turns of {args.tokens} tokens", found, columns)
    ratio = over([turn["in place"] for turn in turns], [turn["rounds"] for turn in turns], "seconds")
    checks = [Check("time in place over rounds", ratio, most=0.55)]
    for delay in args.delays:
        late = found[f"in place, answers after {delay}"]["decode_steps"] / found["in place"]["decode_steps"]
        checks.append(Check(f"decode steps where answers take {delay} over answers at once", late, most=1.10))
    return finish(args, {"arms": found, "turns": turns}, checks)


if __name__ == "__main__":
    sys.exit(main())
