"""One part of `scripts/gpu_campaign.sh`: commands of the product, each with a limit, and what their files have to say.

Every figure is written as soon as it is there: FOLDER/<part>.json has what was found, what was wanted, and the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "bench"))

from common import Check, document, told, write  # noqa: E402

COMMANDS = Path(__file__).with_suffix(".yaml")
DECODE_WITHIN = {16: 2.2, 64: 1.8, 256: 1.6}  # times the floor, by rows
NOTHING_TO_MISS = "on a CPU nothing is wanted but that it runs"


@dataclass(frozen=True)
class Command:
    """Of the product or of Python, with at most `limit` seconds; `at_toy_size` is what it says besides on a CPU."""

    name: str
    words: tuple[str, ...]
    limit: float
    at_toy_size: tuple[str, ...] = ()


Found = Mapping[str, dict[str, Any]]
Checks = Iterator[Check]


@dataclass(frozen=True)
class Part:
    commands: tuple[Command, ...]
    wanted: Callable[[Found], Checks] = field(repr=False)


def contact(found: Found) -> Checks:
    yield Check("exit code of the tests marked gpu", float(found["tests"]["code"]), most=0)
    for name in ("default", "qwen", "qwen, launched"):
        done = found[name].get("summary.json", {}).get("status") == "completed"
        yield Check(f"grpo train completes, {name}", float(done), least=1)


def decode(found: Found) -> Checks:
    for rows, most in DECODE_WITHIN.items():
        yield Check(f"decode over its floor, {rows} rows", _over_weights(found[f"{rows} rows"]), most=most)
    launched, replayed = (_speed(found[name]) for name in ("64 rows, launched", "64 rows"))
    yield Check("replayed over launched, tokens/s of 64 rows", replayed / launched if launched else 0.0, least=2)


def rollouts(found: Found) -> Checks:
    yield Check("tokens/s of 256 rows", _speed(found["full"]), least=25_000)
    infinite, micro = (_speed(found[name]) for name in ("infinite", "micro"))
    yield Check("infinite over micro, tokens/s", infinite / micro if micro else 0.0, least=1.25)
    yield from _predictions(found)


def sparse(found: Found) -> Checks:
    dense = _speed(found["dense"])
    for name in ("streaming", "rkv"):
        ratio = _speed(found[name]) / dense if dense else 0.0
        yield Check(f"{name} over dense, tokens/s at equal KV bytes", ratio, least=2)


def update(found: Found) -> Checks:
    for name in found:
        yield Check(f"floor over the update, {name}", _utilisation(found[name]), least=0.35)
    yield from _predictions(found)


def learn(found: Found) -> Checks:
    for seed in ("seed 0", "seed 1"):
        accuracy = found[seed].get("summary.json", {}).get("final_accuracy")
        yield Check(f"greedy accuracy after training, {seed}", -1.0 if accuracy is None else accuracy, least=0.97)
        peaks, lengths = (_column(found[seed], name) for name in ("memory/peak_bytes", "response/length_mean"))
        # A step of more tokens than any before takes more than any before.
        ratio = peaks[-1] / peaks[lengths.index(max(lengths))] if lengths and len(peaks) == len(lengths) else inf
        yield Check(f"peak at the end over that of the step with most tokens, {seed}", ratio, most=1.02)
    off = max((abs(ratio - 1) for ratio in _column(found["seed 0"], "mismatch/ratio_mean")), default=inf)
    yield Check("largest |mean ratio - 1| of policy to sampler", off, most=0.01)


def part_of(wanted: Callable[[Found], Checks]) -> Part:
    """The commands of the part that has the name of its criteria; contact begins with the tests marked gpu."""
    about = yaml.safe_load(COMMANDS.read_text(encoding="utf-8"))[wanted.__name__]
    words = _flat([about["words"], about.get("more", [])])
    toys = about.get("toys", {})
    commands = [
        Command(name, _flat([words, own]), about["limit"], _flat([about["toy"], toys.get(name, [])]))
        for name, own in about["commands"].items()
    ]
    if wanted is contact:
        # Without the annotations of pyproject.toml, which PyTorch's compiler does not see through in a backward pass.
        tests = (
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-m",
            "gpu",
            "-n",
            "8",
            "-W",
            "default",
            "-q",
            "-p",
            "no:cacheprovider",
        )
        commands.insert(0, Command("tests", tests, 350, ("tests/test_meter.py",)))
    return Part(tuple(commands), wanted)


def _flat(words: Any) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(word for some in words for word in _flat(some))


PARTS: Mapping[str, Callable[[], Part]] = {
    wanted.__name__: partial(part_of, wanted) for wanted in (contact, decode, rollouts, sparse, update, learn)
}


def _column(found: Mapping[str, Any], metric: str) -> list[float]:
    return [row[metric] for row in found.get("metrics.jsonl", []) if metric in row]


def _phases(found: Mapping[str, Any]) -> Mapping[str, Any]:
    measured = found.get("profile.json", {}).get("measured")
    return measured["phases"] if measured else {}


# Published of the H100 (SXM): bytes, and dense bfloat16 operations, a second.
BYTES_A_SECOND, OPERATIONS_A_SECOND = 3.35e12, 989e12


def _weights(found: Mapping[str, Any]) -> float:
    """Bytes of the model's float32 weights."""
    profile = found.get("profile.json", {})
    return float(profile["predicted"]["phases"]["optimizer"]["held_by"]["weights"]) if profile.get("measured") else 0.0


def _over_weights(found: Mapping[str, Any]) -> float:
    """How many times as long decoding takes as reading the weights in bfloat16 once a step would."""
    steps = found.get("profile.json", {}).get("measured", {}).get("engine", {}).get("engine/decode_steps", 0.0)
    least = steps * _weights(found) / 2 / BYTES_A_SECOND
    return _seconds(found, "decode") / least if least else inf


def _speed(found: Mapping[str, Any]) -> float:
    """Tokens a second of decoding."""
    return float(_phases(found).get("decode", {}).get("tokens_per_second") or 0.0)


def _seconds(found: Mapping[str, Any], *phases: str) -> float:
    return sum(_phases(found).get(phase, {}).get("seconds_median", 0.0) for phase in phases)


def _utilisation(found: Mapping[str, Any]) -> float:
    """Of the update's passes: the seconds of two operations forward and four backward for each weight and token at the
    published rate, over what they took."""
    tokens = _phases(found).get("forward", {}).get("tokens") or 0
    return 6 * _weights(found) / 4 * tokens / OPERATIONS_A_SECOND / (_seconds(found, "forward", "backward") or inf)


def _predictions(found: Found) -> Checks:
    for name, files in found.items():
        profile = files.get("profile.json")
        if profile and profile["measured"]:
            ratio = profile["predicted"]["peak"]["bytes"] / profile["measured"]["peak"]["bytes"]
            yield Check(f"predicted over measured peak, {name}", ratio, 0.9, 1.1)


def line_of(command: Command, device: str) -> tuple[str, ...]:
    """What is run, but for where it writes to."""
    words = (*command.words, *(command.at_toy_size if device == "cpu" else ()))
    if command.words[0] in ("train", "profile"):
        return ("-P", "-m", "grpo_cli", *words, f"device={device}")
    return words


def carried_out(command: Command, device: str, folder: Path) -> dict[str, Any]:
    """Its exit code (124: over its limit) and the JSON that it has left; what it said is in `said.txt` beside."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    line = [sys.executable, *line_of(command, device)]
    if "grpo_cli" in line:
        line.append(f"hydra.run.dir={folder / 'run'}")
    print(f"{command.name}: at most {command.limit:.0f} s", flush=True)
    with (folder / "said.txt").open("w") as said:
        try:
            code = subprocess.run(line, cwd=ROOT, stdout=said, stderr=said, timeout=command.limit).returncode
        except subprocess.TimeoutExpired:
            code = 124
    if code:
        print("\n".join((folder / "said.txt").read_text().splitlines()[-12:]), flush=True)
    return {"code": code} | dict(_left(folder))


def _left(folder: Path) -> Iterator[tuple[str, Any]]:
    for name in ("summary.json", "profile.json"):
        if (folder / "run" / name).exists():
            yield name, json.loads((folder / "run" / name).read_text())
    rows = folder / "run" / "metrics.jsonl"
    if rows.exists():
        yield rows.name, [json.loads(line) for line in rows.read_text().splitlines()]


def run(name: str, args: argparse.Namespace) -> bool:
    """Whether every criterion is reached; on a CPU whether every command ended well."""
    part, found = PARTS[name](), dict[str, dict[str, Any]]()
    about = document(args)
    done = dict[tuple[str, ...], str]()  # at toy size some are the same
    for place, command in enumerate(part.commands):
        same = done.setdefault(line_of(command, args.device), command.name)
        first = same == command.name
        found[command.name] = (
            carried_out(command, args.device, args.folder / name / str(place)) if first else found[same]
        )
        write(args.folder / f"{name}.json", about | {"found": found})
    checks = list(part.wanted({command.name: found[command.name] for command in part.commands}))
    for check in checks:
        print(check if args.device != "cpu" else f"found  {check.words}: {check.found:.3f}")
    write(args.folder / f"{name}.json", about | {"found": found, "checks": told(checks)})
    ended = all(one["code"] in (0, 5) for one in found.values())  # pytest: 5 where there is nothing to test
    print(
        f"{name}: {'every' if ended else 'NOT every'} command ended well"
        + (f"; {NOTHING_TO_MISS}" if args.device == "cpu" else "")
    )
    return ended and (args.device == "cpu" or all(check.holds for check in checks))


def main(words: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbered = dict(zip("123456", PARTS, strict=True))
    made.add_argument("part", choices=(*numbered, *PARTS, "all"))
    made.add_argument("folder", type=Path)
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = made.parse_args(words)
    args.folder = args.folder.resolve()
    names = list(PARTS) if args.part == "all" else [numbered.get(args.part, args.part)]
    return int(not all([run(name, args) for name in names]))


if __name__ == "__main__":
    sys.exit(main())
