"""A pretrained model of 135 M parameters: rollouts, what a decode step could take, and training.

    scripts/get_smollm2.sh models/smollm2
    python scripts/bench/real.py --model models/smollm2 --data train.jsonl --json scripts/baselines/bench_real.json
    python scripts/bench/real.py --parts rollout --precisions bfloat16 --rounds 1
    python scripts/bench/real.py --model grpo_cli/model/tiny --parts train --precisions float32

Every measurement is a process of its own; arms take turns, and ratios are of what one round measured. With one thread
ratios are of processor seconds, which neighbours do not touch, else of the clock. Precisions: weights of float32, of
bfloat16, or of float32 with model.autocast=bfloat16. Problems are GSM8K's (--data: its JSONL; else from the hub).

rollout   64 completions of 48 tokens, in 16 slots and in 64: ours, vLLM (--vllm: the interpreter of an environment that
          has it) with as many, `generate` on as many rows; and 50 M random parameters in 8 slots beside vLLM
floor     our decode step beside the product floor: the linear layers of a step alone, joined and packed as the step's
          are, at as many rows as it pads to, in the precision that is multiplied in
train     rounds of 2 problems x 8 completions of up to 96 tokens (of the embedded model 16 x 16 of up to 128, on
          its own task), every weight trained; in float32 and autocast beside TRL's (the extra `bench`); peaks of all
          processes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from arms import ARMS, Case, make_work
from common import ROOT, Check, Figures, bench_parser, clock_of, engine_of, finish, in_a_process, parsed, rotated, show
from rollout import KV, PEAK, PROCESSOR, SPEED, Row, measure, weights_folder
from step import PHASES, WAYS, measured

from grpo_cli.engine.decoder import Padding
from grpo_cli.engine.products import Weights
from grpo_cli.model.anatomy import backbone, head
from grpo_cli.support.meter import Meter
from grpo_cli.support.processor import flush_denormals

TINY = Path(str(files("grpo_cli.model") / "tiny")).resolve()
PRECISIONS = {
    "float32": ("model.dtype=float32", "model.autocast=none"),
    "bfloat16": ("model.dtype=bfloat16", "model.autocast=none"),
    "autocast": ("model.dtype=float32", "model.autocast=bfloat16"),
}
OVER_FLOOR = "step_over_floor"
# Prompts, completions of each, tokens: of rollouts, of training.
SIZES = {"rollout": (8, 8, 48), "train": (2, 8, 96)}
QUICK = {"rollout": (2, 2, 8), "train": (1, 2, 8)}
RATE = "rate"  # what ratios are of: tokens, or rounds of training, a second
_MEMORY = {"KV MiB": (f"{KV}_mib", ",.0f"), "peak MiB": (f"{PEAK}_mib", ",.0f")}
_SPEED = {"tokens/s": (SPEED, ",.0f"), "/CPU-s": (PROCESSOR, ",.0f")}
_ROWS = {"rows": ("rows", ".1f")}
_RATIO = {"ours over it": ("ratio", ".2f")}
_SECONDS = {"s/round": ("seconds", ".3g"), "CPU-s": ("cpu_seconds", ".3g"), "tokens": ("tokens", ".0f")}
COLUMNS: Mapping[str, dict[str, tuple[str, str]]] = {
    "rollout": _SPEED | _MEMORY | _RATIO,
    "floor": _ROWS | {"step ms": ("step_ms", ".1f"), "floor ms": ("floor_ms", ".1f"), "over": (OVER_FLOOR, ".2f")},
    "train": _SECONDS | {phase: (phase, ".3g") for phase in PHASES} | _MEMORY | _RATIO,
}


@dataclass
class Line(Row):
    """An arm of a group, ours the first; which interpreter it runs with."""

    python: str = ""


Groups = dict[str, dict[str, Line]]


def floor(case: Case) -> Figures:
    """Seconds of a decode step, and of its weight products alone, the median of turns."""
    clock = clock_of(case.threads)
    meter, work, model = Meter(clock=clock), make_work(case), case.loaded()
    dtype = torch.bfloat16 if case.settings.model.autocast == "bfloat16" else model.dtype
    with case.autocast(), torch.inference_mode():
        engine = engine_of(model, work.eos, "sampler=full", span=meter.span)
        list(engine.generate(work.cut(4)))
        rows = Padding(**engine.facts()["padding"]).padded_rows(len(work.requests))
        layers = list(_joined_layers(model))
        copies = Weights(dtype, bool(engine.facts()["packed_weights"]), joined=True)
        multiply = [(copies.together(*joined), torch.randn(rows, joined[0].in_features).to(dtype)) for joined in layers]

        def products(times: int = 5) -> float:
            start = clock()
            for _ in range(times):
                for product, x in multiply:
                    product(x)
            return (clock() - start) / times

        before, _ = products(), meter.take()
        list(engine.generate(work.requests))
        step = meter.take()["time/decode"] / engine.stats().decode_steps
        least = (before + products()) / 2
    return {"rows": rows, "step_ms": 1e3 * step, "floor_ms": 1e3 * least, OVER_FLOOR: step / least}


def _joined_layers(model: Any) -> Iterator[Sequence[torch.nn.Linear]]:
    """Linear layers in the order of a step, those together that share their input."""
    for layer in backbone(model).layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield attention.q_proj, attention.k_proj, attention.v_proj
        yield (attention.o_proj,)
        yield mlp.gate_proj, mlp.up_proj
        yield (mlp.down_proj,)
    yield (head(model),)


MEASURES: Mapping[str, Callable[[Case], Figures]] = {
    **{arm: partial(measure, arm) for arm in ARMS},
    **{f"train {way}": partial(measured, way) for way in WAYS},
    "floor": floor,
}


def groups_of(args: argparse.Namespace, scratch: Path) -> Groups:
    """What each part compares, by title."""
    embedded = args.model.resolve() == TINY
    # An untrained model is right in nothing, and groups of equal rewards have no backward pass here: rewards differ.
    gsm8k = ["task=gsm8k", "task.reward=step:uneven", *([f"task.path={args.data}"] if args.data else [])]
    task = ["task=arithmetic"] if embedded else gsm8k
    sizes = QUICK if args.quick else SIZES | ({"train": (16, 16, 128)} if embedded else {})

    def case(part: str, precision: str, **more: Any) -> Case:
        prompts, n, tokens = sizes[part]
        words = (*task, *PRECISIONS[precision])
        given = dict(model="real", folder=str(args.model), device="cpu", n=n, prompts=prompts, slots=args.rows[0])
        given |= dict(max_new_tokens=tokens, lengths="full", cv=0.8, threads=args.threads, repeats=1, seed=args.seed)
        return Case(**given | dict(words=words) | more)

    found: Groups = {}
    for precision in args.precisions:
        for rows in args.rows:
            title = f"{precision}, {rows} rows"
            wanted = case("rollout", precision, slots=rows)
            lines = {"ours": Line("infinite", wanted)}
            if precision != "autocast":
                lines["vLLM"] = Line("vllm-slots", wanted, python=str(args.vllm))
                lines["generate"] = Line("generate-slots", wanted)
            found[f"rollout: {title}"] = lines
            few = case("rollout", precision, prompts=-(-rows // 8), n=min(rows, 8))
            found[f"floor: {title}"] = {"ours": Line("floor", few)}
        if precision != "bfloat16":  # which trains adapters only
            wanted = case("train", precision, repeats=args.steps)
            lines = {"ours": Line("train grpo-cli", wanted)}
            lines["TRL"] = Line("train trl", wanted)
            found[f"train: {precision}"] = lines
    if "rollout" in args.parts and not args.quick:
        folder = weights_folder("50m", "cpu", args.seed, scratch)
        random = dict(model="50m", folder=folder, prompts=1, n=32, lengths="forced", max_new_tokens=128)
        wanted = case("rollout", "float32", slots=8, **random)
        lines = {"ours": Line("infinite", wanted), "vLLM": Line("vllm-slots", wanted, python=str(args.vllm))}
        found["rollout: 50 M random parameters, float32, 8 rows"] = lines
    return {title: lines for title, lines in found.items() if title.partition(":")[0] in args.parts}


def run(groups: Groups, args: argparse.Namespace, scratch: Path) -> None:
    lines = [(title, arm, line) for title, arms in groups.items() for arm, line in arms.items()]
    for turn in range(args.rounds):
        for title, arm, line in rotated(lines, turn):
            if line.reason:
                continue
            print(f"round {turn + 1} of {args.rounds}: {title}, {arm}", flush=True)
            where = dict(threads=args.threads, folder=scratch, python=line.python)
            figures, line.reason = in_a_process(__file__, line.arm, json.dumps(asdict(line.case)), **where)
            if figures is not None:
                line.rounds.append(figures | derived(line.case, figures))
            else:  # all of it: rounds are compared one by one
                line.rounds.clear()
                print(f"left out, {line.reason}", flush=True)


def derived(case: Case, figures: Figures) -> Figures:
    """What ratios are of; of rollouts also the mean number of rows in a decode step."""
    one = case.threads == 1
    if SPEED in figures:
        rows = (figures["tokens"] - case.n * case.prompts) / figures["steps"]  # first tokens take no step
        return {RATE: figures[PROCESSOR if one else SPEED], "rows": rows}
    return {RATE: 1 / figures["cpu_seconds" if one else "seconds"]} if "seconds" in figures else {}


def wanted_of(groups: Groups, title: str) -> list[Check]:
    """What is wanted of a group, as far as its arms have run."""
    part, lines = title.partition(":")[0], groups[title]
    ours = lines["ours"]
    least = {"vLLM": 1.5, "generate": 3.0, "TRL": 3.0}
    # What it is, what was found, at least and at most.
    asked = [(f"speed over {arm}", ours.over(lines[arm], RATE), least[arm], inf) for arm in lines if arm in least]
    if title.startswith("rollout: autocast"):
        same = groups.get(title.replace("autocast", "bfloat16"), {}).get("ours")
        asked.append(("speed over bfloat16", ours.over(same, RATE), 0.95, inf))
    if part == "floor":
        asked.append(("step over floor", ours.median(OVER_FLOOR), -inf, 1.3))
    if part == "train":
        asked.append(("peak, GiB", ours.median(PEAK) / 2**30, -inf, 4.0))
        asked.append(("peak over TRL's", ours.over(lines.get("TRL"), PEAK), -inf, 1.0))
    return [Check(f"{title}: {words}", found, *bounds) for words, found, *bounds in asked if found is not None]


def show_part(groups: Groups, part: str) -> None:
    found: dict[str, Figures] = {}
    for title, lines in groups.items():
        for arm, line in lines.items() if title.startswith(f"{part}:") else ():
            figures = {name: line.median(name) for name in line.rounds[0]} if line.rounds else {}
            figures |= {f"{name}_mib": figures[name] / 2**20 for name in (KV, PEAK) if name in figures}
            found_ratio = lines["ours"].over(line, RATE) if arm != "ours" else None
            figures |= {} if found_ratio is None else {"ratio": found_ratio}
            found[f"{title.partition(': ')[2]}: {arm}"] = figures
    show(part, found, COLUMNS[part])


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=3, threads=1)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="its folder")
    parser.add_argument("--data", type=Path, help="GSM8K's training problems, JSONL")
    parser.add_argument("--parts", nargs="+", choices=tuple(COLUMNS), default=tuple(COLUMNS))
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=tuple(PRECISIONS))
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--steps", type=int, default=3, help="of training, measured per turn, after one that is not")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    args = parsed(parser, words, rounds=1, model=TINY, precisions=("float32",), rows=[4], steps=1)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} is no model's folder: scripts/get_smollm2.sh {args.model} makes one")
    with tempfile.TemporaryDirectory() as scratch:
        groups = groups_of(args, Path(scratch))
        for lines in groups.values():
            if "TRL" in lines and find_spec("trl") is None:
                lines["TRL"].reason = "trl is not installed (pip install 'grpo-cli[bench]')"
            if "vLLM" in lines and not Path(args.vllm).exists():
                lines["vLLM"].reason = f"{args.vllm} is not there (scripts/install_vllm.sh)"
        run(groups, args, Path(scratch))
    for part in args.parts:
        show_part(groups, part)
    rounds = {t: {arm: line.rounds or line.reason for arm, line in lines.items()} for t, lines in groups.items()}
    whole = [title for title, lines in groups.items() if lines["ours"].rounds and not args.quick]
    wanted = [check for title in whole for check in wanted_of(groups, title)]
    unmeasured = any(not lines["ours"].rounds for lines in groups.values())
    return max(int(unmeasured), finish(args, {"rounds": rounds}, wanted, "trl"))


def child(name: str, case: str, out: str) -> None:
    flush_denormals()
    asked = Case(**json.loads(case))
    torch.set_num_threads(asked.threads)
    Path(out).write_text(json.dumps(MEASURES[name](asked)))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else sys.exit(main())
