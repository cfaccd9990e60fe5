"""The pictures of the README files, each a function that returns an SVG. Needs the extra `plot`.

    python scripts/figures/make.py               # all of them, beside this file
    python scripts/figures/make.py train pods    # some

The same data give the same bytes. `train` shows rows of a recorded run (`train.json`); to record another one:

    OMP_NUM_THREADS=1 grpo train logger=jsonl hydra.run.dir=outputs/recorded
    python scripts/figures/make.py --record outputs/recorded train

and so does `learning`, of `grpo train experiment=word_problems_smollm2` (`learning.json`).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from common import write
from schedules import simulate

from grpo_cli.engine.scheduling import Fifo
from grpo_cli.report.curves import CLOCK, Curve, deviation, mean_curve
from grpo_cli.report.plots import COLOURS, GREY, paper_style
from grpo_cli.support.intervals import student_95
from grpo_cli.tracking.console import picture
from grpo_cli.types import Record

HERE = Path(__file__).resolve().parent
RECORDED, LEARNT = HERE / "train.json", HERE / "learning.json"
PODS = HERE.parent / "baselines" / "pods.json"
PODS_REAL = HERE.parent / "baselines" / "pods_real.json"
MINUTES = HERE.parent / "baselines" / "bench_time_to_accuracy.json"
RIVALS, RIVALS_LONG = (HERE.parent / "baselines" / f"{name}.json" for name in ("rivals", "rivals_long"))
SLOTS = HERE.parent / "baselines" / "infinite_real.json"

GREEDY, SAMPLED, LENGTH = "eval/accuracy", "eval/pass@1", "response/length_mean"
SECONDS = "clock/train_seconds"
SHOWN_STEP = 40  # of the recorded run: the moment that the picture shows
SHOWN_METRICS = ("reward/mean", "policy/entropy", "eval/", "response/", "speed/", "time/", "memory/", "clock/")

ARMS = {"grpo": "GRPO, n = m = 16", "grpo_ga": "GRPO-GA, n = m = 64", "maxvar": "PODS, n = 64, m = 16"}
RACERS = {"recipe": "grpo train experiment=fastest_smollm2", "TRL, n=16": "TRL 1.16, GRPOTrainer, n = 16"}
RULES = {"random": "PODS, random", "maxreward": "PODS, maxreward", "release": "PODS, maxvar as released"}
SVG_STYLE = {"svg.hashsalt": "grpo", "svg.fonttype": "none"}
PANELS = {"default": "one update per step", "update_bound": "two updates per step, activations recomputed"}


def train() -> str:
    """What a terminal shows in the middle of the recorded run."""
    recorded = json.loads(RECORDED.read_text())
    rows = [Record(row.pop("step"), row) for row in recorded["rows"]]
    return picture(rows, recorded["steps"])


def learning() -> str:
    """A real model's accuracy on problems that it is not trained on, and the length of its replies, by minutes."""
    rows = json.loads(LEARNT.read_text())["rows"]
    tried, trained = [row for row in rows if GREEDY in row], [row for row in rows if LENGTH in row]
    figure = Figure(figsize=(8.0, 3.0), layout="constrained")
    panels = figure.subplots(1, 2)
    for colour, (name, label) in zip(COLOURS, {GREEDY: "greedy", SAMPLED: "sampled"}.items(), strict=False):
        panels[0].plot([_minutes(r) for r in tried], [r[name] for r in tried], "o-", color=colour, ms=4, label=label)
    panels[0].set(title="right answers, held-out problems", xlabel="minutes of training", ylim=(0, 1), xlim=(0, None))
    panels[0].legend(loc="lower right")
    panels[1].plot([_minutes(r) for r in trained], [r[LENGTH] for r in trained], color=COLOURS[2])
    panels[1].set(
        title="tokens of a reply, mean of a step", xlabel="minutes of training", ylim=(0, None), xlim=(0, None)
    )
    return svg(figure)


def _minutes(row: Mapping[str, float]) -> float:
    return row.get(SECONDS, 0.0) / 60


def recorded(run: Path, names: tuple[str, ...], last: float = inf) -> dict[str, Any]:
    """Of a run the rows up to a step, of each what has one of these names or begins with it, in four digits."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: _rounded(v) for k, v in row.items() if k.startswith(("step", *names))} for row in rows]
    steps = json.loads((run / "run.json").read_text())["config"]["train"]["steps"]
    return {"steps": steps, "rows": [row for row in kept if row["step"] <= last]}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def pods() -> str:
    """Held-out accuracy against training seconds, from the study's record."""
    results = json.loads(PODS.read_text())["results"]
    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    for panel, (setting, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        curves = {arm: _on_one_clock(results[setting][arm]["curves"].values()) for arm in ARMS}
        for colour, (arm, label) in zip(COLOURS, ARMS.items(), strict=False):
            mean, band = mean_curve(curves[arm]), deviation(curves[arm])
            accuracy = np.array(mean.accuracy)
            panel.plot(mean.axes[CLOCK], accuracy, color=colour, lw=1.8, label=label)
            panel.fill_between(
                mean.axes[CLOCK], accuracy - band, np.minimum(accuracy + band, 1), color=colour, alpha=0.15, lw=0
            )
        target = 0.99 * max(mean_curve(curves["grpo_ga"]).accuracy)
        panel.axhline(target, color="black", ls="--", lw=0.8, label="99 % of GRPO-GA's best")
        panel.set(title=title, xlabel="training seconds", xlim=(0, None), ylim=(0.25, 1))
    figure.axes[0].set_ylabel("held-out accuracy of samples")
    figure.axes[1].legend(loc="lower right")
    return svg(figure)


def pods_real() -> str:
    """Held-out accuracy of a real model against training seconds and generated tokens, each seed by itself."""
    found = json.loads(PODS_REAL.read_text())["results"]["word_problems"]
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for colour, (arm, label) in zip(COLOURS, (ARMS | RULES).items(), strict=False):
        curves = found[arm]["curves"].values()
        clocks = [curve.axes[CLOCK] for curve in _on_one_clock(curves)]
        for number, (curve, clock) in enumerate(zip(curves, clocks, strict=True)):
            style: dict[str, Any] = dict(color=colour, lw=1.4, ls=("-", "--")[number % 2])
            panels[0].plot([x / 60 for x in clock], curve["accuracy"], label=None if number else label, **style)
            panels[1].plot([x / 1e3 for x in curve["axes"]["tokens/generated"]], curve["accuracy"], **style)
    panels[0].set(xlabel="minutes of training", ylabel="held-out accuracy of samples", ylim=(0, 1), xlim=(0, None))
    panels[1].set(xlabel="thousand tokens generated", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=3)
    return svg(figure)


def time_to_accuracy() -> str:
    """Held-out accuracy of a real model against minutes of training, each seed by itself, ours and TRL's."""
    runs = json.loads(MINUTES.read_text())["runs"]
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    panel = figure.subplots()
    for colour, (arm, label) in zip(COLOURS, RACERS.items(), strict=False):
        counted = [name for name in runs if name.startswith(f"{arm}, ") and not name.endswith("seed 100")]
        for number, curve in enumerate(runs[name]["curve"] for name in counted):
            style: dict[str, Any] = dict(color=colour, ls=("-", "--", ":")[number % 3], marker="o", ms=3.5)
            panel.plot(*zip(*curve, strict=True), label=None if number else label, **style)
    for wanted in (0.5, 0.8):
        panel.axhline(wanted, color="black", ls="--", lw=0.6)
    panel.set(xlabel="minutes of training on one processor core", xlim=(0, None), ylim=(0, 1))
    panel.set_ylabel("held-out accuracy of samples")
    panel.legend(loc="lower right")
    return svg(figure)


def rivals() -> str:
    """What each way costs in accuracy at equal generated tokens: paired differences from the first arm of each question
    and their 95 % intervals over seeds. Those whose interval holds 0, or that have one seed and so none, are grey."""
    short, long = (json.loads(path.read_text())["results"] for path in (RIVALS, RIVALS_LONG))
    questions = {
        "which rollouts to train on": short["rollouts"],
        "how to keep slots busy": short["slots"],
        "how to save keys and values": long["cache"],
    }
    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    for panel, (question, found) in zip(figure.subplots(1, 3), questions.items(), strict=True):
        (base, based), *others = found.items()
        for place, (_, runs) in enumerate(others):
            less = [run["final_accuracy"] - based[seed]["final_accuracy"] for seed, run in runs.items()]
            mean, half = statistics.fmean(less), inf  # of one seed there is none
            if len(less) > 1:
                half = student_95(len(less) - 1) * statistics.stdev(less) / len(less) ** 0.5
            colour = COLOURS[0] if abs(mean) > half else GREY
            half = half if half < inf else 0.0
            panel.errorbar(mean, place, xerr=half, fmt="o", color=colour, ms=4, capsize=2)
        panel.axvline(0, color="black", lw=0.6)
        panel.set(title=question, xlabel=f"accuracy less that of {base}", yticks=range(len(others)))
        panel.set(yticklabels=[arm for arm, _ in others], ylim=(len(others) - 0.5, -0.5))
    return svg(figure)


def _on_one_clock(recorded: Any) -> list[Curve]:
    """The curves of an arm's seeds on one clock: between two evaluations, the least time that any of them took.

    The seeds ran at different times, so that other programs on the machine slowed down few of them at once.
    """
    curves = [Curve(curve["steps"], curve["accuracy"], curve["axes"]) for curve in recorded]
    spans = np.diff([curve.axes[CLOCK] for curve in curves], axis=1).min(axis=0)
    clock = tuple(itertools.accumulate(spans.tolist(), initial=0.0))
    return [replace(curve, axes={**curve.axes, CLOCK: clock}) for curve in curves]


def slots() -> str:
    """Which slot decodes which rollout when, in rounds and with refilling: 64 replies of a real model in 16 slots."""
    lengths, count = json.loads(SLOTS.read_text())["lengths"]["64"], 16
    plans = {"sampler=micro": planned(lengths, count, True), "sampler=infinite": planned(lengths, count, False)}
    last = max(start + length for plan in plans.values() for _, start, length in plan)
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    for panel, (name, plan) in zip(figure.subplots(2, 1, sharex=True), plans.items(), strict=True):
        _draw_slots(panel, plan, count)
        steps = max(start + length for _, start, length in plan)
        busy = sum(lengths) / (count * steps)
        panel.set_title(f"{name}: {steps:,} decode steps, {busy:.0%} of the slots busy", loc="left")
        panel.set(ylabel="slot", yticks=range(0, count, 5), ylim=(count - 0.4, -0.6), xlim=(0, last))
        panel.grid(visible=False)
    figure.axes[-1].set_xlabel("decode step")
    return svg(figure)


def planned(lengths: Sequence[int], slots: int, rounds: bool) -> list[tuple[int, int, int]]:
    """(slot, first step, steps) of each rollout in the order in which they were asked for; here each holds its slot for
    as many steps as it has tokens."""
    held = [length + 1 for length in lengths]
    ran = simulate(held, [None] * len(held), Fifo(), slots, rounds)
    return [(slot, start, lengths[index]) for index, slot, start in ran.admitted]


def _draw_slots(panel: Axes, plan: Sequence[tuple[int, int, int]], count: int) -> None:
    for number, (slot, start, length) in enumerate(plan):
        colour = COLOURS[number // count % len(COLOURS)]  # in the order in which they were asked for
        panel.barh(slot, length, left=start, color=colour, height=0.8, edgecolor="white", linewidth=1)


def svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


PICTURES: Mapping[str, Callable[[], str]] = {
    "train": train,
    "pods": pods,
    "pods_real": pods_real,
    "slots": slots,
    "learning": learning,
    "time_to_accuracy": time_to_accuracy,
    "rivals": rivals,
}
RECORDS: Mapping[str, tuple[Path, tuple[str, ...], float]] = {  # where it is kept, what of it, up to which step
    "train": (RECORDED, SHOWN_METRICS, SHOWN_STEP),
    "learning": (LEARNT, (GREEDY, SAMPLED, LENGTH, SECONDS, "reward/mean", "tokens/"), inf),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", metavar="picture", help=f"of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--record", type=Path, metavar="RUN", help="show this run (in train or learning)")
    args = parser.parse_args()
    if unknown := set(args.pictures) - PICTURES.keys():
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    if args.record:
        if len(args.pictures) != 1 or args.pictures[0] not in RECORDS:
            parser.error(f"--record is for one picture of a run: {' or '.join(RECORDS)}")
        file, *asked = RECORDS[args.pictures[0]]
        write(file, recorded(args.record, *asked))
    with paper_style(), matplotlib.rc_context(SVG_STYLE):
        for name in args.pictures or PICTURES:
            (HERE / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main()
