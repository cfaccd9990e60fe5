"""Settings: what is composed from conf/, what is refused and in which words, and that every YAML fits its target."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType

import hydra
import hydra.utils
import made
import pytest
from made import configuration as compose
from omegaconf import OmegaConf

import grpo_cli.settings
from grpo_cli.config.check import check, check_eval
from grpo_cli.config.choices import EXPERIMENTAL, choices, config_dir, groups_of, parts_of, shipped
from grpo_cli.config.compose import parse, parse_eval
from grpo_cli.config.instantiate import RECIPE, drop_inherited
from grpo_cli.config.overrides import overrides_of_run, overrides_to_resume
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError

CONF = config_dir()
GROUP_FILES = sorted([*CONF.glob("*/[!_]*.yaml"), *EXPERIMENTAL.glob("*/[!_]*.yaml")])
# Named experiments are composed and checked in test_pods.py.
CHOICES = [file for file in GROUP_FILES if file.parent.name != "experiment"]


def settings(*overrides: str) -> RunSettings:
    return parse(compose(*overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        check(settings(*overrides))
    return str(refused.value)


def test_the_defaults_are_accepted_and_typed():
    run = settings()
    check(run)
    assert (run.n, run.m, run.seed, run.resume) == (16, 16, 0, None)
    assert run.optim.betas == (0.9, 0.99)
    assert run.sampling.max_new_tokens == 128
    assert set(run.parts) == set(parts_of("train"))


def test_the_defaults_of_eval_are_accepted():
    run = parse_eval(compose(command="eval"))
    check_eval(run)
    assert set(run.parts) == set(parts_of("eval"))


@pytest.mark.parametrize("file", CHOICES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_choice_can_be_composed(file, tmp_path):
    group, words = file.parent.name, shipped(file.parent.name, file.stem)
    if group not in groups_of("train"):
        check_eval(parse_eval(compose(f"{group}={file.stem}", command="eval")))
        return
    trace = Path(__file__).parent / "old_run" / "rollouts.jsonl"
    required = [f"{group}.{key}={trace}" for key, value in words.items() if value == "???"]
    predictor = ["predictor=mean"] if group == "scheduler" else []
    fewer = ["m=8"] if group == "downsample" and file.stem != "all" else []
    others = {"collector=dars": ["advantage=dr_grpo"], "advantage=median": ["n=9"], "downsample=median": ["n=9"]}
    others["advantage=median_release"] = ["n=9"]
    answers = tmp_path / "samples.jsonl"
    answers.write_text('{"prompt_id": "p", "reason": "sampled", "solved": true}')
    others["advantage=a2po"] = others["loss=a2po"] = ["advantage=a2po", f"advantage.answers={answers}"]
    besides = others.get(f"{group}={file.stem}", [])
    check(settings(f"{group}={file.stem}", *predictor, *fewer, *besides, *required))


@pytest.mark.parametrize("file", CHOICES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_target_exists_and_takes_what_its_yaml_gives(file):
    if file.parent.name == "model":  # no target: settings of the package's own
        return
    words = shipped(file.parent.name, file.stem)
    words.pop(RECIPE, None)
    target = hydra.utils.get_object(words.pop("_target_"))
    if isinstance(target, type):
        assert callable(target)
    inspect.signature(target).bind_partial(**words)


@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_no_setting_of_a_part_has_a_second_default_in_its_constructor(file):
    words = shipped(file.parent.name, file.stem)
    if "_target_" not in words:  # settings of the package's own, below
        return
    parameters = inspect.signature(hydra.utils.get_object(words["_target_"])).parameters
    twice = [word for word in words if word in parameters and parameters[word].default is not inspect.Parameter.empty]
    assert twice == []


def test_no_setting_has_a_second_default_in_its_dataclass():
    kinds = [kind for name, kind in vars(grpo_cli.settings).items() if name.endswith("Settings") or name == "Sampling"]
    fields = [(kind, field) for kind in kinds for field in dataclasses.fields(kind)]
    assert grpo_cli.settings.TrainSettings in kinds
    unset = dataclasses.MISSING
    assert [(k, f.name) for k, f in fields if f.default is not unset or f.default_factory is not unset] == []


BASES = sorted(CONF.glob("*/_*.yaml"))


@pytest.mark.parametrize("file", BASES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_what_choices_have_in_common_is_no_choice_itself(file):
    group = file.parent.name
    assert file.stem not in choices(group)
    with pytest.raises(
        UserError, match=f"{group} says nowhere what to build: choose one of {', '.join(choices(group))}"
    ):
        settings(f"{group}={file.stem}")


def test_what_is_read_of_a_choice_without_hydra_is_what_hydra_composes():
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        for group, choice in ((file.parent.name, file.stem) for file in CHOICES):
            assert shipped(group, choice) == OmegaConf.to_container(hydra.compose(f"{group}/{choice}"))[group]


def test_every_group_is_offered_and_those_of_a_command_are_its_own():
    folders = {file.parent.name for file in GROUP_FILES}
    assert set(groups_of("train")) == set(groups_of("profile")) == folders - {"search"}
    assert set(groups_of("eval")) == {"model", *parts_of("eval")} <= folders


@pytest.mark.parametrize("file", sorted([*CONF.rglob("*.yaml"), *GROUP_FILES]), ids=lambda file: file.stem)
def test_every_key_has_a_comment_above_it(file):
    """A comment covers the keys right below it; so does the file's first line for `_target_` and its like."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# "), "a file opens with what the choice is"
    bare = []
    for above, line in zip(lines, lines[1:], strict=False):
        if line.startswith("hydra:"):  # Hydra's own keys
            break
        key = line.strip().partition(":")[0]
        opens_block = line.rstrip().endswith(":")
        if ":" not in line or line.lstrip().startswith(("#", "-")) or key.startswith("_") or opens_block:
            continue
        if not above.strip() or above.rstrip().endswith(":"):
            bare.append(line)
    assert bare == []


@pytest.mark.parametrize(
    ("override", "key", "wanted"),
    [
        ("n=abc", "n=abc", "a whole number"),
        ("seed=true", "seed=true", "a whole number"),
        ("seed=1.0", "seed=1.0", "a whole number"),
        ("train.steps='3'", "train.steps=3", "a whole number"),
        ("optim.lr=null", "optim.lr=null", "a number"),
        ("train.micro_batch_tokens=all", "train.micro_batch_tokens=all", "a whole number, or auto"),
        ("model.random_init=1", "model.random_init=1", "true or false"),
        ("model.architecture=3", "model.architecture=3", "a group of settings"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]", "a list of 2 values"),
        ("optim.betas=[0.9,x]", "optim.betas[1]=x", "a number"),
        ("optim=3", "optim=3", "a group of settings"),
        ("+optim.lrr=3", "optim.lrr", "did you mean lr?"),
        ("task=jsonl", "task.path", "task.path=..."),
        ("n=${nowhere}", "n", "nowhere"),
        ("sampler=null", "sampler", "full, infinite, micro"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(override, key, wanted):
    with pytest.raises(UserError) as refused:
        settings(override)
    assert key in str(refused.value) and wanted in str(refused.value)


def test_numbers_are_not_rounded_or_converted_but_from_whole_to_float():
    run = settings("optim.lr=1", "sampling.temperature=2")
    assert isinstance(run.optim.lr, float) and run.optim.lr == 1.0
    assert isinstance(run.sampling.temperature, float)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"Q: {question}\nA:", "Q: {question}\nA:"),
        (r"a \neq b, \boxed{question}\n\n", "a \\neq b, \\boxed{question}\n\n"),
    ],
)
@pytest.mark.parametrize("word", ["template", "system_prompt"])
def test_a_typed_line_break_is_one(word, typed, meant):
    part = settings("task=jsonl", "task.path=x", f'task.{word}="{typed}"').parts["task"]
    assert part[word] == meant


@pytest.mark.parametrize("group", parts_of("train"))
def test_a_part_of_ones_own_inherits_only_what_it_takes(group, monkeypatch):
    """Also from every other choice; what was typed, and what no choice has, stays to be refused."""
    takes = {"takes_nothing": [], "takes_seed": ["seed"], "takes_all": None}
    module = ModuleType("parts_of_mine")
    module.takes_nothing, module.takes_seed, module.takes_all = (lambda: None), (lambda seed: None), (lambda **of: None)
    for name in takes:
        getattr(module, name).__module__ = "parts_of_mine"
    monkeypatch.setitem(sys.modules, "parts_of_mine", module)
    for choice, (name, taken) in itertools.product(choices(group), takes.items()):
        cfg = compose(f"{group}._target_=parts_of_mine.{name}", f"+{group}.zzz=1", f"{group}={choice}")
        drop_inherited(cfg, [group])
        kept = {key for key in shipped(group, choice) if key == RECIPE or taken is None or key in taken}
        assert set(cfg[group]) == {*kept, "_target_", "zzz"}, (choice, name)


# Every number of every setting is tried by test_bad_commands.py; here is one of each kind of range and of relation.
@pytest.mark.parametrize(
    ("words", "key", "way_out"),
    [
        ("n=0", "n=0", "at least 1"),
        ("n=1", "n=1", "take n of 2 or more"),
        ("train.micro_batch_tokens=0", "train.micro_batch_tokens=0", "at least 1"),
        ("train.max_generated=-5e6", "train.max_generated=-5000000.0", "more than 0"),
        ("train.count_by=promt", "train.count_by=promt", "rollout, prompt; did you mean prompt?"),
        ("sampling.top_p=1.5", "sampling.top_p=1.5", "more than 0 and at most 1"),
        ("optim.betas=[0.9,1]", "optim.betas[1]=1.0", "at least 0 and less than 1"),
        ("optim.betas=[0.9,nan]", "optim.betas[1]=nan", "finite"),
        ("optim.lr=-inf", "optim.lr=-inf", "finite"),
        ("optim.eps=1e39", "optim.eps=1e+39", "at most 3.4e+38"),
        (f"seed={2**64}", f"seed={2**64}", "from 0 to 18446744073709551615"),
        (f"train.steps={10**400}", "train.steps=a number of 401 digits", "at most 1.84e+19"),
        (f"train.steps={10**12}", f"train.steps={10**12}", "from 1 to 1000000000"),
        ("model=qwen3_0_6b model.architecture.rms_norm_eps=nan", "model.architecture.rms_norm_eps=nan", "finite"),
        ("sampler=infinite sampler.kv_budget=lots", "sampler.kv_budget=lots", "512MiB"),
        ("sampler=infinite sampler.kv_budget=0GB", "sampler.kv_budget=0GB", "from 1 byte"),
        ("sampler=micro sampler.slots=0", "sampler.slots=0", "at least 1"),
        ("sampler=micro sampler.slots=2.5", "sampler.slots=2.5", "whole number"),
        ("loss.clip_low=null", "loss.clip_low=null", "a number"),
        ("correction=tis correction.is_threshold=inf", "correction.is_threshold=inf", "finite"),
        ("engine=vllm engine.options=fast", "engine.options=fast", "a group of settings"),
        ("m=0", "m=0", "at least 1"),
        ("n=4 m=8", "m=8", "n=4"),
        ("m=4 downsample=all", "m=4", "downsample=maxvar"),
        ("m=1 downsample=maxvar advantage.stats_over=group", "m=1", "downsample=maxvar"),
        ("m=1 downsample=random", "m=1", "advantage.stats_over=group"),
        ("train.prompts=2 n=2 train.minibatches=5", "train.minibatches=5", "the 4 rollouts"),
        ("advantage=median n=8", "n=8", "take n=9"),
        ("advantage=median n=9 collector=mixed", "collector=mixed", "use collector=equal"),
        ("downsample=median n=9 m=8 collector=ci", "collector=ci", "use collector=equal"),
        ("downsample=median n=9 m=4", "n=9", "m must be 8"),
        ("collector=dars", "collector=dars", "advantage=dr_grpo or collector.divided=true"),
        ("collector=dars collector.divided=true advantage=rloo", "collector=dars", "collector.divided=false"),
        ("collector=dars collector.divided=true n=40", "collector.most=32", "n=40"),
        ("collector=partial sparsity=snapkv", "sparsity=snapkv", "sparsity=dense, or collector=equal"),
        ("collector=partial engine=ray", "engine=ray", "engine=torch or engine=vllm, or collector=equal"),
        ("collector=partial predictor=oracle predictor.lengths=x.jsonl", "predictor=oracle", "predictor=mean"),
        ("sampling.top_k=50", "sampling.top_k=50", "sampling.top_k=0"),
        ("scheduler=lpt predictor=none", "predictor=none", "choose predictor=mean"),
        ("optim.weight_decay=2000", "optim.weight_decay=2000.0", "less than 1"),
        ("engine=vllm sparsity=rkv", "sparsity=rkv", "engine=torch"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_key_and_with_a_way_out(words, key, way_out):
    said = refusal(*words.split())
    assert key in said and way_out in said


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("n=0 optim.lr=-1 seed=true device=tpu +sead=3", ("n=0", "optim.lr=-1.0", "seed=true", "device=tpu", "sead")),
        (
            "n=8 m=1 downsample=maxvar loss.kl_coef=-1 loss.aggregation=mean sampler=micro sampler.slots=0 "
            "scheduler=lpt predictor=none",
            ("m=1", "loss.kl_coef", "loss.aggregation", "sampler.slots=0", "scheduler=lpt"),
        ),
    ],
    ids=["values", "relations and parts"],
)
def test_all_violations_are_said_at_once(words, keys):
    text = refusal(*words.split())
    assert text.startswith(f"{len(keys)} settings cannot be used:")
    assert all(f"\n  - {key}" in text for key in keys)


def test_the_largest_group_is_checked_at_once():
    """Of 2^22 rollouts a step, which are the most."""
    check(settings(f"n={2**18}", "train.prompts=16"))
    assert "downsample=all" in refusal(f"n={2**18}", "m=100000", "downsample=all")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r'["\n"]', "\n"),
        (r"['\t']", "\t"),
        (r'["a\n\nb\r"]', "a\n\nb\r"),
        (r'["\\n"]', r"\n"),
        (r'["\\boxed{"]', r"\boxed{"),
        ('["\n"]', "\n"),
        ('["plain"]', "plain"),
    ],
)
def test_a_stop_string_is_read_as_it_is_meant(typed, meant):
    for run in (settings(f"sampling.stop={typed}"), parse_eval(compose(f"sampling.stop={typed}", command="eval"))):
        assert run.sampling.stop == (meant,)


@pytest.mark.parametrize("typed", [r'["\boxed"]', r'["x\ "]', r'["ok", "x\d"]'])
def test_a_stop_string_that_stands_for_nothing_is_refused(typed):
    with pytest.raises(UserError, match=r"sampling.stop\[.\]=.* which stands for nothing: write two backslashes"):
        settings(f"sampling.stop={typed}")


@pytest.mark.parametrize(
    "words",
    [
        ["collector=dars", "advantage=rloo"],
        ["collector=dars", "collector.divided=true"],
        ["advantage=median", "downsample=median", "n=9", "m=8"],
        ["advantage=median", "advantage.scale=mad", "n=3"],
        ["advantage=per_part", "+advantage.weights.short=0.5"],
        ["advantage=novelty", "collector=ci", "train.count_by=prompt", "train.max_generated=5e6"],
        ["train.max_generated=1000", "loss.kl_coef=1"],
        ["n=2", "m=1", "downsample=random", "advantage.stats_over=group"],
        ["train.prompts=2", "n=2", "train.minibatches=4"],
        ["collector=partial", "advantage=median", "n=9"],
    ],
    ids=" ".join,
)
def test_rules_that_go_together_do(words):
    check(settings(*words))


def test_eval_may_truncate_and_takes_all_problems():
    check_eval(parse_eval(compose("sampling.top_p=0.9", "eval.problems=-1", command="eval")))


def test_a_run_is_evaluated_with_its_own_choices_and_values(tmp_path: Path):
    """Also those that come from a named experiment or another default, which the command line does not show."""
    hostile = r"it's \ C:\new\ ${n} \'"
    run = compose("task=gsm8k", "model=hf", "model.path=x", "sampling.max_new_tokens=7", "seed=5", "logger=jsonl")
    run.task.template = hostile.replace("${", "\\${")
    run.model.random_init, run.model.eos_tokens = True, ["<|end|>"]
    names = {group: "gsm8k" if group == "task" else "hf" for group in ("task", "model")}
    names |= {"engine": "torch", "sampler": "full", "scheduler": "fifo", "predictor": "none", "sparsity": "dense"}
    names["logger"] = "jsonl"
    run.model.architecture = {"model_type": "llama"}
    left = made.record(tmp_path, OmegaConf.to_container(run, resolve=False), choices=names)

    again = compose(*overrides_of_run(left), command="eval")
    assert again.task.template == hostile
    assert (again.task.path, again.task.use_chat_template, again.task.eval_fraction) == (None, True, 0.05)
    assert (again.model.path, again.model.random_init, again.model.offload_activations) == ("x", True, False)
    assert again.model.eos_tokens == [], "random weights of a preset have the ends of no tokenizer"
    assert (again.sampling.max_new_tokens, again.seed) == (7, 5)


def test_a_run_is_resumed_with_what_it_was_started_with_however_often(tmp_path: Path):
    first = ["n=4", "task.template='a b'", "train.steps=3"]
    again = overrides_to_resume(made.record(tmp_path, {}, first), tmp_path)
    assert again == [*first, f"++hydra.run.dir='{tmp_path}'"]
    later = made.record(tmp_path, {}, [*first, "resume=auto", f"++resume='{tmp_path}'", "++resume_wait=3"])
    assert overrides_to_resume(later, tmp_path) == again
