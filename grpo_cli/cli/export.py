"""`grpo export`: a run's newest checkpoint as an ordinary model folder, or a repository of the hub, with its card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpo_cli.cli.card import card_text, facts_of, recipe_of
from grpo_cli.config.compose import model_of
from grpo_cli.model.adapters import BASE, base_of, has_adapters
from grpo_cli.model.export import check_repository, is_export, licence_of, upload, write_card, write_model
from grpo_cli.model.load import DTYPES, TINY, at_checkpoint, source_of
from grpo_cli.report.read import read_rows, read_run
from grpo_cli.report.recorded_settings import settings_of_record
from grpo_cli.runs.files import folder_written_atomically
from grpo_cli.runs.find import candidates, find_checkpoint
from grpo_cli.runs.layout import METRICS, step_of
from grpo_cli.runs.record import RunRecord, read_record
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tasks.prompting import turn_end

_HUB = "hub:"
_OF_THE_MODEL = ("path", "dtype", "eos_tokens", "random_init", "architecture")


def export(
    place: Path, target: str, merge: bool, base: str | None = None, dtype: str | None = None, overwrite: bool = False
) -> str:
    """Write a run's newest checkpoint, or the one that is named, to the folder `target` or to hub:<you>/<model>;
    returns where it is. Without a `dtype` weights stay as they were trained, without a `base` that of the run is taken.

    Adapters of PEFT without a run are taken too. UserError if there is no checkpoint, if `target` is there already, and
    as in `write_model`; then nothing is written.
    """
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype={dtype} must be one of {', '.join(DTYPES)}")
    newest = next(iter(candidates(place.expanduser())), place.expanduser())
    record = _record(newest)
    given = {key: value for key, value in (("path", base), ("dtype", dtype)) if value is not None}
    settings = model_of("hf", **_of_the_model(record, newest) | given, autocast="none")
    if has_adapters(newest) and not (newest / BASE).is_dir():
        source_of(settings.path)  # a base that is gone is named before gigabytes are verified
    checkpoint = _checkpoint(place)
    repo = target.removeprefix(_HUB) if target.startswith(_HUB) else None
    folder = Path(target).expanduser().resolve()
    if repo is None:
        _check_folder(folder, overwrite)
    else:
        check_repository(repo, overwrite)
    at = at_checkpoint(settings, checkpoint) if base is None else replace(settings, adapter=str(checkpoint))
    with TemporaryDirectory() as aside:
        home = folder if repo is None else Path(aside) / "model"
        with folder_written_atomically(home) as written:
            write_model(at, checkpoint, written, merge, _sampling(record), lambda tokenizer: turn_end(tokenizer)[1])
            licence = None if settings.random_init else licence_of(settings.path)
            facts = {"base": _name_of(settings.path), "its licence": licence or "unknown: its files do not tell"}
            facts |= {"weights": settings.dtype + (", adapters merged" if merge else "")}
            write_card(written, settings.path, licence, _card(repo or folder.name, facts, record, checkpoint))
        return str(folder) if repo is None else upload(repo, home)


def _checkpoint(place: Path) -> Path:
    folder = place.expanduser()
    found = find_checkpoint(folder)
    if found.path is None and found.skipped:
        raise UserError(f"{place} holds no complete checkpoint: {'; '.join(found.skipped)}")
    if found.path is None and not has_adapters(folder):
        raise UserError(f"{place} holds no checkpoint; name a run (grpo ls lists them) or one of its checkpoints")
    for reason in found.skipped:
        to_stderr(f"passed over {reason}")
    return found.path or folder


def _check_folder(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{folder} exists and is not an empty folder; name a new one, or add --overwrite")
    if not is_export(folder):
        raise UserError(f"--overwrite replaces exports alone, and {folder} is something else; name a new folder")


def _record(checkpoint: Path) -> RunRecord | None:
    """Of the checkpoint's run; None for adapters without one."""
    if step_of(checkpoint.name) is None:
        return None
    return read_record(checkpoint.resolve().parent.parent)


def _of_the_model(record: RunRecord | None, checkpoint: Path) -> dict[str, Any]:
    """The settings that say what the checkpoint's weights are those of."""
    if record is None:
        return {"path": base_of(checkpoint) if has_adapters(checkpoint) else str(checkpoint), "dtype": "float32"}
    model = record.config.get("model")
    return {key: model[key] for key in _OF_THE_MODEL if key in model} if isinstance(model, Mapping) else {}


def _sampling(record: RunRecord | None) -> dict[str, Any]:
    """What `transformers` and vLLM call the settings that the run's rollouts were drawn with."""
    settings = {} if record is None else settings_of_record(record).settings
    found = {name: settings.get(f"sampling.{name}") for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {"do_sample": True, **numbers} if numbers else {}


def _card(name: str, facts: Mapping[str, str], record: RunRecord | None, checkpoint: Path) -> str:
    if record is None:
        return card_text(name, facts, [])
    folder, step = checkpoint.resolve().parent.parent, step_of(checkpoint.name)
    rows = [row for row in read_rows(folder / METRICS)[0] if step is None or row["step"] <= step]
    measured = facts_of(read_run(folder, folder.name), rows)
    return card_text(name, {**facts, "steps": str(step), **dict(measured)}, recipe_of(record))


def _name_of(path: str) -> str:
    """The base as others may know it, without the folders of this machine."""
    if path == TINY:
        return "tiny, the model embedded in grpo-cli"
    return plain(Path(path).expanduser().resolve().name if Path(path).expanduser().is_dir() else path)
