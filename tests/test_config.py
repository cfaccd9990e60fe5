"""Settings: what is composed from conf/, what is refused and in which words, and that every YAML fits its target."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from pathlib import Path

import hydra
import hydra.utils
import made
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import grpo_cli.settings
from grpo_cli.config.check import check, check_eval
from grpo_cli.config.choices import choices, config_dir, groups_of, parts_of, shipped
from grpo_cli.config.compose import parse, parse_eval
from grpo_cli.config.instantiate import RECIPE
from grpo_cli.config.overrides import overrides_of_run, overrides_to_resume
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError

CONF = config_dir()
GROUP_FILES = sorted(CONF.glob("*/[!_]*.yaml"))


@functools.cache
def composed(command: str, *overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(command, [*overrides, "run_dir=outputs/x"])


def compose(*overrides: str, command: str = "train") -> DictConfig:
    """What Hydra makes of the overrides. Choices are composed once, as that takes long, and values set afterwards."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = [o.input_line for o in parsed if (CONF / o.key_or_group).is_dir() and o.value() is not None]
    cfg = copy.deepcopy(composed(command, *groups))
    OmegaConf.set_struct(cfg, False)
    for override in parsed:
        if override.input_line not in groups:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False)
    return cfg


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


@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_choice_can_be_composed(file):
    group, words = file.parent.name, shipped(file.parent.name, file.stem)
    trace = Path(__file__).parent / "old_run" / "rollouts.jsonl"
    required = [f"{group}.{key}={trace}" for key, value in words.items() if value == "???"]
    predictor = ["predictor=mean"] if group == "scheduler" else []
    fewer = ["m=8"] if group == "downsample" and file.stem != "all" else []
    others = {"collector=dars": ["advantage=dr_grpo"], "advantage=median": ["n=9"], "downsample=median": ["n=9"]}
    others["advantage=median_release"] = ["n=9"]
    others["curriculum=profile"] = [f"train.history={trace}"]
    others["replay=folder"] = [f"replay.path={trace.parent}"]
    besides = others.get(f"{group}={file.stem}", [])
    check(settings(f"{group}={file.stem}", *predictor, *fewer, *besides, *required))


@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_target_exists_and_takes_what_its_yaml_gives(file):
    if file.parent.name in ("model", "experiment"):  # no target: settings of the package's own
        return
    words = shipped(file.parent.name, file.stem)
    words.pop(RECIPE, None)
    target = hydra.utils.get_object(words.pop("_target_"))
    if isinstance(target, type):
        assert callable(target)
    inspect.signature(target).bind_partial(**words)


@pytest.mark.parametrize("file", sorted(CONF.rglob("*/[!_]*.yaml")), ids=lambda file: f"{file.parent.name}={file.stem}")
def test_no_setting_of_a_part_has_a_second_default_in_its_constructor(file):
    words = shipped(str(file.parent.relative_to(CONF)), file.stem)
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


@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_what_is_read_of_a_choice_without_hydra_is_what_hydra_composes(file):
    group = file.parent.name
    if group != "experiment":
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            assert shipped(group, file.stem) == OmegaConf.to_container(hydra.compose(f"{group}/{file.stem}"))[group]


def test_every_group_is_offered_and_those_of_a_command_are_its_own():
    folders = {file.parent.name for file in GROUP_FILES}
    assert set(groups_of("train")) == set(groups_of("profile")) == folders
    assert set(groups_of("eval")) == {"model", *parts_of("eval")}


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: file.stem)
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
    ("override", "message"),
    [
        ("n=abc", "n=abc must be a whole number"),
        ("seed=true", "seed=true must be a whole number"),
        ("seed=1.0", "seed=1.0 must be a whole number"),
        ("train.steps='3'", "train.steps=3 must be a whole number"),
        ("optim.lr=fast", "optim.lr=fast must be a number"),
        ("optim.lr=null", "optim.lr=null must be a number"),
        ("model.random_init=1", "model.random_init=1 must be true or false"),
        ("model.architecture=3", "model.architecture=3 must be a group of settings"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] must be a list of 2 values"),
        ("optim.betas=[0.9,x]", "optim.betas[1]=x must be a number"),
        ("optim=3", "optim=3 must be a group of settings"),
        ("+optim.lrr=3", "optim.lrr is no setting; did you mean lr?"),
        ("+sead=3", "sead is no setting; did you mean seed?"),
        ("model=hf", "model.path has no value; give model.path=..."),
        ("task=jsonl", "task.path has no value; give task.path=..."),
        ("n=${nowhere}", "n: Interpolation key 'nowhere' not found"),
        ("sampler=null", "sampler says nowhere what to build: choose one of full, infinite, micro"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(override, message):
    with pytest.raises(UserError) as refused:
        settings(override)
    assert message in str(refused.value)


def test_numbers_are_not_rounded_or_converted_but_from_whole_to_float():
    run = settings("optim.lr=1", "sampling.temperature=2")
    assert isinstance(run.optim.lr, float) and run.optim.lr == 1.0
    assert isinstance(run.sampling.temperature, float)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["n=0"], "n=0 must be at least 2"),
        (["n=1"], "n=1 must be at least 2"),
        (["m=0"], "m=0 must be at least 1"),
        (["n=4", "m=8"], "m=8 must not be more than n=4"),
        (
            ["m=4", "downsample=all"],
            "m=4 is less than n=16, but downsample=all keeps all; choose downsample=maxvar, maxreward",
        ),
        (["m=1", "downsample=maxvar", "advantage.stats_over=group"], "m=1 cannot be chosen by downsample=maxvar"),
        (["m=1", "downsample=random"], "m=1 leaves advantage=grpo nothing to compare with"),
        (["train.micro_batch_tokens=0"], "train.micro_batch_tokens=0 must be at least 1"),
        (["train.steps=0"], "train.steps=0 must be at least 1"),
        (["train.prompts=-1"], "train.prompts=-1 must be at least 1"),
        (["train.prompts=2", "n=2", "train.minibatches=5"], "must not be more than the 4 rollouts trained on per step"),
        (["train.count_by=token"], "train.count_by=token must be one of rollout, prompt"),
        (["train.count_by=promt"], "did you mean prompt?"),
        (["train.max_generated=0"], "train.max_generated=0.0 must be more than 0"),
        (["train.max_generated=-5e6"], "train.max_generated=-5000000.0 must be more than 0"),
        (
            ["advantage=median", "n=8"],
            "n=8 has no middle rollout for advantage=median; take n=9 (downsample=median",
        ),
        (
            ["advantage=median", "n=9", "collector=mixed"],
            "collector=mixed makes groups of any size, of which advantage=median would not know the one in the middle; "
            "use collector=equal",
        ),
        (
            ["downsample=median", "n=9", "m=8", "collector=ci"],
            "collector=ci makes groups of any size, of which down",
        ),
        (["downsample=median", "n=9", "m=4"], "downsample=median leaves out one of n=9 rollouts, so m must be 8"),
        (["downsample=median", "n=9"], "downsample=median leaves out one of n=9 rollouts, so m must be 8"),
        (
            ["collector=dars"],
            "collector=dars counts for undivided advantages, but advantage=grpo divides by the deviation; use "
            "advantage=dr_grpo or collector.divided=true",
        ),
        (
            ["collector=dars", "collector.divided=true", "advantage=rloo"],
            "collector=dars counts for divided advantages, but advantage=rloo does not divide by the deviation; use "
            "advantage=grpo or collector.divided=false",
        ),
        (["collector=dars", "collector.divided=true", "n=40"], "collector.most=32 is less than n=40"),
        (["collector=mixed", "collector.pool=0"], "collector.pool=0 must be at least 1"),
        (
            ["collector=partial", "sparsity=snapkv"],
            "collector=partial goes on with partial rollouts, whose tokens sparsity=snapkv would count as prompt; use "
            "sparsity=dense, or collector=equal",
        ),
        (
            ["collector=partial", "engine=ray"],
            "collector=partial stops rollouts before their end, which engine=ray cannot, as its workers report a "
            "rollout when it has ended; use engine=torch or engine=vllm, or collector=equal",
        ),
        (
            ["collector=partial", "predictor=oracle", "predictor.lengths=x.jsonl"],
            "predictor=oracle knows how long whole rollouts were, and collector=partial makes them in parts; use",
        ),
        (["collector=partial", "collector.surplus=-1"], "collector.surplus=-1.0 must be at least 0"),
        (["collector=partial", "collector.max_lag=0"], "collector.max_lag=0 must be at least 1"),
        (["collector=mixed", "collector.pool=many"], "collector.pool=many must be a whole number"),
        (["credit=gdro", "credit.window=50"], "credit.window=50 must be from 1 to 8"),
        (["credit=gdro", "credit.bins=3.5"], "credit.bins=3.5 must be a number of bins, or edges"),
        (["sampling.temperature=0"], "sampling.temperature=0.0 must be from 0.0001 to 10000"),
        (["sampling.top_p=0.9"], "truncated sampling biases the importance ratio"),
        (["sampling.top_k=50"], "truncated sampling biases the importance ratio"),
        (["sampling.top_p=1.5"], "sampling.top_p=1.5 must be more than 0 and at most 1"),
        (["sampling.max_new_tokens=0"], "sampling.max_new_tokens=0 must be at least 1"),
        (["optim.lr=0"], "optim.lr=0.0 must be more than 0"),
        (["optim.lr=nan"], "optim.lr=nan must be finite"),
        (["optim.lr=inf"], "optim.lr=inf must be finite"),
        (["seed=-1"], "seed=-1 must be from 0 to 18446744073709551615"),
        ([f"seed={2**64}"], f"seed={2**64} must be from 0 to 18446744073709551615"),
        (["optim.schedule=cosin"], "must be one of constant, linear, cosine; did you mean cosine?"),
        (["optim.betas=[0.9,1]"], "optim.betas[1]=1.0 must be at least 0 and less than 1"),
        (["eval.k=0"], "eval.k=0 must be from 1 to 65536"),
        (["eval.temperature=0"], "eval.temperature=0.0 must be from 0.0001"),
        (
            ["scheduler=lpt", "predictor=none"],
            "scheduler=lpt orders by predicted length, but predictor=none; choose predictor=mean",
        ),
        (["sampler=micro", "sampler.slots=0"], "sampler.slots=0 must be at least 1"),
        (["sampler=infinite", "sampler.kv_budget=lots"], "sampler.kv_budget=lots is no size"),
        (["sampler=infinite", "sampler.kv_budget=true", "n=0"], "sampler.kv_budget=true is no size"),
        (["model.dtype=fp16"], "model.dtype=fp16 must be one of auto, float32, bfloat16"),
        (["device=gpu"], "device=gpu must be one of auto, cpu, cuda"),
        (["loss.kl_coef=-1"], "loss.kl_coef=-1.0 must be at least 0"),
        (["loss.kl_coef=inf"], "loss.kl_coef=inf must be finite"),
        (["optim.weight_decay=inf"], "optim.weight_decay=inf must be finite"),
        (["optim.betas=[0.9,nan]"], "optim.betas[1]=nan must be finite"),
        (["correction=tis", "correction.is_threshold=inf"], "correction.is_threshold=inf must be finite"),
        (["optim.eps=1e39"], "optim.eps=1e+39 must be at most 3.4e+38"),
        ([f"train.steps={10**400}"], "train.steps=a number of 401 digits must be at most 1.84e+19"),
        (["optim.weight_decay=2000"], "optim.weight_decay=2000.0 times optim.lr=0.0005 must be less than 1"),
        (["optim.lr=2"], "optim.lr=2.0 must be more than 0 and at most 1"),
        (["optim.max_grad_norm=1e16"], "optim.max_grad_norm=1e+16 must be more than 0 and at most 1e+15"),
        (["sampling.temperature=1e-9"], "sampling.temperature=1e-09 must be from 0.0001 to 10000"),
        (
            ["model=qwen3_0_6b", "model.architecture.rms_norm_eps=nan"],
            "model.architecture.rms_norm_eps=nan must be fin",
        ),
        (["sampler=infinite", "sampler.kv_budget=0GB"], "sampler.kv_budget=0GB must be from 1 byte"),
        (["loss.clip_low=low"], "loss.clip_low=low must be a number"),
        (["loss.clip_low=null"], "loss.clip_low=null must be a number"),
        (["scheduler=fptas", "scheduler.epsilon=fine"], "scheduler.epsilon=fine must be a number"),
        (["sampler=micro", "sampler.slots=2.5"], "sampler.slots=2.5 must be a whole number"),
        (["advantage.eps=little"], "advantage.eps=little must be a number"),
        (["engine=vllm", "engine.options=fast"], "engine.options=fast must be a group of settings"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(overrides, message):
    assert message in refusal(*overrides)


def test_all_violations_are_said_at_once():
    text = refusal("n=0", "train.micro_batch_tokens=0", "optim.lr=-1", "device=tpu")
    assert text.startswith("4 settings cannot be used:")
    for key in ("n=0", "train.micro_batch_tokens=0", "optim.lr=-1.0", "device=tpu"):
        assert f"  - {key} must be" in text


def test_what_parts_refuse_is_said_with_the_rest_at_once():
    text = refusal(
        "n=8", "m=1", "downsample=maxvar", "optim.lr=-1", "loss.kl_coef=-1", "loss.aggregation=mean", "sampler=micro",
        "sampler.slots=0", "sampler.on_oom=cry", "scheduler=lpt", "predictor=none",
    )  # fmt: skip
    assert text.startswith("7 settings cannot be used:")
    for begins in ("m=1 leaves", "optim.lr=", "loss.kl", "loss.agg", "sampler.slots=0", "sampler.on", "scheduler=lpt"):
        assert f"\n  - {begins}" in text
    assert "m=1 cannot be chosen by downsample=maxvar" in refusal("m=1", "advantage.stats_over=group")


def test_a_loss_is_asked_for_by_a_whole_number_too():
    check(settings("loss.kl_coef=1"))


def test_the_largest_group_is_checked_at_once():
    """Of 2^22 rollouts a step, which are the most; it was made up whole for the rehearsal."""
    check(settings(f"n={2**18}", "train.prompts=16"))
    said = refusal(f"n={2**18}", "m=100000", "downsample=all")
    assert "(tried on a made-up group of n=4096 with m=4095)" in said


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


def test_a_group_of_two_with_one_kept_is_fine_when_compared_with_the_whole_group():
    check(settings("n=2", "m=1", "downsample=random", "advantage.stats_over=group"))


def test_every_rollout_may_be_a_minibatch_of_its_own():
    check(settings("train.prompts=2", "n=2", "train.minibatches=4"))


@pytest.mark.parametrize(
    "words",
    [
        ["collector=dars", "advantage=rloo"],
        ["collector=dars", "collector.divided=true"],
        ["advantage=median", "downsample=median", "n=9", "m=8"],
        ["advantage=median", "advantage.scale=mad", "n=3"],
        ["credit=gdro", "credit.bins=[0.4,0.75]", "credit.eta=1"],
        ["advantage=per_part", "+advantage.weights.short=0.5"],
        ["advantage=novelty", "collector=ci", "train.count_by=prompt", "train.max_generated=5e6"],
        ["train.max_generated=1000"],
        ["collector=partial", "advantage=median", "n=9"],
        ["collector=partial", "collector.surplus=0", "sparsity=snapkv"],
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
    del run.model.offload_activations  # which a version before there was such a setting did not write
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


def test_a_run_that_was_started_with_words_of_another_name_is_resumed_with_those_of_now(tmp_path: Path):
    first = ["correction=mis", "correction.is=sequence", "++correction.rs=veto", "correction.is_mode=mask"]
    *again, _ = overrides_to_resume(made.record(tmp_path, {}, first), tmp_path)
    now = ["correction.importance=sequence", "++correction.rejection=veto"]
    assert again == [first[0], *now, first[3]]
    assert settings(*again).parts["correction"]["importance"] == "sequence"


def test_the_choices_of_every_group_are_those_of_its_folder():
    assert choices("sampler") == ["full", "infinite", "micro"]


def test_vllm_takes_no_eviction():
    said = refusal("engine=vllm", "sparsity=rkv")
    assert "sparsity=rkv cannot be had with engine=vllm" in said and "engine=torch" in said
