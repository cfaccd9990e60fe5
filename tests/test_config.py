"""Settings: what conf/ composes, what is refused by its key, and how a recorded run's settings meet typed ones."""

from __future__ import annotations

import inspect
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import hydra.utils
import made
import pytest
from made import configuration as compose
from omegaconf import OmegaConf

from grpo_cli.cli.hydra_run import with_line_breaks
from grpo_cli.config.choices import EXPERIMENTAL, choices, config_dir, groups_of, parts_of, shipped
from grpo_cli.config.compose import read_settings
from grpo_cli.config.instantiate import RECIPE, without_inherited
from grpo_cli.config.prepare import build_and_check
from grpo_cli.config.recorded import start_of, start_of_record
from grpo_cli.runs.record import RunRecord
from grpo_cli.settings import EvalRunSettings, RunSettings
from grpo_cli.support.errors import UserError

CONF = config_dir()
GROUP_FILES = sorted([*CONF.glob("*/[!_]*.yaml"), *EXPERIMENTAL.glob("*/[!_]*.yaml")])
# Named experiments are composed in test_methods.py, experimental choices in experimental/test_every_choice.py.
CHOICES = [file for file in GROUP_FILES if file.parent.name != "experiment"]
GROUPS = sorted({file.parent.name for file in CHOICES})


def settings(*overrides: str) -> RunSettings:
    return read_settings(compose(*overrides), RunSettings, overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        build_and_check(settings(*overrides))
    return str(refused.value)


def test_the_defaults_are_accepted_and_typed():
    run = settings()
    build_and_check(run)
    assert (run.n, run.m, run.seed, run.resume) == (16, 16, 0, None)
    assert run.optim.betas == (0.9, 0.99) and isinstance(settings("optim.lr=1").optim.lr, float)
    assert run.sampling.max_new_tokens == 128
    assert set(run.parts) == set(parts_of("train"))
    evaluation = read_settings(compose("sampling.top_p=0.9", "eval.problems=-1", command="eval"), EvalRunSettings)
    build_and_check(evaluation)  # which may truncate, and takes all problems
    assert set(evaluation.parts) == set(parts_of("eval"))


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_can_be_composed(group: str) -> None:
    for choice in choices(group):
        if (EXPERIMENTAL / group / f"{choice}.yaml").is_file():
            continue
        if group not in groups_of("train"):
            build_and_check(read_settings(compose(f"{group}={choice}", command="eval"), EvalRunSettings))
            continue
        required = [f"{group}.{key}=x" for key, value in shipped(group, choice).items() if value == "???"]
        besides = ["predictor=mean"] * (group == "scheduler") + ["m=8"] * (group == "downsample" and choice != "all")
        build_and_check(settings(f"{group}={choice}", *besides, *required))


@pytest.mark.parametrize("group", GROUPS)
def test_every_target_takes_what_its_yaml_gives_and_has_no_second_default(group: str) -> None:
    for choice in choices(group) if group != "model" else ():  # no target: settings of the package's own
        words = shipped(group, choice)
        words.pop(RECIPE, None)
        signature = inspect.signature(hydra.utils.get_object(words.pop("_target_")))
        signature.bind_partial(**words)
        twice = [word for word in words if word in signature.parameters and group != "logger"]
        assert [w for w in twice if signature.parameters[w].default is not inspect.Parameter.empty] == []


def test_what_is_read_of_a_choice_without_hydra_is_what_hydra_composes():
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        for group, choice in ((file.parent.name, file.stem) for file in CHOICES if "defaults:" in file.read_text()):
            assert shipped(group, choice) == OmegaConf.to_container(hydra.compose(f"{group}/{choice}"))[group]


@pytest.mark.parametrize("word", ["task.template=", "task.system_prompt=", "sampling.stop="])
def test_a_typed_line_break_is_one_and_a_command_of_tex_stays(word: str) -> None:
    typed = word + r'"a \neq b, \boxed{question}\n\nA:"'
    assert with_line_breaks(typed) == word + '"a \\neq b, \\boxed{question}\n\nA:"'
    assert with_line_breaks(typed.replace(word, "task.path=")) == typed.replace(word, "task.path=")


def test_a_part_of_ones_own_inherits_only_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from every other choice; what was typed, and what no choice has, stays to be refused."""
    takes = {"takes_nothing": [], "takes_seed": ["seed"], "takes_all": None}
    module = ModuleType("parts_of_mine")
    module.takes_nothing, module.takes_seed, module.takes_all = (lambda: None), (lambda seed: None), (lambda **of: None)
    for name in takes:
        getattr(module, name).__module__ = "parts_of_mine"
    monkeypatch.setitem(sys.modules, "parts_of_mine", module)
    for group, (name, taken) in itertools.product(("task", "loss", "logger"), takes.items()):
        for choice in choices(group):
            cfg = compose(f"{group}._target_=parts_of_mine.{name}", f"+{group}.zzz=1", f"{group}={choice}")
            part = without_inherited(group, OmegaConf.to_container(cfg)[group], {f"{group}.path"})
            kept = {key for key in shipped(group, choice) if key in (RECIPE, "path") or taken is None or key in taken}
            assert set(part) == {*kept, "_target_", "zzz"}, (choice, name)


# The ranges of every setting are tried in test_experiment.py; here is one of each kind, range and relation.
REFUSED = {
    "sampling.max_turn_tokens=9": "sampling.max_turn_tokens",
    "task=jsonl task.path=x.jsonl +task.weights.overlong=1 train.truncated=zero": "train.truncated=zero",
    "train.steps='3'": "train.steps=3",
    "optim.lr=null": "optim.lr=null",
    "train.micro_batch_tokens=all": "train.micro_batch_tokens=all",
    "train.max_generated=-5e6": "train.max_generated=-5000000.0",
    "train.count_by=promt": "did you mean prompt?",
    "model.random_init=1": "model.random_init=1",
    "optim.betas=[0.9]": "optim.betas",
    "optim.betas=[0.9,nan]": "optim.betas[1]=nan",
    "+optim.lrr=3": "did you mean optim.lr?",
    "task=jsonl": "task.path=...",
    "n=${nowhere}": "n",
    "sampler=null": "sampler",
    'sampling.stop=["a",""]': "sampling.stop[1]",
    f"seed={2**64}": f"seed={2**64}",
    f"train.epochs={10**400}": "train.epochs=1000",
    "sampler=infinite sampler.kv_budget=lots": "sampler.kv_budget=lots",
    "loss.clip_low=null": "loss.clip_low=null",
    "correction=tis correction.is_threshold=inf": "correction.is_threshold=inf",
    "+loss.clip_hihg=2": "did you mean loss.clip_high?",
    "n=1": "n=1",
    "m=4 downsample=all": "m=4",
    "m=1 downsample=maxvar advantage.stats_over=group": "m=1",
    "train.prompts=2 n=2 train.minibatches=5": "train.minibatches=5",
    "train.warmup=sft train.steps=20": "train.warmup_steps=20",
    "collector=partial sparsity=snapkv": "sparsity=snapkv",
    "correction=tis correction.prox=sampler": "prox=step_start",
    "correction.prox=ewma": "correction=decoupled",
    "correction=tis correction.is_threshold=2 correction.is_threshold_low=3": "correction.is_threshold_low=3",
    "engine=ray task=guess sparsity=h2o": "cannot resume",
    "engine=ray collector=partial": "cannot stop",
    "task=jsonl task.path=x task.overlong_tokens=600": "task.overlong_tokens=600",
    "correction.prox=sampler sparsity=snapkv": "sparsity=snapkv",
    "correction.prox=sampler engine=vllm": "engine=vllm",
    "sampling.top_k=50": "sampling.top_k=50",
    "optim.park=true optim.offload=true": "optim.park",
    "model.dtype=bfloat16": "model.dtype=bfloat16",
    "engine=vllm sparsity=rkv": "sparsity=rkv",
}


@pytest.mark.parametrize(("words", "key"), REFUSED.items(), ids=[word[:50] for word in REFUSED])
def test_settings_that_cannot_work_are_refused_by_their_key(words: str, key: str) -> None:
    assert key in refusal(*words.split())


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("train.steps=0 n=0 m=-1 optim.lr=x", ("train.steps=0", "n=0", "m=-1", "optim.lr=x")),
        ("n=0 optim.lr=-1 seed=true device=tpu +sead=3", ("n=0", "optim.lr=-1", "seed=true", "device=tpu", "sead")),
        ("n=0 sampler=micro sampler.slots=0 loss.kl_coef=-1", ("n=0", "sampler.slots=0", "loss.kl_coef=-1")),
        ("n=8 m=9 optim.weight_decay=9e9 scheduler=lpt predictor=none", ("m=9", "optim.weight_decay", "scheduler=lpt")),
    ],
)
def test_all_errors_are_listed_at_once_and_none_twice(words: str, keys: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        build_and_check(settings(*words.split()))
    assert len(refused.value.problems) == len(keys), refused.value
    assert all(any(key in line for line in refused.value.problems) for key in keys)


RUN = ("task=jsonl", "task.path=x.jsonl", "sampling.max_new_tokens=7", "seed=5", "n=4", "logger=jsonl", "optim.lr=3e-4")
CHOICES_OF_RUN = {"task": "jsonl", "model": "tiny", "loss": "grpo", "logger": "jsonl", "experiment": "none"}


def recorded(tmp_path: Path, *changed: str) -> RunRecord:
    run = OmegaConf.to_container(compose(*RUN, *changed), resolve=False)
    run["task"]["template"] = r"it's \ C:\ \${n} {question}"
    return made.record(tmp_path, run, choices=CHOICES_OF_RUN)


def merged(command: str, record: RunRecord, *typed: str, **decided: Any) -> Any:
    """Return what `grpo <command>` reads of a recorded run and what is typed."""
    start = start_of_record(command, record, {"run_dir": ".", **decided}, typed)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose(start.config, start.words)
    return read_settings(cfg, RunSettings if command == "train" else EvalRunSettings, typed)


def continued(tmp_path: Path, *typed: str) -> RunSettings:
    return merged("train", recorded(tmp_path), *typed)


def test_a_resumed_run_has_its_recorded_settings_and_what_is_typed(tmp_path: Path) -> None:
    same = continued(tmp_path)
    other = continued(tmp_path, "optim.lr=1e-5", "n=8", "task=jsonl", "+task.weights.short=0.5")
    assert (same.n, same.m, same.seed, same.optim.lr, same.parts["task"]["path"]) == (4, 4, 5, 3e-4, "x.jsonl")
    assert same.parts["task"]["template"] == r"it's \ C:\ ${n} {question}"
    assert (other.n, other.m, other.optim.lr, other.seed) == (8, 8, 1e-5, 5), "m follows n as it did"
    weights = {**same.parts["task"]["weights"], "short": 0.5}
    assert other.parts["task"] == {**same.parts["task"], "weights": weights}, "the choice is the recorded one"
    (once := recorded(tmp_path, "+task.weights.short=0.5")).config["task"]["weights"].pop("correct")
    again = merged("train", once, "+task.weights.short=0.5", "~task.weights.correct").parts["task"]
    assert again["weights"] == once.config["task"]["weights"], "typed again, as scripts/slurm.sh does"
    changed = continued(tmp_path, "loss=dapo", "task.template=a")
    assert changed.parts["loss"] == shipped("loss", "dapo") and changed.parts["task"]["template"] == "a"


def test_a_run_is_evaluated_with_its_own_settings_and_the_checkpoint_s_weights(tmp_path: Path) -> None:
    decided = {"model.path": "ckpt", "model.random_init": False}
    run = merged("eval", recorded(tmp_path), "eval.k=9", **decided)
    assert (run.model.path, run.model.random_init, run.seed, run.eval.k) == ("ckpt", False, 5, 9)
    assert (run.parts["task"]["path"], run.sampling.max_new_tokens, run.eval.split) == ("x.jsonl", 7, "eval")
    for overrides, limit in (((), shipped("task", "arithmetic")["recipe"]["max_new_tokens"]), (RUN, 7)):
        other = merged("eval", replace(recorded(tmp_path), overrides=overrides), "task=arithmetic", **decided)
        assert other.sampling.max_new_tokens == limit, "the task's own, unless it was typed"


@pytest.mark.parametrize("group", ["zzz", "hydra", "defaults"])
def test_a_recorded_group_that_does_not_exist_is_refused(tmp_path: Path, group: str) -> None:
    record = recorded(tmp_path)
    with pytest.raises(UserError, match=f"{group} missing or unknown"):
        merged("train", replace(record, config={**record.config, group: {"_target_": "os.mkdir"}}))


def test_one_command_for_start_and_resume_types_a_path_elsewhere_again(tmp_path: Path) -> None:
    words = ("resume=here", f"hydra.run.dir={tmp_path}", "task=jsonl", "task.path=/elsewhere.jsonl", "optim.lr=auto")
    run = recorded(tmp_path, words[3])
    made.record(tmp_path, dict(run.config), overrides=words[2:], choices=CHOICES_OF_RUN)
    assert start_of("train", words).words == ["task.path=/elsewhere.jsonl"]
    with pytest.raises(UserError, match="task.path=/elsewhere.jsonl is not taken"):
        start_of("train", words[:3])
