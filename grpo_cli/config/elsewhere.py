"""What TRL and verl call a setting, and what it is here: for "did you mean" and `grpo explain`.

Words are those of TRL's GRPOConfig (and the TrainingArguments below it) and of verl's `ppo_trainer.yaml`.
"""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """`ours` is as typed here; a value after `=` is an example, or the corresponding choice."""

    trl: tuple[str, ...]
    verl: tuple[str, ...]
    ours: str


ROWS = (
    Word(("num_generations",), ("rollout.n",), "n"),
    Word(("learning_rate",), ("optim.lr", "lr"), "optim.lr"),
    Word(("weight_decay",), ("optim.weight_decay",), "optim.weight_decay"),
    Word(("max_grad_norm",), ("grad_clip",), "optim.max_grad_norm"),
    Word(("warmup_steps", "warmup_ratio"), ("lr_warmup_steps",), "optim.warmup_steps"),
    Word(("lr_scheduler_type",), ("warmup_style", "lr_scheduler_type"), "optim.schedule"),
    Word(("optim",), ("optimizer",), "optim.name"),
    Word(("max_completion_length",), ("max_response_length", "response_length"), "sampling.max_new_tokens"),
    Word(("max_tool_calling_iterations",), ("max_assistant_turns",), "task.turns"),
    Word(("tools",), (), "task.tools"),
    Word(("environment_factory",), (), "task.environment"),
    Word(("temperature",), ("rollout.temperature",), "sampling.temperature"),
    Word(("top_p",), ("rollout.top_p",), "sampling.top_p"),
    Word(("per_device_train_batch_size", "generation_batch_size"), ("train_batch_size",), "train.prompts"),
    Word(
        ("gradient_accumulation_steps",),
        ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
        "train.micro_batch_tokens",
    ),
    Word(("steps_per_generation",), ("ppo_mini_batch_size",), "train.minibatches"),
    Word(("num_iterations",), ("ppo_epochs",), "train.epochs"),
    Word(("max_steps", "num_train_epochs"), ("total_training_steps", "total_epochs"), "train.steps"),
    Word(("save_steps",), ("save_freq",), "train.checkpoint_every"),
    Word(("save_total_limit",), ("max_actor_ckpt_to_keep",), "train.keep_checkpoints"),
    Word(("eval_steps",), ("test_freq",), "eval.every"),
    Word(("beta",), ("kl_loss_coef", "kl_coef"), "loss.kl_coef"),
    Word(("epsilon",), ("clip_ratio", "clip_ratio_low"), "loss.clip_low"),
    Word(("epsilon_high",), ("clip_ratio_high",), "loss.clip_high"),
    Word(("loss_type",), ("loss_mode", "policy_loss"), "loss=dapo"),
    Word((), ("loss_agg_mode",), "loss.aggregation"),
    Word(("mask_truncated_completions",), (), "train.truncated"),
    Word((), ("filter_groups",), "collector=dynamic"),
    Word((), ("max_num_gen_batches",), "collector.most_rounds"),
    Word((), ("overlong_buffer",), "task.overlong_tokens"),
    Word(("importance_sampling_level",), (), "loss=gspo"),
    Word(("scale_rewards",), ("adv_estimator", "norm_adv_by_std_in_grpo"), "advantage=dr_grpo"),
    Word(("vllm_importance_sampling_correction",), ("rollout_correction", "rollout_is"), "correction=tis"),
    Word(("reward_funcs",), ("custom_reward_function", "reward_function"), "task.reward"),
    Word(("reward_weights",), (), "task.weights"),
    Word(("train_dataset", "dataset_name"), ("train_files",), "task.path"),
    Word(("eval_dataset",), ("val_files",), "task.eval_path"),
    Word(("model_name_or_path",), ("model.path",), "model.path"),
    Word(("lora_r", "peft_config"), ("lora_rank",), "model.lora.rank"),
    Word(("lora_alpha",), ("lora_alpha",), "model.lora.alpha"),
    Word(("use_dora",), (), "model.lora.dora"),
    Word(("use_rslora",), (), "model.lora.rslora"),
    Word(("load_in_4bit",), (), "model.quantize"),
    Word(("bf16",), (), "model.autocast"),
    Word(("gradient_checkpointing",), ("enable_gradient_checkpointing",), "model.gradient_checkpointing"),
    Word(("use_vllm",), ("rollout.name",), "engine=vllm"),
    Word(("report_to",), ("trainer.logger",), "logger=jsonl"),
    Word(("output_dir",), ("default_local_dir",), "hydra.run.dir"),
    Word(("resume_from_checkpoint",), ("resume_mode",), "resume"),
)


def meant_by(key: str) -> Word | None:
    """The row of a TRL or verl name, which may have a prefix: `actor_rollout_ref.rollout.n`."""
    parts = key.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return next((row for tail in tails for row in ROWS if tail in (*row.trl, *row.verl)), None)
