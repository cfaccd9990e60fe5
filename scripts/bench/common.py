"""What the benches share: options, arms in turns, ratios of what one round measured, bounds, the machine, and JSON.

Models, engines and tasks are made of the words of `grpo train`, so that a bench measures what a run would use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from grpo_cli.config import compose
from grpo_cli.config.choices import ENGINE_PARTS
from grpo_cli.config.instantiate import Factories
from grpo_cli.experiment import make_engine
from grpo_cli.interfaces import Engine
from grpo_cli.support.processor import CPUINFO, flush_denormals, set_variables

ROOT = Path(__file__).resolve().parents[2]
# What a processor multiplies bfloat16 with, and what it has for wider rows.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
PACKAGES = ("grpo-cli", "torch", "transformers", "numpy", "hydra-core")

Figures = dict[str, float]
Turn = Mapping[str, Figures]  # what each arm measured in one round
settings_of = cache(compose.settings_of)


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def parser(description: str | None, threads: int | None = None) -> argparse.ArgumentParser:
    """The options of every bench and study."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=positive, default=threads or torch.get_num_threads())
    made.add_argument("--json", type=Path, help="where the figures go, with settings, versions and machine")
    made.add_argument(
        "--quick", action="store_true", help="a small size, which shows that it works and measures little"
    )
    return made


def bench_parser(description: str | None, rounds: int, threads: int | None = None) -> argparse.ArgumentParser:
    made = parser(description, threads)
    made.add_argument("--rounds", type=positive, default=rounds, help="how often each arm takes its turn")
    made.add_argument("--seed", type=int, default=0)
    return made


def parsed(made: argparse.ArgumentParser, words: Sequence[str] | None, **quick: Any) -> argparse.Namespace:
    """The options; `quick` has other defaults for --quick. Notes the load before anything is measured."""
    if made.parse_args(words).quick:
        made.set_defaults(**quick)
    args = made.parse_args(words)
    set_variables()
    flush_denormals()
    args.load_before = os.getloadavg()[0]
    return args


def engine_of(model: Any, eos: Sequence[int], *words: str, **more: Any) -> Engine:
    """The engine with which `grpo train <words>` would drive this model; `more` is offered to its parts."""
    settings = settings_of(*words)
    parts = Factories.of({name: settings.parts[name] for name in ENGINE_PARTS})
    return make_engine(settings, parts, model, tuple(eos), 0, **more)


def clocked(work: Callable[[], Any]) -> tuple[Any, Figures]:
    """What the work came to, and its seconds: of the clock, and of this process, which neighbours do not touch."""
    wall, processor = time.perf_counter(), time.process_time()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - processor}


def clock_of(threads: int) -> Callable[[], float]:
    """Seconds of this process where it has one thread, which neighbours do not touch; else of the clock."""
    return time.process_time if threads == 1 else time.perf_counter


def in_a_process(script: str, *words: str, threads: int, folder: Path, python: str = "") -> tuple[Any, str]:
    """What `script --child <words> <file>` of a process of its own leaves in the file; or None, and the reason.

    Its interpreter is this one unless another is named.
    """
    out = folder / "measured.json"
    out.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    command = [python or sys.executable, script, "--child", *words, str(out)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if out.exists():
        return json.loads(out.read_text()), ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return None, f"exit status {done.returncode}: {said[-1] if said else 'it said nothing'}"


def in_turns(arms: Mapping[str, Callable[[], Figures]], rounds: int) -> list[Turn]:
    """Every arm once a round, each round beginning one arm later: a machine that slows down slows all of them."""
    order = list(arms)
    return [{arm: arms[arm]() for arm in rotated(order, turn)} for turn in range(rounds)]


def rotated(order: Sequence[Any], by: int) -> list[Any]:
    return [*order[by % len(order) :], *order[: by % len(order)]]


def over(mine: Iterable[Figures], base: Iterable[Figures], name: str) -> float:
    """The median of the ratios of what was measured in one round, whatever the machine's speed was then."""
    return statistics.median(a[name] / b[name] for a, b in zip(mine, base, strict=True))


@dataclass(frozen=True)
class Check:
    """A number that was wanted, and what was found."""

    words: str
    found: float
    least: float = -inf
    most: float = inf

    @property
    def holds(self) -> bool:
        return self.least <= self.found <= self.most

    def __str__(self) -> str:
        bound = f">= {self.least:g}" if isfinite(self.least) else f"<= {self.most:g}"
        return f"{'holds ' if self.holds else 'MISSED'} {self.words}: {self.found:.3f} (wanted {bound})"


def show(title: str, found: Mapping[str, Figures], columns: Mapping[str, tuple[str, str]], caption: str = "") -> None:
    """A table of arms. A column is a figure's name and its format; an arm without the figure has an empty cell."""
    table = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    table.add_column(no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    for arm, figures in found.items():
        table.add_row(arm, *(format(figures[n], form) if n in figures else "" for n, form in columns.values()))
    wide = Console()
    (wide if wide.is_terminal else Console(width=140)).print(table)


def finish(args: argparse.Namespace, found: Mapping[str, Any], checks: Sequence[Check] = (), *packages: str) -> int:
    """Say which bounds hold, and write the figures where they were asked for. Returns 1 if a bound is missed."""
    for check in checks:
        print(check)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = document(args, *packages) | {**found, "checks": told(checks)}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(not all(check.holds for check in checks))


def told(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Bounds as JSON has them, which knows no infinity."""
    return [{k: v for k, v in asdict(c).items() if v not in (inf, -inf)} | {"holds": c.holds} for c in checks]


def document(args: argparse.Namespace, *packages: str) -> dict[str, Any]:
    """What figures depend on: the settings they were asked with, and the environment. Of files and folders the name:
    where they lie concerns one machine."""
    asked = {key: None if value == inf else value for key, value in vars(args).items() if key != "json"}
    words = {key: value.name if isinstance(value, Path) else value for key, value in asked.items()}
    return {"settings": words, "environment": environment(*packages)}


def environment(*packages: str) -> dict[str, Any]:
    """Versions, the embedded model and the machine, with its load now."""
    weights = files("grpo_cli.model") / "tiny" / "model.safetensors"
    return {
        "python": platform.python_version(),
        **{name: installed(name) for name in (*PACKAGES, *packages)},
        "embedded_model_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "machine": platform.processor() or platform.machine(),
        **processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
    }


def processor() -> dict[str, Any]:
    """Its name and which of FEATURES it has, as far as Linux tells."""
    text = CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""
    told = {key: found[1] for key in ("model name", "flags") if (found := re.search(rf"(?m)^{key}\s*: (.*)$", text))}
    flags = told.get("flags", "").split()
    return {"processor": told.get("model name"), "features": [name for name in FEATURES if name in flags]}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
