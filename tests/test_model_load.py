"""Loading and saving Hugging Face folders, and the shipped tiny model itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from small import small_model
from tiny_hf import make_folder

from grpo_cli.model.checks import check_vocabulary
from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer, model_config, pad_token_id
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError

CPU = torch.device("cpu")
TINY_FOLDER = Path(str(files("grpo_cli.model") / "tiny"))
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def settings(path: Path | str = "tiny", **changes: object) -> ModelSettings:
    return replace(made.model(str(path)), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load_model(settings(), CPU), load_tokenizer(settings())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_supported_family_loads_from_its_folder_with_the_same_weights_and_no_dropout(
    family: str, tmp_path: Path
) -> None:
    saved, ids = small_model(family, attention_dropout=0.5), torch.arange(2, 12)[None]
    saved.save_pretrained(tmp_path)
    loaded = load_model(settings(tmp_path), CPU)
    with torch.no_grad():
        assert torch.equal(loaded.train()(input_ids=ids).logits, saved(input_ids=ids).logits)


def test_weights_that_are_not_finite_and_a_tokenizer_with_too_many_tokens_are_refused(tiny, tmp_path: Path) -> None:
    """An evaluation of such weights gave an accuracy of 0."""
    broken = small_model("qwen3")
    broken.get_parameter("model.layers.1.mlp.up_proj.weight").data[4, 2:5] = -torch.inf
    broken.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"model.path={tmp_path}: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(settings(tmp_path), CPU)
    check_vocabulary(*tiny, "tiny")
    with pytest.raises(UserError, match=r"model\.path=x: .* token ids up to \d\d+, .* only 24 embeddings"):
        check_vocabulary(small_model("llama"), tiny[1], "x")


def test_dtype_and_random_init_are_obeyed_and_weights_are_drawn_where_they_will_be(tmp_path: Path) -> None:
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
def test_a_broken_file_is_named_whatever_is_broken(file: str, content: str | None, tmp_path: Path) -> None:
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
def test_what_cannot_be_driven_is_refused_from_the_config_alone(config: dict, said: str, tmp_path: Path) -> None:
    """No weights are there: reaching for them would be another error."""
    whole = {"model_type": "llama", **SMALL, **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=said):
        load_model(settings(tmp_path), CPU)


def test_weights_that_lack_a_layer_are_refused_instead_of_made_up(tmp_path: Path) -> None:
    model = small_model("qwen2")
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UserError, match=r"lacks 12 weights .* model.layers.1"):
        load_model(settings(tmp_path), CPU)


def test_weights_that_are_stored_quantised_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key, stored in (("quantization_config", {"quant_method": "gptq"}), ("quantization", {"bits": 4})):
        (folder / "config.json").write_text(json.dumps(config | {key: stored}))
        with pytest.raises(UserError, match="stored quantised"):
            model_config(settings(folder))


def test_all_ends_of_a_reply_are_found_and_padding_falls_back_to_the_end() -> None:
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


def test_the_shipped_tokenizer_has_a_token_for_every_character(tiny) -> None:
    text, tokenizer = "0123456789+-*/()=,:", tiny[1]
    ids = tokenizer.encode(text)
    assert len(ids) == len(set(ids)) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
