"""Choices of which one undoes what another was asked for: refused, or warned of when a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small import some_and_the_rest

from grpo_cli.config import together
from grpo_cli.config.check import check
from grpo_cli.config.choices import choice_of, choices, shipped
from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import rules_of
from grpo_cli.experiment import build
from grpo_cli.interfaces import StepRollouts, facts
from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup


def every_second(step: StepRollouts) -> list[ScoredGroup]:
    """A collector of one's own, whose groups have n rollouts each."""
    return step.score(step.generate((prompt, step.n) for prompt in step.pick(2 * step.prompts)[::2]))


@facts(unequal=True)
def one_more(step: StepRollouts) -> list[ScoredGroup]:
    """One of one's own that gives the first problem a rollout more."""
    first, *others = step.pick(step.prompts)
    return step.score(step.generate([(first, step.n + 1), *((prompt, step.n) for prompt in others)]))


OWN = {name: [f"collector._target_=test_together.{name}"] for name in ("every_second", "one_more")}
UNEQUAL = {
    "dars": ["collector=dars", "advantage=dr_grpo"],
    "mixed": ["collector=mixed"],
    "sqrt": ["collector=sqrt"],
    "ci": ["collector=ci"],
    "one_more": OWN["one_more"],
}
EQUAL = {"equal": [], "partial": ["collector=partial"], "every_second": OWN["every_second"]}


def remarks(*words: str, resume: str | None = None) -> list[str]:
    settings = replace(settings_of(*words), resume=resume)
    return [*together.remarks(settings, rules_of(settings.parts))]


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as refused:
        check(settings_of(*words))
    return str(refused.value)


@pytest.mark.parametrize("words", UNEQUAL.values(), ids=UNEQUAL)
def test_rollouts_that_a_collector_adds_and_m_takes_away_are_warned_of(words: list[str]) -> None:
    check(settings_of(*words, "n=8", "m=4"))
    (said,) = remarks(*words, "n=8", "m=4")
    assert "m=4" in said and "m=8" in said and "collector=equal" in said
    assert remarks(*words, "n=8", "m=8") == []


@pytest.mark.parametrize("words", EQUAL.values(), ids=EQUAL)
def test_fewer_of_equal_groups_are_what_was_asked_for(words: list[str]) -> None:
    assert remarks(*words, "n=8", "m=4") == []


@pytest.mark.parametrize("words", EQUAL.values(), ids=EQUAL)
@pytest.mark.parametrize("rule", ["advantage=median", "advantage=median_release"])
def test_a_median_goes_with_any_collector_whose_groups_have_n_rollouts(words: list[str], rule: str) -> None:
    check(settings_of(*words, rule, "downsample=median", "n=9", "m=8"))


@pytest.mark.parametrize("words", UNEQUAL.values(), ids=UNEQUAL)
def test_and_with_no_other(words: list[str]) -> None:
    others = [word for word in words if not word.startswith("advantage")]
    said = refusal(*others, "advantage=median_release", "n=9")
    assert "advantage=median_release" in said and "collector=equal" in said


CORRECTED = [
    *(f"correction={choice}" for choice in choices("correction") if choice != "none"),
    *("correction.importance=token", "correction.importance=sequence", "correction.rejection=veto"),
    *("correction.mask_low=0.5", "correction.mask_high=2.0"),
]


@pytest.mark.parametrize("word", some_and_the_rest(CORRECTED, ["correction=tis", "correction.rejection=veto"]))
def test_a_correction_that_sees_no_ratio_but_1_is_refused_and_a_run_that_began_so_goes_on(word: str) -> None:
    check(settings_of(word))
    said = refusal(word, "correction.prox=drawn")
    assert "correction.prox=now" in said and "correction=none correction.prox=drawn" in said
    check(replace(settings_of(word, "correction.prox=drawn"), resume="here"))
    assert remarks(word, "correction.prox=drawn", resume="here") == [said]
    assert remarks("correction.prox=drawn", resume="here") == [], "of no correction"


KEPT = ["advantage=median", "advantage.stats_over=kept"]


@pytest.mark.parametrize("words", [["m=4"], ["m=8", "downsample=median"]], ids=" ".join)
def test_an_even_number_of_kept_rollouts_has_no_median_of_its_own(words: list[str]) -> None:
    said = refusal(*KEPT, "n=9", *words)
    assert words[0] in said and "advantage.stats_over=group" in said
    check(replace(settings_of(*KEPT, "n=9", *words), resume="here"))
    assert remarks(*KEPT, "n=9", *words, resume="here") == [said]
    check(settings_of("advantage=median", "n=9", *words)), "of the whole group there is one"
    assert "take n=9" in refusal(*KEPT, "n=8")
    check(settings_of(*KEPT, "n=8", "m=5")), "an odd number has one"


def test_a_choice_is_known_by_its_settings_where_several_are_of_one_function() -> None:
    groups = ("advantage", "correction", "loss", "collector")
    assert [(g, c) for g in groups for c in choices(g) if choice_of(g, shipped(g, c)) != c] == []
    assert choice_of("correction", shipped("correction", "mis") | {"is_threshold": 4.0}) == "mis"
    assert choice_of("correction", {"_target_": "mine.one"}) == "mine.one"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[list[str]]:
    words = ["logger=jsonl", "n=4", "train.prompts=2", "train.steps=1", "eval.every=0", "sampling.max_new_tokens=12"]
    yield [*words, f"run_dir={tmp_path / 'run'}"]


def test_a_run_says_so_when_it_starts(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    build(settings_of(*small, "collector=mixed", "m=2"))
    assert "warning: collector=mixed" in capsys.readouterr().out


def test_a_run_is_resumed_with_what_is_refused_of_a_new_one(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(settings_of(*small, "correction=decoupled")).fit()
    words = ["correction=decoupled", "correction.prox=drawn", "train.steps=2"]
    settings = replace(settings_of(*small, *words), resume=str(tmp_path / "run"))
    check(settings)
    assert build(settings).fit()["step"] == 2
    assert "warning: correction=decoupled" in capsys.readouterr().out
