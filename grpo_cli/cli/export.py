"""`grpo export`: a run's newest checkpoint as an ordinary model folder with its card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.config.choices import shipped
from grpo_cli.config.compose import model_of
from grpo_cli.config.overrides import key_of
from grpo_cli.config.recorded import weights_in
from grpo_cli.model.adapters import base_of, has_adapters, read_config
from grpo_cli.model.export import licence_of, write_card, write_model
from grpo_cli.model.load import TINY, at_checkpoint
from grpo_cli.report.curves import GREEDY
from grpo_cli.report.read import read_rows
from grpo_cli.runs.files import folder_written_atomically, place_of_new
from grpo_cli.runs.layout import METRICS, run_of, step_of
from grpo_cli.runs.record import RunRecord
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain, shown
from grpo_cli.tasks.prompting import turn_end
from grpo_cli.tracking.console import certainty
from grpo_cli.tracking.redact import arguments_without_secrets

_OF_THE_MODEL = ("path", "dtype", "eos_tokens", "random_init", "architecture", "lora")
_OF_THE_MACHINE = ("model.path", "device", "logger", "hydra", "record")  # not in a recipe


def export(place: Path, target: Path, merge: bool, base: str | None = None, dtype: str | None = None) -> Path:
    """Write a run's newest checkpoint, or the one that is named, to the folder `target`; return where it is. Weights
    keep their precision without a `dtype`, adapters their base without a `base`.

    UserError if there is no checkpoint, if `target` is there already, and as in `write_model`; then nothing is written.
    """
    if dtype == "auto":
        raise UserError("--dtype=auto: give float32 or bfloat16, or leave it out to keep the precision")
    checkpoint, record = weights_in(place.expanduser(), str(place))
    given = {key: value for key, value in (("path", base), ("dtype", dtype)) if value is not None}
    settings = model_of("hf", **_of_the_model(record, checkpoint) | given, autocast="none")
    folder = place_of_new(target)
    at = at_checkpoint(settings, checkpoint) if base is None else replace(settings, adapter=str(checkpoint))
    with folder_written_atomically(folder) as written:
        kept = dtype or (None if has_adapters(checkpoint) and not merge else settings.dtype)
        write_model(at, checkpoint, written, merge, kept, _sampling(record), lambda tokenizer: turn_end(tokenizer)[1])
        licence = None if settings.random_init else licence_of(settings.path)
        base = f"{Path(settings.path).resolve().name}{' (it comes with grpo-cli)' * (settings.path == TINY)}"
        facts = {"base": base, "its licence": licence or "unknown: not in its files"}
        facts["weights"] = (kept or "float32") + (", adapters merged" if merge else "")
        facts |= {} if record is None else _measured(record, checkpoint)
        rows = [f"| {key} | {plain(value).replace('|', '&#124;')} |" for key, value in facts.items()]
        recipe = ["## Recipe", "", "What was typed:", "", *_recipe(record), ""] if record else []
        lines = [f"# {plain(folder.name)}", "", "Trained with GRPO by grpo-cli.", "", "| | |", "|---|---|", *rows, ""]
        write_card(written, settings.path, licence, "\n".join([*lines, *recipe]))
    return folder


def _of_the_model(record: RunRecord | None, checkpoint: Path) -> dict[str, Any]:
    """Return the settings that name the checkpoint's weights."""
    if record is None and has_adapters(checkpoint):
        lora = shipped("model", "hf")["lora"] | {"dropout": read_config(checkpoint).get("lora_dropout", 0.0)}
        return {"path": base_of(checkpoint), "dtype": "float32", "lora": lora}
    if record is None:
        return {"path": str(checkpoint), "dtype": "float32"}
    return {key: value for key, value in record.config.get("model", {}).items() if key in _OF_THE_MODEL}


def _sampling(record: RunRecord | None) -> dict[str, Any]:
    """Return the settings that the run's rollouts were sampled with, by the names of `transformers` and vLLM."""
    given = {} if record is None else record.config.get("sampling", {})
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    kept = {name: given[name] for name in names if isinstance(given.get(name), int | float)}
    return kept and {"do_sample": True, **kept}


def _measured(record: RunRecord, checkpoint: Path) -> dict[str, str]:
    """Return what the run's records state until the exported step."""
    facts = {"steps": str(step_of(checkpoint.name))}
    facts |= dict.fromkeys(("accuracy before", "accuracy after"), "not measured")
    for row in read_rows(run_of(checkpoint) / METRICS)[0]:
        if f"{GREEDY}_low" in row and row["step"] <= int(facts["steps"]):
            accuracy = f"{row[GREEDY]:.3f} at step {row['step']:.0f} (95% interval {certainty(row)} problems)"
            facts["accuracy after" if row["step"] else "accuracy before"] = accuracy
    versions = ", ".join(f"{name} {value}" for name, value in record.about.get("code", {}).items())
    return facts | {"seed": shown(record.config.get("seed")), "versions": versions}


def _recipe(record: RunRecord) -> Iterator[str]:
    """Yield a run's settings as typed, in lines of code without secrets; of a place on this machine only the name."""
    words = [word for word in record.overrides if not key_of(word).startswith(_OF_THE_MACHINE)]
    for key, sign, value in (word.partition("=") for word in arguments_without_secrets(words)):
        bare = value.strip("'\"")
        yield "    " + plain(f"{key}{sign}{bare.rpartition('/')[2] if bare.startswith(('/', '~')) else value}")
