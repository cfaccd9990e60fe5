"""Reads composed settings with pydantic: strictly, all errors at once, each with its dotted key. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ErrorDetails

from grpo_cli.config.auto import fill
from grpo_cli.config.choices import choices, config_dir, parts_of, shipped
from grpo_cli.config.overrides import is_ours, key_of
from grpo_cli.settings import STRICT, EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import UserError, closest, refuse
from grpo_cli.support.formatting import shown

Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)

COMMANDS: Mapping[type[Any], str] = {RunSettings: "train", EvalRunSettings: "eval", ProfileRunSettings: "profile"}
_LARGEST = {int: 2**64, float: 3.4e38}  # the largest seed and float32
_KINDS = {
    **{"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text"},
    **{"dict_type": "a group of settings", "dataclass_type": "a group of settings", "tuple_type": "a list"},
    **{"list_type": "a list", "is_sequence_of": "a list", "none_required": "null", "finite_number": "finite"},
    **{"greater_than_equal": "at least {ge}", "greater_than": "more than {gt}"},
    **{"less_than_equal": "at most {le}", "less_than": "less than {lt}", "string_too_short": "other than empty"},
    **{"literal_error": "one of {expected}", "one_of": "{listed}", "too_short": "longer", "too_long": "shorter"},
}


def read_settings(cfg: DictConfig, kind: type[Settings]) -> Settings:
    """Return the settings of a command. UserError lists every missing value, wrong type or range, and unknown key."""
    command = COMMANDS[kind]
    own = [group for group in parts_of(command) if not is_ours(OmegaConf.select(cfg, f"{group}._target_"))]
    if own:
        from grpo_cli.config.instantiate import drop_inherited

        drop_inherited(cfg, own)
    values = _plain(cfg)
    fill(values)
    parts = {group: values.pop(group, None) for group in parts_of(command)}
    values.pop("experiment", None)  # its settings are in the other keys
    problems = [line for group, part in parts.items() for line in _part_problems(group, part)]
    _read_escapes(values.get("sampling"), parts["task"])
    settings = read(kind, values | {"parts": parts}, problems, cfg)
    if not problems or _are_typed(parts):
        from grpo_cli.config.instantiate import settings_problems  # imports the parts, and so torch

        problems += settings_problems(parts)
    refuse(list(dict.fromkeys(problems)))
    assert settings is not None, "without a problem there are settings"
    return settings


def settings_of(*overrides: str) -> RunSettings:
    """Return the settings of `grpo train` with these overrides, unchecked: for tests, scripts and notebooks."""
    from grpo_cli.config.auto import decided

    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = hydra.compose("train", ["run_dir=.", *overrides])
    return decided(read_settings(cfg, RunSettings), lambda line: None)


def model_of(choice: str, **changed: Any) -> ModelSettings:
    """Return the settings of `model=<choice>` with changes."""
    from grpo_cli.config.auto import decided_model
    from grpo_cli.support.processor import fast_in_bfloat16

    problems: list[str] = []
    settings = read(ModelSettings, shipped("model", choice) | changed, problems)
    refuse(problems)
    assert settings is not None, "without a problem there are settings"
    return decided_model(settings, fast_in_bfloat16("auto"))


def read(kind: Any, values: Any, problems: list[str], cfg: DictConfig | None = None, key: str = "") -> Any:
    """Return the values as this type; None, and new lines in `problems`, if they are wrong.

    A setting that only follows a wrong one, such as `m=${n}` in `cfg`, gets no line of its own."""
    found = {line.partition(" ")[0]: line for line in _too_large(values, key)}
    try:
        result = TypeAdapter(kind, config=None if dataclasses.is_dataclass(kind) else STRICT).validate_json(
            json.dumps(values, default=str)
        )
    except ValidationError as error:
        wrong: dict[str, list[ErrorDetails]] = {}
        for one in error.errors(include_url=False):
            wrong.setdefault(_key(one["loc"], values, key), []).append(one)
        for name, errors in wrong.items():
            if not any(line.startswith(f"{name}=") for line in found):
                found[name] = _line(name, errors, kind)
    follow = [name for name in found if cfg is not None and _follows(cfg, name.partition("=")[0])]
    problems += [line for name, line in found.items() if name not in follow or len(follow) == len(found)]
    return None if found else result


def read_argument(hint: Any, value: Any, key: str, problems: list[str]) -> Any:
    """Return a part's setting as the type of its constructor; as it is where pydantic knows no such type."""
    try:
        return read(hint, value, problems, key=key)
    except PydanticSchemaGenerationError:
        return value


def _plain(cfg: DictConfig) -> dict[str, Any]:
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'the configuration'}: {error.msg or error}".splitlines()[0]) from error
    return dict(values)


# \n as it is typed, but not as commands of TeX begin, which prompts may hold.
_TEX = "abla|atural|cong|earrow|e|eg|eq|ewcommand|ewline|exists|geq|gtr|i|leq|less|mid|ot|otin|u|warrow"
_LINE_BREAK = re.compile(rf"(?<!\\)\\n(?!(?:{_TEX})\b)")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def _read_escapes(sampling: Any, task: Any) -> None:
    """Put line breaks where backslash and n are typed: Hydra has no other way to type them."""
    if isinstance(sampling, dict) and isinstance(stop := sampling.get("stop"), list):
        sampling["stop"] = [
            re.sub(r"\\[ntr\\]", lambda found: _ESCAPES[found[0]], text) if isinstance(text, str) else text
            for text in stop
        ]
    for word in ("template", "system_prompt") if isinstance(task, dict) else ():
        if isinstance(text := task.get(word), str):
            task[word] = _LINE_BREAK.sub("\n", text)


def _follows(cfg: DictConfig, key: str) -> bool:
    parent = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg
    name = key.rpartition(".")[2]
    return isinstance(parent, DictConfig) and name in parent and OmegaConf.is_interpolation(parent, name)


def _part_problems(group: str, part: Any) -> Iterator[str]:
    """Yield what no part may have: no `_target_`, a value that is missing, a keyword of Hydra."""
    if not isinstance(part, dict) or "_target_" not in part:
        yield f"{group} names nothing to build: choose one of {', '.join(choices(group))}"
        return
    for key, value in _leaves(group, part):
        if value == "???":
            yield f"{key} has no value; give {key}=..."
        for word in key.split(".")[1:]:
            if re.fullmatch(r"_[a-z]+_", word) and key != f"{group}._target_":
                yield f"{key} is no setting of a part, which is one class or function: leave {word} out"


def _are_typed(parts: Mapping[str, Any]) -> bool:
    """True if settings of parts may have been typed, and so may be wrong too."""
    if not HydraConfig.initialized():
        return True
    return any("." in key and key.partition(".")[0] in parts for key in map(key_of, HydraConfig.get().overrides.task))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), item)
    else:
        yield key, value


def _too_large(values: Any, key: str) -> Iterator[str]:
    """Yield a line for each number that neither a seed nor float32 can be."""
    for name, value in _leaves(key, values):
        for one in value if isinstance(value, list) else [value]:
            most = _LARGEST.get(type(one))
            if most is not None and abs(one) > most and abs(one) != float("inf"):
                digits = f"a number of {len(str(abs(one)))} digits" if isinstance(one, int) else str(one)
                yield f"{name}={digits} must be at most {most:.3g}"


def _key(place: Sequence[str | int], values: Any, key: str) -> str:
    """Return the dotted key of a place in the values, without pydantic's names of the members of a union."""
    for word in place:
        if isinstance(values, dict) and (word in values or word == place[-1]):
            key, values = (f"{key}.{word}" if key else str(word)), values.get(word)
        elif isinstance(values, list) and isinstance(word, int):
            key, values = f"{key}[{word}]", values[word] if word < len(values) else None
    return key.removeprefix("parts.")


def _line(key: str, errors: Sequence[ErrorDetails], kind: Any) -> str:
    """Return one sentence about a wrong value, whatever number of types it could have."""
    value, types = errors[0]["input"], [error["type"] for error in errors]
    if "unexpected_keyword_argument" in types:
        return f"{key} is no setting{closest(key, _fields(kind, ''))}"
    if "missing" in types:
        return f"{key} is missing from the configuration"
    if value == "???":
        return f"{key} has no value; give {key}=..."
    ranged = [error for error in errors if set(error.get("ctx", ())) & {"ge", "gt", "le", "lt"}]
    said = []
    for error in ranged or errors:
        context: dict[str, Any] = {word: _number(end) for word, end in error.get("ctx", {}).items()}
        if error["type"] == "literal_error":
            words = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
            context["expected"] = f"{', '.join(words)}{closest(str(value), words)}"
        said.append(_KINDS.get(error["type"], error["msg"]).format(**context))
    return f"{key}={shown(value)} must be {' or '.join(dict.fromkeys(said))}"


def _number(value: Any) -> Any:
    return f"{value:.12g}" if isinstance(value, float) else value


def _fields(kind: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted names of a dataclass's settings."""
    for name, hint in typing.get_type_hints(kind).items() if dataclasses.is_dataclass(kind) else ():
        yield f"{prefix}{name}"
        yield from _fields(hint, f"{prefix}{name}.")
