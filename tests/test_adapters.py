"""LoRA: adapters go through rollouts and updates, are saved by themselves, and resume bit for bit."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from families import foreign_folder
from small import VOCABULARY, make_engine, plain_batch, small_model, some_requests
from test_learner import make_learner
from tiny_hf import make_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.model.adapters import base_of, with_adapters
from grpo_cli.model.export import write_model
from grpo_cli.model.load import at_checkpoint, load_model, load_tokenizer, save_pretrained
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
LORA = made.lora(rank=4, alpha=8.0, dropout=0.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def settings(path: Path | str = "tiny", **changes: Any) -> ModelSettings:
    return replace(made.model(str(path)), **({"lora": LORA} | changes))


def moved(model: Any, seed: int = 0) -> Any:
    """The model with adapters that do something: new ones add nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=generator) * 0.1
    return model


def ids(rows: int = 2, columns: int = 12) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids()).logits


def test_only_adapters_are_trained_and_new_ones_change_nothing() -> None:
    plain = small_model()
    before = logits(plain)
    model = with_adapters(plain, settings())
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 2 * 5 and all(".lora_" in name for name in trained)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(moved(model)), before)


@pytest.mark.parametrize(("family", "kind"), [("qwen2", "plain"), ("qwen3", "rslora"), ("llama", "dora")])
def test_rollouts_go_through_the_adapters(family: str, kind: str) -> None:
    lora = replace(LORA, dora=kind == "dora", rslora=kind == "rslora")
    model = moved(with_adapters(small_model(family), settings(lora=lora))).eval()
    for rollout in make_engine(model).generate(some_requests(prompts=2, n=2)):
        start = len(rollout.request.prompt.token_ids)
        row = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            said = model(input_ids=row).logits.log_softmax(-1)[0, start - 1 : -1]
        expected = said.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.sampler_logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("packs", [False, True])
def test_the_reference_is_the_model_with_its_adapters_off(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.learner.forward.packs_rows", lambda *_: packs)
    model = moved(with_adapters(small_model(), settings()))
    learner, batch = make_learner(model), plain_batch((torch.arange(12) > 4).expand(2, 12), ids())
    below = learner.logprobs(model, batch, adapters=False)
    torch.testing.assert_close(below, make_learner(small_model()).logprobs(small_model(), batch), atol=1e-5, rtol=0)
    assert not torch.allclose(learner.logprobs(model, batch), below, atol=1e-2), "and on again afterwards"
    assert any(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("kinds", [{}, {"dora": True}, {"rslora": True}], ids=str)
def test_adapters_are_saved_by_themselves_in_float32_and_come_back_bit_for_bit(kinds: Any, tmp_path: Path) -> None:
    words = settings(dtype="bfloat16", lora=replace(LORA, **kinds))
    model = moved(load_model(words, CPU))
    save_pretrained(model, load_tokenizer(words), tmp_path)
    assert not (tmp_path / "model.safetensors").exists() and not (tmp_path / "base").exists()
    again = load_model(at_checkpoint(words, tmp_path), CPU)
    assert {weight.dtype for weight in again.parameters() if weight.requires_grad} == {torch.float32}
    assert torch.equal(logits(again), logits(model))


def test_random_weights_below_adapters_are_saved_with_them(tmp_path: Path) -> None:
    small_model().config.save_pretrained(tmp_path / "shape")
    words = settings(tmp_path / "shape", random_init=True)
    torch.manual_seed(3)
    model = moved(load_model(words, CPU))
    save_pretrained(model, load_tokenizer(settings()), tmp_path / "saved", with_base=True)
    torch.manual_seed(4)
    again = at_checkpoint(words, tmp_path / "saved")
    assert again.path == base_of(tmp_path / "saved") == str(tmp_path / "saved" / "base")
    assert torch.equal(logits(load_model(again, CPU)), logits(model))


def test_adapters_that_are_not_plain_lora_in_safetensors_are_not_read(tmp_path: Path) -> None:
    """The first has PEFT import a module; the last are pickled."""
    saved = tmp_path / "saved"
    save_pretrained(with_adapters(small_model(), settings()), load_tokenizer(settings()), saved)
    weights, config = saved / "adapter_model.safetensors", saved / "adapter_config.json"
    whole, given = json.loads(config.read_text()), settings(adapter=str(saved), lora=made.lora())
    for key, value in (("megatron_config", "x"), ("peft_type", "LOHA")):
        config.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(UserError, match="only LoRA is supported"):
            with_adapters(small_model(), given)
    config.write_text(json.dumps(whole))
    with pytest.raises(UserError, match="cannot be loaded onto Qwen2ForCausalLM"):
        with_adapters(small_model(hidden_size=16, head_dim=4), given)
    weights.rename(saved / "adapter_model.bin")
    with pytest.raises(UserError, match="lacks adapter_config.json or adapter_model.safetensors"):
        with_adapters(small_model(), given)


EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": EVERY},
    "head": {"target_modules": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens"]},
    "all dora": {"target_modules": EVERY[:-1], "use_dora": True},
    "head rslora": {"target_modules": ["lm_head"], "use_rslora": True, "bias": "lora_only"},
    "saved both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 9]},
    "bias": {"target_modules": ["q_proj"], "bias": "all", "lora_bias": False},
}


def adapted(base: Path, folder: Path, **config: Any) -> Any:
    """Adapters of PEFT's own that do something, saved in the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own doubts
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, **config))
        moved(model).save_pretrained(folder, save_embedding_layers=False)
        return model.eval()


@pytest.mark.parametrize(("kind", "tied"), [("head", False), *((kind, kind != "bias") for kind in KINDS)])
def test_a_merged_model_has_the_logits_of_its_adapters(kind: str, tied: bool, tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "llama", tie=tied, hidden=16, attention_bias=kind == "bias")
    expected = adapted(base, tmp_path / "ad", **KINDS[kind])
    words = settings(base, adapter=str(tmp_path / "ad"), lora=made.lora())
    write_model(words, tmp_path / "ad", tmp_path / "out", True, {}, lambda tokenizer: None)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), logits(expected), atol=2e-4, rtol=0)
    assert not torch.allclose(logits(found), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-2)


def test_adapters_bring_their_tokenizer_and_chat_template(tmp_path: Path) -> None:
    """Also into what is exported; without a tokenizer of theirs that of the base is taken."""
    base = make_folder(tmp_path / "base", chat_template=True)
    adapted(base, tmp_path / "ad", target_modules=["q_proj"])
    words = settings(base, adapter=str(tmp_path / "ad"), lora=made.lora())
    assert load_tokenizer(words).chat_template == load_tokenizer(settings(base)).chat_template
    (tmp_path / "ad" / "chat_template.jinja").write_text("own")
    assert load_tokenizer(words).chat_template == "own" and load_tokenizer(words).eos_token == "<|im_end|>"
    theirs = AutoTokenizer.from_pretrained(base)
    theirs.eos_token, theirs.chat_template = "<|endoftext|>", "{{ messages[0].content }}"
    theirs.save_pretrained(tmp_path / "ad")
    for merge in (False, True):
        write_model(words, tmp_path / "ad", tmp_path / f"out{merge}", merge, {}, lambda tokenizer: None)
        found = AutoTokenizer.from_pretrained(tmp_path / f"out{merge}")
        assert (found.eos_token, found.chat_template) == (theirs.eos_token, theirs.chat_template)


def test_adapters_that_a_layer_passes_by_are_not_merged(tmp_path: Path) -> None:
    """Mamba's layers compute with the weight of dt_proj, and its adapters do nothing."""
    base = foreign_folder(tmp_path / "base", "jamba")
    adapted(base, tmp_path / "ad", target_modules=["dt_proj"])
    words = settings(base, adapter=str(tmp_path / "ad"), lora=made.lora())
    with pytest.raises(UserError, match="compute other logits"):
        write_model(words, tmp_path / "ad", tmp_path / "out", True, {}, lambda tokenizer: None)
    assert not (tmp_path / "out").exists()
