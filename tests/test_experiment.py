"""From settings to objects: what is passed, and what a misspelt or ill-behaved part is answered."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra.utils
import made
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from grpo_cli.config.choices import choices, parts_of, shipped
from grpo_cli.config.instantiate import _takes, make
from grpo_cli.config.prepare import build_and_check, pick_device
from grpo_cli.config.read import read
from grpo_cli.support.errors import UserError

RULES_OF_A_USER = """
import torch
from grpo_cli.types import LossOutput

class Thing:
    def __init__(self, seed, own):
        self.seed, self.own = seed, own

def last(group, keep, rng, *, start):
    return range(start, start + keep)

def too_few(group, keep, rng):
    return [0]

def crash(group, keep, rng):
    return [][1]

def infinite(group, kept):
    return torch.ones(len(kept)) / 0

def detached(logprobs, batch, totals):
    return LossOutput(logprobs.detach().sum(), {})

def compared(logprobs, batch, totals):
    return LossOutput((logprobs - batch.ref_logprobs).square().sum(), {})

def marked(logprobs, batch, totals):
    return compared(logprobs, batch, totals)

marked.needs_reference = marked.needs_advantage = True

class NoNext:
    needs_lengths = False

    def start(self, waiting, slots): ...
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rules.py").write_text(RULES_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "user_rules"


def test_a_part_gets_its_own_words_and_the_objects_that_it_names(user_module):
    thing = make("sparsity", {"_target_": f"{user_module}.Thing", "own": [1, {"b": 2}]}, {"seed": 3, "unasked": 4})
    assert vars(thing) == {"own": [1, {"b": 2}], "seed": 3}


@pytest.mark.parametrize(
    ("changed", "key", "way_out"),
    [
        ({"advantage": made.part("advantage", "grpo", stat_over=1)}, "advantage.stat_over", "mean advantage.stats_"),
        ({"downsample": {"_target_": "nowhere.rule"}}, "downsample._target_=nowhere.rule", "module.name"),
        ({"downsample": {"_target_": "user_rules.too_few"}}, "user_rules.too_few", "return 2 different"),
        ({"downsample": {"_target_": "user_rules.infinite"}}, "downsample._target_", "(group, keep, rng)"),
        ({"downsample": {"_target_": "user_rules.last"}}, "downsample._target_", "+downsample.<argument>=..."),
        ({"downsample": {"_target_": "user_rules.crash"}}, "user_rules.crash", "line "),
        ({"advantage": {"_target_": "user_rules.infinite"}}, "advantage user_rules.infinite", "NaN or infinity"),
        ({"loss": {"_target_": "user_rules.detached"}}, "loss user_rules.detached", "no gradient"),
        ({"loss": {"_target_": "user_rules.compared"}}, "loss user_rules.compared", "TypeError"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_a_run_or_a_sweep_begins(user_module, changed, key, way_out):
    with pytest.raises(UserError) as refused:
        checked(2, **{"downsample": made.part("downsample", "random"), **changed})
    assert key in str(refused.value) and way_out in str(refused.value)


def checked(m: int = 16, **changed: dict[str, Any]) -> None:
    build_and_check(replace(made.settings(), m=m, parts={**made.settings().parts, **changed}))


def test_a_part_that_lacks_members_is_refused_and_a_loss_that_says_so_gets_its_reference(user_module):
    with pytest.raises(UserError, match="scheduler: user_rules.NoNext lacks next"):
        checked(scheduler={"_target_": f"{user_module}.NoNext"})
    checked(loss=(marked := {"_target_": f"{user_module}.marked"}))
    assert make("loss", marked).needs_advantage


def test_cuda_without_a_gpu_is_refused_with_the_reason(monkeypatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"device=cuda: PyTorch finds no GPU: .*too old \(found"):
        pick_device("cuda")


def test_jobs_that_share_a_gpu_leave_room_for_what_cuda_takes_of_each(monkeypatch):
    shares: list[Any] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=24 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.delenv("GRPO_GPU_SHARE", raising=False)
    pick_device("cuda")
    monkeypatch.setenv("GRPO_GPU_SHARE", "0.25")
    pick_device("cuda")
    assert shares == [1.0, 0.25 - 0.5 / 24]


# Ranges stand beside types: every setting refuses the nearest value beyond its range, by its key.


def beyond(hint: Any) -> Iterator[Any]:
    """Yield the nearest values that a type's ranges leave out, those of members of unions included."""
    for limit in getattr(hint, "__metadata__", ()):
        for end in limit.metadata if isinstance(limit, FieldInfo) else [limit]:
            match end:
                case Ge(ge=end):
                    yield end - 1
                case Gt(gt=end) | Lt(lt=end):
                    yield end
                case Le(le=end):
                    yield end + 1
                case AfterValidator():
                    yield "no such word"
    for member in typing.get_args(hint):
        yield from beyond(member)


def of_parts() -> Iterator[tuple[str, str, str, Any]]:
    """Yield the settings with a range of every part in `conf/`, once for choices of one class or function."""
    for group in sorted({*parts_of("train"), *parts_of("eval")}):
        of_target = {shipped(group, choice)["_target_"]: choice for choice in choices(group)}
        for target, choice in of_target.items():
            hints = _takes(hydra.utils.get_object(target))
            for name, value in shipped(group, choice).items():
                if not isinstance(value, list | Mapping):
                    yield from ((group, choice, name, wrong) for wrong in beyond(hints.get(name)))


def test_ranges_are_found_in_typed_dicts_dataclasses_and_functions():
    named = {"task.eval_problems", "sparsity.kernel", "loss.aggregation", "advantage.eps"}
    assert named <= {f"{group}.{name}" for group, _, name, _ in of_parts()}


@pytest.mark.parametrize(("group", "choice", "name", "value"), [*of_parts()])
def test_a_part_refuses_what_is_beyond_its_ranges(group, choice, name, value):
    with pytest.raises(UserError, match=rf"^{group}\.{name}=.* must be ") as error:
        make(group, shipped(group, choice) | {name: value}, {})
    assert len(error.value.problems) == 1


def test_settings_of_a_run_are_refused_beyond_their_ranges():
    groups = [part for part in vars(made.settings()).values() if dataclasses.is_dataclass(part)]
    tried = 0
    for part in groups:
        for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
            for value in beyond(hint):
                with pytest.raises(UserError, match=rf"^group\.{name}=") as error:
                    read(type(part), dataclasses.asdict(part) | {name: value}, key="group")
                assert len(error.value.problems) == 1
                tried += 1
    assert tried > 40
