"""What one pass reads in rollouts, who makes it and when, and who is given it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from small import VOCABULARY, make_engine, plain_batch, small_model, some_requests
from test_kept_sets import CUT, group_of, learner_of
from test_passes import UNEVEN, make_batch
from test_seams import said_by
from test_train import NO_EXAM, make_trainer, settings_for
from tiny_hf import FAMILIES

from grpo_cli.config.instantiate import function, rules_of
from grpo_cli.config.rehearsal import _rehearse, _try_choice
from grpo_cli.history import History
from grpo_cli.learner.batch import collate
from grpo_cli.learner.forward import make_padded
from grpo_cli.learner.readout import POOLED, READS, layer_read, read, reads_of
from grpo_cli.methods import pods
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.types import AdvantageInputs, Batch, Readout

TEMPERATURE = 0.7


def read_of(model: Any, batch: Batch, reads: Any = READS, layer: int | None = None, **train: Any) -> Readout:
    forward = make_padded(made.train(**({"micro_batch_tokens": 40, "logprob_chunk": 3} | train)), TEMPERATURE)
    return read(model, forward, batch, reads, layer)


# What is read


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_as_one_reads_it_in_the_whole_models_answer(family: str) -> None:
    """Row by row, from logits and hidden states as transformers gives them; with an environment's gap."""
    model, batch = small_model(family, num_hidden_layers=3), make_batch([*UNEVEN, (15, [14])])
    batch.response_mask[0, 9:11] = False
    found = read_of(model, batch)
    assert found.entropies is not None and found.top_ids is not None and found.top_probs is not None
    assert found.features is not None and found.features.shape == (11, 64) and found.features.dtype == torch.float32
    torch.testing.assert_close(found.logprobs, said_by(model, batch, TEMPERATURE), atol=1e-5, rtol=0)
    for row, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            said = model(input_ids=batch.input_ids[row : row + 1, :length], output_hidden_states=True)
        probs = (said.logits[0] / TEMPERATURE).softmax(-1)
        own = batch.response_mask[row].nonzero()[:, 0].tolist()
        for place in range(batch.input_ids.shape[1]):
            if place not in own:
                assert not found.entropies[row, place] and not found.top_probs[row, place].any()
                continue
            wanted = probs[place - 1]
            assert float(found.entropies[row, place]) == pytest.approx(float(-(wanted * wanted.log()).sum()), abs=1e-5)
            order = wanted.argsort(descending=True)[:2]
            assert found.top_ids[row, place].tolist() == order.tolist()
            torch.testing.assert_close(found.top_probs[row, place], wanted[order], atol=1e-5, rtol=0)
        states = said.hidden_states[2][0]  # two thirds of three layers
        start = own[0]
        ends = [list(range(start))[-POOLED:], own[-POOLED:]]
        torch.testing.assert_close(
            found.features[row], torch.cat([states[places].mean(0) for places in ends]), atol=1e-5, rtol=1e-5
        )


def test_what_nobody_reads_is_not_there() -> None:
    model, batch = small_model(), make_batch(UNEVEN)
    found = read_of(model, batch, frozenset({"entropies"}))
    assert found.features is None and found.top_ids is None and found.top_probs is None
    whole = read_of(model, batch)
    assert torch.equal(found.logprobs, whole.logprobs)
    taken = whole.take(torch.tensor([2, 0]), 9)
    assert taken.features is not None and whole.features is not None
    assert torch.equal(taken.features, whole.features[[2, 0]]) and taken.top_ids is not None
    assert taken.logprobs.shape == (2, 9) and taken.top_ids.shape == (2, 9, 2)


def test_over_kept_sets_the_log_probabilities_are_the_old_policys() -> None:
    requests = some_requests(prompts=2, n=3, tokens=12, **CUT)
    model = small_model()
    batch = collate([group_of(make_engine(model).generate(requests))], 0)
    learner = learner_of(model)
    found = learner.read(batch, frozenset({"entropies"}))
    torch.testing.assert_close(found.logprobs, learner.logprobs(model, batch), atol=1e-6, rtol=0)
    assert found.entropies is not None and found.entropies.isfinite().all()


def test_a_rollout_without_tokens_is_read_in_its_prompt() -> None:
    batch = plain_batch(torch.tensor([[0, 1, 1], [0, 0, 0]]), input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]))
    batch = replace(batch, lengths=torch.tensor([3, 2]))
    found = read_of(small_model(), batch)
    assert found.features is not None and found.features.isfinite().all()
    assert found.features[1, :32].any() and not found.features[1, 32:].any()


@pytest.mark.parametrize("layer", [0, 4, -1])
def test_there_is_no_such_layer(layer: int) -> None:
    with pytest.raises(UserError, match=rf"layer={layer} cannot be read: the model's are 1 to 3"):
        read_of(small_model(num_hidden_layers=3), make_batch(UNEVEN), layer=layer)


def test_hidden_states_that_are_not_finite_are_refused() -> None:
    model = small_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[int(make_batch(UNEVEN).input_ids[0, 0])] = torch.nan
    with pytest.raises(UserError, match="hidden states that are read are not finite"):
        read_of(model, make_batch(UNEVEN))


def test_the_hook_is_gone_afterwards_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    read_of(model, make_batch(UNEVEN))
    monkeypatch.setattr("grpo_cli.learner.readout.last_states", lambda *words, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_of(model, make_batch(UNEVEN))
    assert not any(module._forward_hooks for module in model.modules())


# Who makes it, and when


class Counted:
    """The passes without a gradient that a run makes, by the number of rows each is over."""

    def __init__(self, trainer: Any) -> None:
        self.readouts: list[int] = []
        self.others: list[int] = []
        learner = trainer._learner
        plain_read, plain_logprobs = learner.read, learner.logprobs

        def counted_read(batch: Batch, *words: Any) -> Readout:
            self.readouts.append(len(batch))
            return plain_read(batch, *words)

        def counted_logprobs(model: Any, batch: Batch) -> torch.Tensor:
            self.others.append(len(batch))
            return plain_logprobs(model, batch)

        learner.read, learner.logprobs = counted_read, counted_logprobs


def run_with(folder: Path, m: int = 4, **parts: Any) -> Counted:
    settings = replace(settings_for(folder, steps=1), eval=NO_EXAM, m=m)
    trainer = make_trainer(settings, downsample=pods.maxvar, **parts)
    counted = Counted(trainer)
    trainer.fit()
    return counted


def credit(choice: str, **changed: Any) -> Any:
    return function("credit", made.part("credit", choice, **changed))


def test_a_run_in_which_nobody_reads_makes_no_pass_for_it(tmp_path: Path) -> None:
    counted = run_with(tmp_path)
    assert (counted.readouts, counted.others) == ([], [])


@pytest.mark.parametrize(
    ("correction", "m", "readouts", "others"),
    [
        ("none", 4, [12], []),
        ("none", 2, [6], []),  # of what is trained on
        ("tis", 2, [6], []),  # which needs them as well
        ("mis", 4, [12], []),
        ("mis", 2, [12], []),  # which is asked about all
    ],
)
def test_whoever_reads_one_pass_does(
    tmp_path: Path, correction: str, m: int, readouts: list[int], others: list[int]
) -> None:
    counted = run_with(tmp_path, m, credit=credit("echo"), correction=made.correction(correction))
    assert (counted.readouts, counted.others) == (readouts, others)


def test_another_old_policy_still_makes_its_own_pass(tmp_path: Path) -> None:
    """ewma is the learner until that has moved."""
    settings = replace(settings_for(tmp_path, steps=2), eval=NO_EXAM)
    correction = made.correction("mis", prox="ewma", prox_window=4)
    trainer = make_trainer(settings, credit=credit("echo"), correction=correction)
    counted = Counted(trainer)
    trainer.fit()
    assert (counted.readouts, counted.others) == ([12, 12], [12])


# Who is given it


def test_each_group_is_given_its_own_rows_and_the_credit_those_of_the_batch(tmp_path: Path) -> None:
    inputs: list[AdvantageInputs] = []
    batches: list[tuple[Batch, Readout]] = []

    @facts(reads=("entropies", "features"))
    def advantage(kept_rewards: Any, group_rewards: Any, inputs: AdvantageInputs, into: Any = inputs) -> Any:
        into.append(inputs)
        return kept_rewards - group_rewards.mean()

    @facts(reads=("top",))
    def of_credit(batch: Batch, problems: Sequence[str], history: History, readout: Readout) -> None:
        batches.append((batch, readout))

    model = small_model()
    counted = run_with(tmp_path, 2, model=model, advantage=advantage, credit=of_credit)
    assert counted.readouts == [12] and len(inputs) == 3 and len(batches) == 1
    first = small_model()
    for given in inputs:
        alone = collate([given.group], 0)
        assert given.readout is not None and given.readout.features is not None
        wanted = learner_of(first).read(alone, READS)
        assert wanted.features is not None and len(given.readout.logprobs) == 4
        torch.testing.assert_close(given.readout.features, wanted.features, atol=1e-5, rtol=1e-5)
        width = wanted.logprobs.shape[1]
        torch.testing.assert_close(given.readout.logprobs[:, :width], wanted.logprobs, atol=1e-5, rtol=0)
    (batch, readout), *_ = batches
    assert len(batch) == 6 and readout.top_ids is not None and readout.top_ids.shape == (*batch.input_ids.shape, 2)
    wanted = learner_of(first).read(batch, READS)
    torch.testing.assert_close(readout.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
    assert wanted.features is not None and readout.features is not None
    torch.testing.assert_close(readout.features, wanted.features, atol=1e-5, rtol=1e-5)
    assert int(readout.top_ids.max()) < VOCABULARY


# What a rule of one's own may say


def rehearse(**rules: Any) -> None:
    plain = rules_of(made.settings().parts)
    changed = replace(plain, **rules)
    _rehearse(changed, *_try_choice(changed, 4, 4))


def test_a_credit_that_takes_a_readout_says_what_it_reads() -> None:
    def silent(batch: Batch, problems: Sequence[str], history: History, readout: Readout) -> None: ...

    with pytest.raises(UserError, match="credit: its parameter readout would be None"):
        rehearse(credit=silent)
    rehearse(credit=facts(reads=("entropies",))(silent))
    with pytest.raises(UserError, match="reads: entropy is not in a readout, which has entropies, features, top"):
        rehearse(credit=facts(reads=("entropy",))(silent))


def test_two_layers_cannot_be_read_in_one_pass() -> None:
    class Reading:
        reads = ("features",)

        def __init__(self, layer: int | None) -> None:
            self.layer = layer

        def __call__(self, *words: Any) -> Any: ...

    plain = rules_of(made.settings().parts)
    reading: Any = Reading
    assert layer_read(plain) is None and reads_of(plain.credit) == frozenset()
    assert layer_read(replace(plain, advantage=reading(3))) == 3
    assert layer_read(replace(plain, advantage=reading(3), credit=reading(3))) == 3
    with pytest.raises(UserError, match="two layers, and one pass reads one"):
        layer_read(replace(plain, advantage=reading(3), credit=reading(None)))
