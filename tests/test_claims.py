"""README.md and scripts/README.md say what the JSON says, and no figure that nothing generated."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import claims
import pytest

# scripts/README.md names the last commit that has them.
GONE = [f"scripts/bench/{name}.py" for name in ("checkpoints", "judge", "overhead", "ray_engine", "served", "soak")]
GONE += ["scripts/bench/gym.py", "scripts/bench/turns.py", "scripts/bench/update.py"]
TEXTS = claims.texts_of(claims.RECORDS)
GUARDED = pytest.mark.parametrize("page", claims.GUARDED, ids=["front", "scripts"])


@pytest.mark.parametrize("page", claims.pages(), ids=lambda page: str(page.relative_to(claims.ROOT)))
def test_a_page_says_what_the_records_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert claims.rewritten(text, TEXTS) == text, "python scripts/claims.py --write"


@GUARDED
def test_no_figure_stands_outside_generated_text(page: Path) -> None:
    assert claims.unbacked(page.read_text(encoding="utf-8")) == []


@GUARDED
@pytest.mark.parametrize(
    "sentence",
    [
        "It is 2.3x as fast.",
        "It learns twice as fast as before.",
        "- It saves 40 % of the memory.",
        "| a table of its own | 0.93 |",
        "It takes three times as long, and a third of the steps.",
    ],
)
def test_a_sentence_that_nothing_generated_is_found(page: Path, sentence: str) -> None:
    heading = "\n## Limits\n" if page.parent == claims.ROOT else "\n## Training\n"
    before, after = page.read_text(encoding="utf-8").split(heading)
    assert claims.unbacked(f"{before}{heading}\n{sentence}\n{after}") != []


def test_settings_names_and_code_are_no_figures() -> None:
    text = "Give `n=64`, or Python 3.11 and TRL 1.16 ([arXiv 2506.22950](https://arxiv.org/abs/2506.22950)):\n\n"
    assert claims.unbacked(f"{text}    grpo train n=64\n\n```\n2.3x\n```\n") == []
    assert claims.unbacked(f"{text}\nand 64 at a time") == ["and 64 at a time"]


def test_every_text_that_is_made_stands_on_a_page() -> None:
    used = {found["name"] for page in claims.pages() for found in claims.GENERATED.finditer(page.read_text())}
    assert used == TEXTS.keys()


def test_every_record_is_there_and_every_claim_says_of_what_it_is_a_sample() -> None:
    for found in claims.claims_of(claims.RECORDS).values():
        for claim in found:
            assert claim.figure and claim.of and claim.files
            scripts = re.findall(r"scripts/\S+\.(?:py|sh)", claim.command)
            assert scripts or claim.command.startswith("grpo train")
            assert all((claims.ROOT / script).is_file() or script in GONE for script in scripts)
            assert all(claims.RECORDS.path(name).is_file() for name in claim.files.split())


@pytest.mark.parametrize(
    ("record", "change", "page"),
    [
        ("frontier_a", lambda r: r["results"]["target"]["1"].update(final_accuracy=0.9), "scripts/README.md"),
        (
            "bench_time_to_accuracy",
            lambda r: r["runs"]["recipe, 2e-05, seed 0"]["curve"][-1].__setitem__(0, 9.0),
            "README.md",
        ),
        ("frontier_b", lambda r: r["results"]["cost"]["full"]["surplus 1"].update(of_equal=0.5), "README.md"),
        ("soak", lambda r: r["results"]["to step 10000"].update(yardsticks=99.0), "scripts/README.md"),
    ],
)
def test_a_record_that_changes_is_seen_in_the_text(
    record: str, change: Callable[[Any], None], page: str, tmp_path: Path
) -> None:
    shutil.copytree(claims.RECORDS.folder, tmp_path / "baselines")
    records = claims.Records(tmp_path / "baselines", claims.RECORDS.others)
    value = records[record]
    change(value)
    records.path(record).write_text(json.dumps(value))
    texts = claims.texts_of(records)
    text = (claims.ROOT / page).read_text(encoding="utf-8")
    assert claims.rewritten(text, texts) != text


def test_what_claims_call_the_best_is_the_best() -> None:
    """Words of a claim that are no number, and so are not generated."""
    ways, replay = claims.RECORDS["frontier_a"]["results"], claims.RECORDS["frontier_b"]["results"]["replay"]
    assert max(ways, key=lambda arm: sum(claims.values(ways[arm], "final_accuracy"))) == "target"
    arms = replay.keys() - {"epochs"}
    assert len(arms) == 5
    assert max(arms, key=lambda arm: sum(claims.values(replay[arm], "final_accuracy"))) == "fifo less ess"
    assert claims.RECORDS["frontier_a"]["settings"]["arms"] == list(ways)


def runs(*values: float) -> dict[str, dict[str, float]]:
    return {str(seed): {"x": value} for seed, value in enumerate(values)}


def test_an_interval_is_students_of_the_mean() -> None:
    # Deviations 0.1 and 0.1 * sqrt(2): 4.3027 * 0.1 / sqrt(3) and 12.7062 * 0.1.
    assert claims.interval([0.4, 0.5, 0.6]) == "0.500 ± 0.248"
    assert claims.interval([0.4, 0.6]) == "0.500 ± 1.271"
    assert claims.interval([0.4]) == "0.400"


def test_arms_are_compared_seed_by_seed() -> None:
    base = runs(0.1, 0.5, 0.9)
    assert claims.difference(runs(0.2, 0.6, 1.0), base, "x") == "+0.100 ± 0.000"  # though their spread is 0.4
    assert claims.difference(runs(0.2, 0.4, 0.9), base, "x") == "+0.000 ± 0.248, no difference seen"
    assert claims.difference(runs(0.2), base, "x") == "+0.100 (1 seed, no interval)"


def test_ten_steps_are_averaged_over_the_seeds_that_have_them() -> None:
    found = {"1": {"series": {"x": [None, 1.0, 2.0]}}, "2": {"series": {"x": [4.0, 3.0]}}}
    assert claims.by_tens(found, "x") == [4.0, 2.0, 2.0]


def test_a_ratio_whose_interval_holds_one_is_no_difference() -> None:
    assert claims.times([2.0, 2.1, 2.2]) == "2.10 ± 0.25"
    assert claims.times([0.9, 1.0, 1.2]) == "1.03 ± 0.38, no difference seen"
    assert claims.times([1.97, 1.62]).endswith("no difference seen")
    assert claims.sooner({"ratios": [], "never": 2}) == "never"
    assert claims.sooner({"ratios": [2.34], "never": 1}) == "2.34; 1 of 2 never"


def test_what_is_said_of_seeds_and_rounds_holds_of_all_of_them() -> None:
    assert claims.spread([1.44, 2.75, 1.36]) == "1.44 (1.36 to 2.75)"
    assert [claims.in_every_seed(of).split()[0] for of in ([0.66, 0.70], [1.18, 1.15])] == ["earlier", "later"]
    assert "some" in claims.in_every_seed([0.9, 1.2])
