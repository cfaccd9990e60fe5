"""Loading and saving Hugging Face folders, and the shipped tiny model itself."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from families import foreign_folder
from small import VOCABULARY, make_engine, moved, plain_batch, policy_logprobs, small_model, some_requests
from test_learner import make_learner
from tiny_hf import make_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.model import load
from grpo_cli.model.adapters import with_adapters
from grpo_cli.model.checks import check_vocabulary
from grpo_cli.model.export import write_model
from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer, pad_token_id, save_pretrained
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError

CPU = torch.device("cpu")
TINY_FOLDER = Path(str(files("grpo_cli.model") / "tiny"))


def settings(path: Path | str = "tiny", **changes: object) -> ModelSettings:
    return replace(made.model(str(path)), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load_model(settings(), CPU), load_tokenizer(settings())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_supported_family_loads_from_its_folder_with_the_same_weights_and_no_dropout(family, tmp_path):
    saved, ids = small_model(family, attention_dropout=0.5), torch.arange(2, 12)[None]
    saved.save_pretrained(tmp_path)
    loaded = load_model(settings(tmp_path), CPU)
    with torch.no_grad():
        assert torch.equal(loaded.train()(input_ids=ids).logits, saved(input_ids=ids).logits)


def test_weights_that_are_not_finite_and_a_tokenizer_with_too_many_tokens_are_refused(tiny, tmp_path):
    """An evaluation of such weights gave an accuracy of 0."""
    broken = small_model("qwen3")
    broken.get_parameter("model.layers.1.mlp.up_proj.weight").data[4, 2:5] = -torch.inf
    broken.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"model.path={tmp_path}: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(settings(tmp_path), CPU)
    check_vocabulary(*tiny, "tiny")
    with pytest.raises(UserError, match=r"model\.path=x: token ids up to \d\d+, but only 24 embeddings"):
        check_vocabulary(small_model("llama"), tiny[1], "x")


def test_dtype_and_random_init_are_obeyed_and_weights_are_drawn_where_they_will_be(tmp_path):
    """Billions of numbers of a GPU's model were drawn one by one on the CPU, and moved."""
    small_model("qwen2").config.save_pretrained(tmp_path)  # a config alone, without weights
    words, before = settings(tmp_path, random_init=True, dtype="bfloat16"), torch.get_rng_state()
    assert {weight.device.type for weight in load_model(words, torch.device("meta")).parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)
    first, second = load_model(words, CPU), load_model(words, CPU)
    assert {weight.dtype for weight in first.parameters()} == {torch.bfloat16}
    assert not torch.equal(first.get_input_embeddings().weight, second.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("tokenizer.json", text) for text in ("{", "null", '{"model": {"type": "BPE"}}')),
        *(("config.json", text) for text in ("[]", '{"model_type": "qwen2", "hidden_size": "x"}')),
        *(("model.safetensors", text) for text in ("half", None)),
    ],
)
def test_a_broken_file_is_named_whatever_is_broken(file, content, tmp_path):
    """Pickled weights beside it are never read."""
    folder = Path(shutil.copytree(TINY_FOLDER, tmp_path / "model"))
    torch.save({}, folder / "pytorch_model.bin")
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    what = {"tokenizer.json": "tokenizer", "model.safetensors": "safetensors weights"}.get(file, file)
    with pytest.raises(UserError, match=f"model folder {folder}: its {what} cannot be read"):
        load_tokenizer(settings(folder)) if what == "tokenizer" else load_model(settings(folder), CPU)


LONGROPE = dict(rope_type="longrope", rope_theta=1e4, factor=2.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"model_type": "brand_new"}, "brand_new"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding window of 16 tokens"),
        # Beyond 32 of 64 positions the policy rotates all keys by the long factors, and the cache holds short ones.
        ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32}}, "longrope"),
    ],
)
def test_what_cannot_be_driven_is_refused_from_the_config_alone(config, said, tmp_path):
    """No weights are there: reaching for them would be another error."""
    whole = small_model("llama", head_dim=16, max_position_embeddings=64).config.to_dict() | config
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=said):
        load_model(settings(tmp_path), CPU)


def test_weights_that_lack_a_layer_are_refused_instead_of_made_up(tmp_path):
    model = small_model("qwen2")
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UserError, match=r"lacks 12 weights .* model.layers.1"):
        load_model(settings(tmp_path), CPU)


def test_weights_that_are_stored_quantised_are_refused(tmp_path):
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key, stored in (("quantization_config", {"quant_method": "gptq"}), ("quantization", {"bits": 4})):
        (folder / "config.json").write_text(json.dumps(config | {key: stored}))
        with pytest.raises(UserError, match="stored quantised"):
            load.model_config(settings(folder))


def test_all_ends_of_a_reply_are_found_and_padding_falls_back_to_the_end():
    tokenizer, model = load_tokenizer(settings()), small_model("llama")
    own = tokenizer.eos_token_id
    for listed, ends in (([7, 9, 7], (7, 9, own)), (None, (own,))):
        model.generation_config.eos_token_id = listed
        assert eos_token_ids(model, tokenizer) == ends
    assert pad_token_id(tokenizer, (5,)) == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token = None
    assert pad_token_id(tokenizer, (5,)) == 5
    with pytest.raises(UserError, match="no end-of-sequence token"):
        eos_token_ids(model, tokenizer)


# Adapters


LORA = made.lora(rank=4, alpha=8.0, dropout=0.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def ids(rows: int = 2, columns: int = 12) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids()).logits


@pytest.mark.parametrize(("family", "kind"), [("qwen2", "plain"), ("qwen3", "rslora"), ("llama", "dora")])
def test_rollouts_go_through_the_adapters(family, kind):
    lora = replace(LORA, dora=kind == "dora", rslora=kind == "rslora")
    model = moved(with_adapters(small_model(family), settings(lora=lora))).eval()
    for rollout in make_engine(model).generate(some_requests(prompts=2, n=2)):
        found = torch.tensor(rollout.sampler_logprobs)
        torch.testing.assert_close(found, policy_logprobs(model, rollout), atol=2e-5, rtol=0)


@pytest.mark.parametrize("packs", [False, True])
def test_the_reference_is_the_model_with_its_adapters_off(packs, monkeypatch):
    monkeypatch.setattr("grpo_cli.learner.forward.packs_rows", lambda *_: packs)
    model = moved(with_adapters(small_model(), settings(lora=LORA)))
    learner, batch = make_learner(model), plain_batch((torch.arange(12) > 4).expand(2, 12), ids())
    below = learner.logprobs(model, batch, with_adapters=False)
    torch.testing.assert_close(below, make_learner(small_model()).logprobs(small_model(), batch), atol=1e-5, rtol=0)
    assert not torch.allclose(learner.logprobs(model, batch), below, atol=1e-2), "and on again afterwards"
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 2 * 5 and all(".lora_" in name for name in trained)


@pytest.mark.parametrize("kinds", [{}, {"dora": True}, {"rslora": True}], ids=str)
def test_adapters_are_saved_by_themselves_in_float32_and_come_back_bit_for_bit(kinds, tmp_path):
    words = settings(dtype="bfloat16", lora=replace(LORA, **kinds))
    model = moved(load_model(words, CPU))
    save_pretrained(model, load_tokenizer(words), tmp_path)
    assert not (tmp_path / "model.safetensors").exists() and not (tmp_path / "base").exists()
    again = load_model(load.at_checkpoint(words, tmp_path), CPU)
    assert {weight.dtype for weight in again.parameters() if weight.requires_grad} == {torch.float32}
    assert torch.equal(logits(again), logits(model))


def test_adapters_that_are_not_plain_lora_in_safetensors_are_not_read(tmp_path):
    """The first has PEFT import a module; the last are pickled."""
    saved = tmp_path / "saved"
    save_pretrained(with_adapters(small_model(), settings(lora=LORA)), load_tokenizer(settings()), saved)
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
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, **config))
        moved(model).save_pretrained(folder, save_embedding_layers=False)
        return model.eval()


@pytest.mark.parametrize(("kind", "tied"), [("head", False), *((kind, kind != "bias") for kind in KINDS)])
def test_a_merged_model_has_the_logits_of_its_adapters(kind, tied, tmp_path):
    base = make_folder(tmp_path / "base", "llama", tie_word_embeddings=tied, attention_bias=kind == "bias")
    expected = adapted(base, tmp_path / "ad", **KINDS[kind])
    words = settings(base, adapter=str(tmp_path / "ad"), lora=made.lora())
    write_model(words, tmp_path / "ad", tmp_path / "out", True, None, {}, lambda tokenizer: None)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), logits(expected), atol=2e-4, rtol=0)
    assert not torch.allclose(logits(found), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-2)


def test_adapters_bring_their_tokenizer_and_chat_template(tmp_path):
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
        write_model(words, tmp_path / "ad", tmp_path / f"out{merge}", merge, None, {}, lambda tokenizer: None)
        found = AutoTokenizer.from_pretrained(tmp_path / f"out{merge}")
        assert (found.eos_token, found.chat_template) == (theirs.eos_token, theirs.chat_template)


def test_adapters_that_a_layer_passes_by_are_not_merged(tmp_path):
    """Mamba's layers compute with the weight of dt_proj, and its adapters do nothing."""
    base = foreign_folder(tmp_path / "base", "jamba")
    adapted(base, tmp_path / "ad", target_modules=["dt_proj"])
    words = settings(base, adapter=str(tmp_path / "ad"), lora=made.lora())
    with pytest.raises(UserError, match="compute other logits"):
        write_model(words, tmp_path / "ad", tmp_path / "out", True, None, {}, lambda tokenizer: None)
    assert not (tmp_path / "out").exists()
