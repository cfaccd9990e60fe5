"""`engine=generate`: models of families that nothing else here knows, by transformers' own `generate`."""

from __future__ import annotations

import functools
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import small
import torch
from families import CONFIGS, foreign_folder, foreign_model
from made import micro
from safetensors.torch import load_file
from small import contents, engine_of, make_engine, small_model, some_requests
from talk import Talk
from test_turns import played, said
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from typed import json_lines

from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import build_and_check
from grpo_cli.engine.transformers_engine import GenerateEngine
from grpo_cli.experiment import build
from grpo_cli.learner.learner import Learner
from grpo_cli.model import packed
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import Meter
from grpo_cli.types import Finish, Request

FAMILIES = [family for family in CONFIGS if family != "bert"]


def generating(model: Any, said: list[str] | None = None, **parts: Any) -> GenerateEngine:
    engine: GenerateEngine = engine_of("generate", model, warn=[].append if said is None else said.append, **parts)
    return engine


def same(found: Any, expected: Any) -> bool:
    """Tokens and ends are equal, log-probabilities to rounding."""
    one, other = contents(found), contents(expected)
    assert {name: said[::2] for name, said in one.items()} == {name: said[::2] for name, said in other.items()}
    return all(said[1] == pytest.approx(other[name][1], abs=1e-5) for name, said in one.items())


SHORT = {"sliding_window": 8}
SERVED = [
    *((family, {}) for family in (*FAMILIES, "llama")),
    ("mistral", SHORT),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1} | SHORT),
]


@pytest.mark.parametrize(("family", "config"), SERVED, ids=str)
def test_sampler_and_learner_are_the_model(family: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts of several lengths, longer than a sliding window, and whatever the model's own generation config would
    do to its logits; with the attention that a GPU has in float32 too."""
    model = foreign_model(family) if family in CONFIGS else small_model(family, **config)
    suppressed = [*range(5, 60)]
    model.generation_config = GenerationConfig(repetition_penalty=3.0, suppress_tokens=suppressed, do_sample=True)
    settings, train = made.model(autocast="none"), made.train(micro_batch_tokens=100)
    untouched, plain = deepcopy(model), (settings, Sampling.plain(3), train, made.optim(), Meter(), pytest.fail)
    learner, requests = Learner(model, made.loss(), *plain), some_requests(3, 2, tokens=12)
    saved = set()  # what a thread may be saving meanwhile
    see = lambda *_: saved.add((model.generation_config.repetition_penalty, type(model.base_model)))  # noqa: E731
    model.get_output_embeddings().register_forward_hook(see)
    for each_head_alone, sampler in ((False, made.full()), (True, micro(slots=1))):
        monkeypatch.setattr(packed, "_wants_a_head_each", lambda query, answer=each_head_alone: answer)
        packed.allow_packing(model) if family not in CONFIGS else None
        rollouts = list(generating(model, sampler=sampler).generate(requests))
        assert any(set(one.token_ids) & set(suppressed) for one in rollouts)
        expected = [small.policy_logprobs(untouched, one) for one in rollouts]
        for one, logprobs in zip(rollouts, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.sampler_logprobs), logprobs, rtol=0, atol=1e-5)
        rows = [torch.tensor([*one.request.prompt.token_ids, *one.token_ids]) for one in rollouts]
        ids, at = pad_sequence(rows, batch_first=True), torch.arange(max(map(len, rows)))
        ends, replies = (torch.tensor([*map(len, of)])[:, None] for of in (rows, rollouts))
        batch = small.plain_batch((at >= ends - replies) & (at < ends), input_ids=ids)
        torch.testing.assert_close(learner.logprobs(model, batch), torch.cat(expected), rtol=0, atol=1e-5)
    assert saved == {(3.0, type(untouched.base_model))}


def letters(ids: Any) -> str:
    return "".join(chr(97 + one) for one in ids)


@pytest.mark.parametrize("words", [{"top_p": 0.7, "top_k": 9}, {"temperature": 0.7}, {"stop": ("f", "kk")}])
def test_a_model_that_torch_serves_says_the_same_by_both(words: dict[str, Any]) -> None:
    model, requests = small_model(), some_requests(3, 4, **words)
    found = list(generating(model, decode=letters).generate(requests))
    assert same(found, make_engine(model, decode=letters).generate(requests))
    assert "stop" not in words or Finish.STOP in {one.finish for one in found}


def test_a_cache_is_counted_as_large_as_it_is_and_slowness_is_said_once() -> None:
    """Two layers of 2 heads of 8 numbers, keys and values, of every position but the last drawn."""
    model, (request, *_), lines = small_model(), some_requests(1, 1, tokens=10), list[str]()
    engine = generating(model, lines, eos_token_ids=(-1,))
    for _ in range(2):
        list(engine.generate([request]))
    assert engine.stats().kv_peak_bytes == 2 * 2 * 2 * 8 * 4 * (len(request.prompt.token_ids) + 9)
    assert len(lines) == 1 and "slow" in lines[0]


def test_what_is_stopped_goes_on_where_it_was() -> None:
    model, requests = foreign_model("phi"), some_requests(2, 4)
    words = [replace(one.sampling, max_new_tokens=3 * place + 4) for place, one in enumerate(requests)]
    requests = [replace(one, sampling=word) for one, word in zip(requests, words, strict=True)]
    found = small.finished_in_rounds(generating(model, sampler=micro(slots=5)), requests)
    assert same(found, generating(model).generate(requests))


def test_a_long_prompt_and_a_long_reply_are_made_apart_if_the_context_does_not_hold_both_at_once() -> None:
    model, requests = foreign_model("gpt2"), some_requests(2, 1)
    long, short = (replace(one.prompt, token_ids=(3,) * count) for one, count in zip(requests, (250, 2), strict=True))
    requests = [Request(long, 0, 1, Sampling.plain(6)), Request(short, 0, 2, Sampling.plain(250))]
    engine = generating(model, eos_token_ids=(-1,))
    alone = [rollout for one in requests for rollout in engine.generate([one])]
    assert same(engine.generate(requests), alone)


def test_episodes_have_the_turns_that_they_have_elsewhere() -> None:
    model = small_model()
    assert said(played(generating(model), Talk())) == said(played(make_engine(model), Talk()))


def doubled(own: Any, self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
    found = own(self, input_ids=input_ids, **kwargs)
    found.logits = found.logits * (2.0 if input_ids.shape[1] else 1.0)
    return found


def at_the_start(own: Any, self: Any, input_ids: Any, **kwargs: Any) -> Any:
    return own(self, input_ids, **kwargs) | {"position_ids": torch.zeros_like(input_ids[:, -1:])}


@pytest.mark.parametrize(
    ("method", "other", "said"),
    [
        ("forward", doubled, "updates would be of another model"),  # which is more than its halves
        ("prepare_inputs_for_generation", at_the_start, "another distribution"),  # whose cache forgets
    ],
)
def test_a_model_that_is_not_served_rightly_is_refused(
    method: str, other: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="BertLMHeadModel is not a causal model"):
        generating(foreign_model("bert"))
    model = foreign_model("phi")
    own = getattr(type(model), method)
    patched = functools.wraps(own)(lambda self, *given, **words: other(own, self, *given, **words))
    monkeypatch.setattr(type(model), method, patched)
    with pytest.raises(UserError, match=said):
        generating(model)


def test_what_it_cannot_do_is_refused_before_a_model_is_read() -> None:
    words = ["sampler=infinite", "sparsity=snapkv", "correction=sparse_rl", "scheduler=lpt"]
    with pytest.raises(UserError) as refused:
        build_and_check(settings_of("engine=generate", "logger=jsonl", "run_dir=x", *words))
    assert all(word in str(refused.value) for word in ("sampler=infinite", "sparsity=snapkv", "predictor=mean"))


def run_of(folder: Path, model: Path, *words: str) -> Any:
    short = ("n=4", "m=2", "train.prompts=3", "train.steps=2", "sampling.max_new_tokens=8")
    short += ("eval.problems=4", "eval.k=1")
    rows = folder.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"question": f"{i} " * (1 + i % 3), "answer": "x"}) + "\n" for i in range(20)))
    short += ("task=jsonl", f"task.path={rows}", "task.reward=families:letters", "model.autocast=none", "seed=1")
    common = ("model=hf", f"model.path={model}", "engine=generate", "logger=jsonl", "optim.lr=1e-3", *short)
    return build(settings_of(*common, f"run_dir={folder}", "train.checkpoint_every=1", *words))


def test_another_engine_names_the_way_out_and_what_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    folder = foreign_folder(tmp_path / "model", "opt")
    with pytest.raises(UserError, match="engine=generate"):
        run_of(tmp_path / "run", folder, "engine=torch")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5", "architectures": ["T5Model"]}))
    with pytest.raises(UserError, match="T5Model"):
        run_of(tmp_path / "run", folder)


RUNS = [
    ("jamba", ("correction=tis", "loss.kl_coef=0.04", "model.gradient_checkpointing=full")),
    ("gemma2", ("collector=partial", "correction=tis", "sampler=micro", "sampler.slots=5")),
]


@pytest.mark.parametrize(("family", "words"), small.some_and_the_rest(RUNS, RUNS[:1]))
def test_a_resumed_run_equals_one_left_alone(family: str, words: tuple[str, ...], tmp_path: Path) -> None:
    folder = foreign_folder(tmp_path / "model", family)
    run_of(tmp_path / "alone", folder, *words).fit()
    run_of(tmp_path / "cut", folder, *words, "train.steps=1").fit()
    summary = run_of(tmp_path / "cut", folder, *words, f"resume={tmp_path / 'cut'}").fit()
    assert summary["updates"] >= 2 and summary["engine"]["invariant"] is False
    first, alone, again = (
        load_file(tmp_path / run / "checkpoints" / step / "model.safetensors")
        for run, step in (("alone", "step_000001"), ("alone", "step_000002"), ("cut", "step_000002"))
    )
    assert all(torch.equal(alone[key], again[key]) for key in alone) and alone.keys() == again.keys()
    assert not all(torch.equal(alone[key], first[key]) for key in alone), "it learns"
    rows = json_lines(tmp_path / "alone" / "metrics.jsonl")
    ratios = [value for row in rows for name, value in row.items() if name.endswith("/ratio_min")]
    assert ratios[0] == pytest.approx(1.0, abs=1e-4), "the sampler is the policy"
