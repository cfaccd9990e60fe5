"""What the record says of training is what the loss was given: of each rollout, and in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import plain_batch, scored, small_model
from test_seams import Spy, quiet
from test_train import SPARSE_RL, CountTask, Recorder, make_trainer, settings_for, with_sampler_off_by

from grpo_cli.methods import pods
from grpo_cli.select import NO_TOKEN, NOT_CHOSEN, Selection, settled
from grpo_cli.settings import RecordSettings
from grpo_cli.types import Prompt, Record, Reward, Rollout

WITHOUT = made.correction("none")
MASKED = made.correction("mis", importance="sequence")  # one token has a xi of exp(-20)


class SecondIsWorst(CountTask):
    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(0.0 if rollout.request.sample == 1 else 1.0 + rollout.request.sample)


def ran(folder: Path, m: int = 4, train: Mapping[str, Any] | None = None, **parts: Any) -> tuple[Record, Spy]:
    """One step of three problems with four rollouts each; of samples 1 the sampler is off by 20 in a token."""
    recorder, spy, model = Recorder(), Spy(), small_model()
    engine = with_sampler_off_by(model, lambda rollout: 20.0 if rollout.request.sample == 1 else 0.0)
    settings = replace(
        settings_for(folder, steps=1, **(train or {})),
        record=RecordSettings(rollouts=-1, tokens=False),
    )
    parts = dict(engine=engine, task=SecondIsWorst(), trackers=(recorder,), loss=spy) | parts
    trainer = make_trainer(quiet(settings, m=m), model=model, **parts)
    trainer._learner.updates = 10
    trainer.fit()
    return recorder.records[1], spy


def counted(record: Record, spy: Spy, epochs: int = 1) -> tuple[float, float]:
    """Rollouts and tokens as the record has them: those that were given to the loss with a weight, once each."""
    cells = [(batch, batch.trained_mask) for batch in spy.batches]
    rows, tokens = sum(int(b.any(c).sum()) for b, c in cells), sum(int(c.sum()) for _, c in cells)
    found = record.metrics["rollouts/trained"], record.metrics["tokens/trained"]
    assert found == (rows / epochs, tokens / epochs)
    return found


@pytest.mark.parametrize("train", [{}, {"epochs": 2, "minibatches": 2}], ids=["once", "twice"])
def test_a_rollout_without_a_weight_is_not_kept_and_counts_nowhere(tmp_path: Path, train: dict[str, int]) -> None:
    record, spy = ran(tmp_path, train=train, correction=MASKED)
    lengths = [row.length for row in record.examples if row.sample != 1]
    assert counted(record, spy, train.get("epochs", 1)) == (9, sum(lengths))
    assert [row.sample for row in record.examples if not row.kept] == [1, 1, 1]
    assert all(row.reason.startswith("importance: ") == (row.sample == 1) for row in record.examples)
    assert record.metrics["reward/kept_mean"] == pytest.approx((1 + 3 + 4) / 3), "nor in the mean reward"


@pytest.mark.parametrize("m", [4, 2])
def test_a_vetoed_rollout_counts_nowhere(tmp_path: Path, m: int) -> None:
    """With m = n it is in the batch, for the divisors."""
    record, spy = ran(tmp_path, m=m, correction=SPARSE_RL, downsample=pods.maxvar)
    trained = [row for row in record.examples if row.kept]
    assert counted(record, spy) == (3 * min(m, 3), sum(row.length for row in trained))
    assert len(spy.batches[0]) == 3 * m and not any(row.sample == 1 for row in trained)
    reasons = {row.reason.partition(":")[0] for row in record.examples}
    assert reasons == {"kept", "veto"} | ({NOT_CHOSEN} if m < 4 else set())


def test_a_rollout_whose_advantage_is_0_is_trained_on(tmp_path: Path) -> None:
    record, _ = ran(tmp_path, correction=WITHOUT, advantage=lambda group, kept: torch.zeros(len(kept)))
    assert all(row.kept and row.advantage == 0.0 for row in record.examples)
    assert record.metrics["tokens/trained"] == sum(row.length for row in record.examples)


cells = st.lists(st.booleans(), min_size=3, max_size=3)


@given(st.lists(st.tuples(cells, cells, st.booleans(), st.sampled_from(["", "veto", "gate"])), min_size=1, max_size=6))
def test_a_rollout_has_a_reason_if_and_only_if_no_token_of_it_is_in_the_loss(rows: Any) -> None:
    """Rows of a batch: the loss mask, weights that are not 0, whether it was chosen, and what a correction said."""
    chosen = tuple(i for i, row in enumerate(rows) if row[2])
    selection = Selection(
        scored(*[0.0] * len(rows)),
        chosen,
        torch.zeros(len(chosen)),
        tuple("" if row[2] else NOT_CHOSEN for row in rows),
    )
    mask, weights = (torch.tensor([rows[i][kind] for i in chosen]).reshape(-1, 3) for kind in (0, 1))
    some = plain_batch(torch.ones(mask.shape), loss_mask=mask.bool(), weights=weights.float())
    (after,) = settled([selection], some, [rows[i][3] for i in chosen])
    for (in_mask, weighted, is_in, said), why in zip(rows, after.reasons, strict=True):
        trains = is_in and bool(np.logical_and(in_mask, weighted).any())
        assert (why == "") == trains
        if is_in and not trains:
            assert why.startswith(said or NO_TOKEN)
    assert after.indices == selection.indices and [r.request.sample for r in after.trained.rollouts] == [
        i for i, why in enumerate(after.reasons) if not why
    ]
