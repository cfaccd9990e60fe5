"""A run's settings as Hydra overrides: to resume it, to evaluate it, or to write any value in Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.choices import parts_of, shipped
from grpo_cli.config.read import read
from grpo_cli.config.removed import OFF, removed
from grpo_cli.config.trust import taken, without_resolvers
from grpo_cli.runs.record import RunRecord
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.formatting import plain

_DRAWN = ("top_p", "top_k", "max_new_tokens", "stop")
# Settings of a resumption, not of the run itself.
OF_A_RESUME = ("resume", "resume_wait", "accept_damage")


def overrides_of_run(record: RunRecord, typed: Sequence[str] = ()) -> list[str]:
    """A run's model, task, engine, sampling, evaluation and seed as Hydra overrides: those of `grpo eval`.

    Choices and values are those of the composed config rather than of the command line, so that neither a named
    experiment nor a changed default makes a difference. `_target_`s of ours come from the current choices.
    UserError if something is missing, or has to be `typed` on this command line (`config.trust`).
    """
    groups = ["model", *(group for group in parts_of("eval") if group in parts_of("train"))]
    resolving = dict[str, str]()
    try:
        run: Any = OmegaConf.create(without_resolvers(record.config, resolving))
        values = {"seed": run.seed}
        drawn: Any = OmegaConf.to_container(run.sampling, resolve=True)
        values |= {f"sampling.{word}": drawn[word] for word in _DRAWN if word in drawn}
        values["sampling.stop"] = [text.replace("\\", "\\\\") for text in drawn.get("stop", ())]  # it is read again
        values |= {f"eval.{key}": run.eval[key] for key in ("problems", "k", "temperature")}
        values_of_model: Any = OmegaConf.to_container(run.model, resolve=True)
        shape = read(ModelSettings, values_of_model, [])
        for group in groups:
            values |= leaves(group, OmegaConf.to_container(run[group], resolve=True))
        values |= leaves("model", values_of_model)
        chosen = [f"{group}={record.choices[group]}" for group in groups]
    except (OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{record.source} does not hold the settings of a run ({plain(error)})") from error
    values = {key: value for key, value in values.items() if not _is_our_target(key, value)}
    if shape is not None and shape.without_files:  # these would be of a tokenizer that was not loaded
        values["model.eos_tokens"] = []
    values |= {key: text for key, text in resolving.items() if key in values}  # to be refused
    assert record.source is not None, "it was read from somewhere"
    return taken([*chosen, *overrides(values)], typed, record.source.parent)


def overrides_to_resume(record: RunRecord, run_dir: Path, typed: Sequence[str] = ()) -> list[str]:
    """What a run was started with, and its folder. UserError for what has to be `typed` again (`config.trust`)."""
    again = [word for word in (*record.overrides, *chosen_of(record)) if not is_of_a_resume(word)]
    gone = dict(removed(again))
    refuse([f"{run_dir}: {why}" for word, why in gone.items() if word.partition("=")[2] not in OFF])
    again = [word for word in again if word not in gone]
    return [*taken(again, typed, run_dir), *overrides({"hydra.run.dir": str(run_dir)})]


def chosen_of(record: RunRecord) -> tuple[str, ...]:
    """What `fit` chose when the run began, as overrides."""
    return tuple(record.about.get("fit", ()))


def apply(cfg: DictConfig, words: Sequence[str]) -> None:
    """Put plain overrides into a composed configuration; a choice replaces its group."""
    with open_dict(cfg):
        for word in words:
            key, _, value = word.partition("=")
            if "." in key:
                OmegaConf.update(cfg, key, yaml.safe_load(value))
            else:
                cfg[key] = shipped(key, value)


def not_said_twice(recorded: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The typed overrides without those that repeat a run's last value of their key."""
    last = {word.partition("=")[0].lstrip("+"): word for word in recorded}
    return [word for word in typed if last.get(word.partition("=")[0].lstrip("+")) != word]


def is_of_a_resume(word: str) -> bool:
    """Whether an override concerns a resumption rather than the run itself."""
    return word.lstrip("+").partition("=")[0] in OF_A_RESUME


def overrides(values: Mapping[str, Any]) -> list[str]:
    """Keys and values in Hydra's grammar, adding new keys, so that each value is parsed back exactly."""
    return [f"++{key}={_quoted(value)}" for key, value in values.items()]


def leaves(key: str, value: Any) -> dict[str, Any]:
    """Nested settings flattened to dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    below = {f"{key}.{name}" if key else name: item for name, item in value.items()}
    return {leaf: found for name, item in below.items() for leaf, found in leaves(name, item).items()}


def _is_our_target(key: str, value: Any) -> bool:
    return key.endswith("._target_") and is_ours(value)


def is_ours(target: Any) -> bool:
    """Whether a part is code of this package, which other versions may have in another place."""
    return str(target).startswith("grpo_cli.")


def quoted(text: str, mark: str = "'") -> str:
    """Return text in Hydra's grammar. Backslashes count only before a quote or an interpolation."""
    special = re.compile(rf"(\\*)({mark}|\$\{{|$)")
    return mark + special.sub(lambda end: 2 * end[1] + (f"\\{end[2]}" if end[2] else ""), text) + mark


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(_quoted(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_quoted(item)}" for name, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def value_of(key: str, words: Sequence[str]) -> str | None:
    """The last value of a key in these overrides, unquoted; None if there is none."""
    values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{key}=")]
    return unquoted(values[-1]) if values else None


def unquoted(value: str) -> str:
    """A quoted string as Hydra parses it: `'it\\'s'` is it's. Any other value is unchanged."""
    if not value.startswith(("'", '"')):
        return value
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return str(OverridesParser.create().parse_override(f"value={value}").value()).replace("\\${", "${")
    except HydraException:
        return value
