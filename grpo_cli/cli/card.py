"""The text of an exported model's card: what was trained on what, with which settings, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import hydra
from omegaconf import OmegaConf

from grpo_cli.config.choices import choices, config_dir, defaults_of, shipped
from grpo_cli.config.overrides import is_ours
from grpo_cli.report.curves import GREEDY, Rows
from grpo_cli.report.read import Run
from grpo_cli.report.recorded_settings import settings_of_record
from grpo_cli.runs.record import RunRecord
from grpo_cli.support.formatting import plain, shown
from grpo_cli.tracking.redact import arguments_without_secrets

# Of the machine, and what other lines of the card say.
_NO_RECIPE = ("model.path", "seed", "device", "run_dir", "logger", "record.", "resume", "hydra")


def card_text(name: str, facts: Mapping[str, str], recipe: list[str]) -> str:
    """Markdown: a table of facts, and the recipe as it is typed."""
    rows = [f"| {key} | {plain(value).replace('|', '&#124;')} |" for key, value in facts.items()]
    lines = [f"# {plain(name)}", "", "Trained with GRPO by grpo-cli.", "", "| | |", "|---|---|", *rows]
    said = ["What differs from the defaults, and what `auto` came to:", "", *(f"    {word}" for word in recipe)]
    return "\n".join([*lines, "", "## Recipe", "", *said, ""])


def facts_of(run: Run, rows: Rows) -> Iterator[tuple[str, str]]:
    """What the run's records say until the exported step, whose row is the last of `rows`."""
    evaluated = [row for row in rows if GREEDY in row]
    first, last = (evaluated[0], evaluated[-1]) if evaluated else ({"step": 1}, {"step": 0})
    yield "accuracy before", "not measured" if first["step"] else _accuracy(first)
    yield "accuracy after", f"{_accuracy(last)}, after step {last['step']:.0f}" if last["step"] else "not measured"
    yield "seed", shown(run.recorded.seed)
    ended = rows[-1] if rows else {}
    yield "tokens generated", f"{ended['tokens/generated']:,.0f}" if "tokens/generated" in ended else "unknown"
    seconds = ended.get("clock/train_seconds")
    yield "minutes of training", "unknown" if seconds is None else f"{seconds / 60:.1f}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in run.code.items()) or "unknown"


def _accuracy(row: Mapping[str, float | int]) -> str:
    """Greedy, with what the run recorded of its certainty."""
    said = [f"{row[GREEDY]:.3f}"]
    if "eval/problems" in row:
        said.append(f"of {row['eval/problems']:.0f} held-out problems")
    if f"{GREEDY}_low" in row and f"{GREEDY}_high" in row:
        said.append(f"(95 % interval {row[f'{GREEDY}_low']:.3f} to {row[f'{GREEDY}_high']:.3f})")
    return " ".join(said)


def recipe_of(record: RunRecord) -> list[str]:
    """Choices and settings that are not those which the program has by itself. What looks like a secret is hidden, and
    of a place on this machine only the name is given."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        usual: Any = OmegaConf.to_container(hydra.compose("train", ["run_dir=."]), resolve=False)
    usual |= {group: shipped(group, choice) for group, choice in record.choices.items() if choice in choices(group)}
    by_itself, asked = (
        settings_of_record(RunRecord("train", (), defaults_of("train"), usual, {})),
        settings_of_record(record),
    )
    found = {
        key: str(value).rpartition("/")[2] if str(value).startswith(("/", "~")) else shown(value)
        for key, value in asked.settings.items()
        if (key not in by_itself.settings or by_itself.settings[key] != value)
        and (key not in asked.references or asked.references[key] != by_itself.references.get(key))
        and not key.startswith(_NO_RECIPE)
        and not is_ours(value)
    }
    return arguments_without_secrets([f"{key}={value}" for key, value in found.items()])
