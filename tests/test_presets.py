"""The model presets of conf/: each is the published model's shape, to the parameter, without network or weights."""

from __future__ import annotations

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from grpo_cli.config.choices import choices, config_dir
from grpo_cli.config.read import read
from grpo_cli.model.checks import ARCHITECTURES, check_config
from grpo_cli.model.load import eos_token_ids, load_tokenizer, model_config
from grpo_cli.settings import ModelSettings
from grpo_cli.support.errors import UserError

# Parameters in millions, embeddings counted once where they are tied: the sizes of the published safetensors files.
PUBLISHED = {
    "qwen2_5_0_5b": 494.03,
    "qwen2_5_1_5b": 1543.71,
    "qwen2_5_3b": 3085.94,
    "qwen2_5_7b": 7615.62,
    "qwen3_0_6b": 596.05,
    "qwen3_1_7b": 1720.57,
    "qwen3_4b": 4022.47,
    "llama3_1_8b": 8030.26,
    "llama3_2_1b": 1235.81,
    "llama3_2_3b": 3212.75,
    "smollm2_135m": 134.52,
}


def settings(choice: str, *overrides: str) -> ModelSettings:
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = hydra.compose("train", [f"model={choice}", "model.random_init=true", *overrides, "run_dir=x"])
    return read(ModelSettings, OmegaConf.to_container(cfg.model, resolve=True))


@pytest.mark.parametrize("choice", sorted({*choices("model")} - {"tiny", "hf"}))
def test_a_preset_has_as_many_parameters_as_were_published(choice):
    config = model_config(settings(choice))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ in ARCHITECTURES.values()
    check_config(model.config)
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(PUBLISHED[choice], abs=0.01)


def test_random_weights_of_a_preset_end_with_the_tokenizers_end_alone():
    """Llama's config has an end of its own when none is given, token 2, which would end texts at a digit."""
    small = ("num_hidden_layers=1", "vocab_size=300", "hidden_size=64", "intermediate_size=64")
    words = settings("llama3_2_1b", *(f"model.architecture.{word}" for word in small))
    model, tokenizer = AutoModelForCausalLM.from_config(model_config(words)), load_tokenizer(words)
    assert eos_token_ids(model, tokenizer) == (tokenizer.eos_token_id,) == (1,)


def test_a_folder_speaks_for_itself_and_numbers_that_make_no_model_are_refused():
    assert model_config(settings("qwen3_4b", "model.path=tiny")).hidden_size == 96
    for word, reason in (("hidden_size=wide", "Qwen3ForCausalLM: .*hidden_size"), ("model_type=gpt2", "gpt2, of")):
        with pytest.raises(UserError, match=reason):
            model_config(settings("qwen3_0_6b", f"model.architecture.{word}"))
