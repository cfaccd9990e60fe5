"""What TRL and verl call a setting, and what it is here: for "did you mean", `grpo explain` and `conf/README.md`.

Words are those of TRL's GRPOConfig (and the TrainingArguments below it) and of verl's `ppo_trainer.yaml`.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """`ours` is as it is typed here; a value behind `=` is an example, or the choice that it comes to."""

    trl: tuple[str, ...]
    verl: tuple[str, ...]
    ours: str


ROWS = (
    Row(("num_generations",), ("rollout.n",), "n"),
    Row(("learning_rate",), ("optim.lr", "lr"), "optim.lr"),
    Row(("weight_decay",), ("optim.weight_decay",), "optim.weight_decay"),
    Row(("max_grad_norm",), ("grad_clip",), "optim.max_grad_norm"),
    Row(("warmup_steps", "warmup_ratio"), ("lr_warmup_steps",), "optim.warmup_steps"),
    Row(("lr_scheduler_type",), ("warmup_style", "lr_scheduler_type"), "optim.schedule"),
    Row(("optim",), ("optimizer",), "optim.name"),
    Row(("max_completion_length",), ("max_response_length", "response_length"), "sampling.max_new_tokens"),
    Row(("temperature",), ("rollout.temperature",), "sampling.temperature"),
    Row(("top_p",), ("rollout.top_p",), "sampling.top_p"),
    Row(("per_device_train_batch_size", "generation_batch_size"), ("train_batch_size",), "train.prompts"),
    Row(
        ("gradient_accumulation_steps",),
        ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
        "train.micro_batch_tokens",
    ),
    Row(("steps_per_generation",), ("ppo_mini_batch_size",), "train.minibatches"),
    Row(("num_iterations",), ("ppo_epochs",), "train.epochs"),
    Row(("max_steps", "num_train_epochs"), ("total_training_steps", "total_epochs"), "train.steps"),
    Row(("save_steps",), ("save_freq",), "train.checkpoint_every"),
    Row(("save_total_limit",), ("max_actor_ckpt_to_keep",), "train.keep_checkpoints"),
    Row(("eval_steps",), ("test_freq",), "eval.every"),
    Row(("beta",), ("kl_loss_coef", "kl_coef"), "loss.kl_coef"),
    Row(("epsilon",), ("clip_ratio", "clip_ratio_low"), "loss.clip_low"),
    Row(("epsilon_high",), ("clip_ratio_high",), "loss.clip_high"),
    Row(("loss_type",), ("loss_mode", "policy_loss"), "loss=dapo"),
    Row((), ("loss_agg_mode",), "loss.aggregation"),
    Row(("importance_sampling_level",), (), "loss=gspo"),
    Row(("scale_rewards",), ("adv_estimator", "norm_adv_by_std_in_grpo"), "advantage=dr_grpo"),
    Row(("vllm_importance_sampling_correction",), ("rollout_correction", "rollout_is"), "correction=tis"),
    Row(("reward_funcs",), ("custom_reward_function", "reward_function"), "task.reward"),
    Row(("reward_weights",), (), "task.weights"),
    Row(("train_dataset", "dataset_name"), ("train_files",), "task.path"),
    Row(("eval_dataset",), ("val_files",), "task.eval_path"),
    Row(("model_name_or_path",), ("model.path",), "model.path"),
    Row(("lora_r", "peft_config"), ("lora_rank",), "model.lora.rank"),
    Row(("lora_alpha",), ("lora_alpha",), "model.lora.alpha"),
    Row(("load_in_4bit",), (), "model.quantize"),
    Row(("bf16",), (), "model.autocast"),
    Row(("gradient_checkpointing",), ("enable_gradient_checkpointing",), "model.gradient_checkpointing"),
    Row(("use_vllm",), ("rollout.name",), "engine=vllm"),
    Row(("report_to",), ("trainer.logger",), "logger=jsonl"),
    Row(("output_dir",), ("default_local_dir",), "hydra.run.dir"),
    Row(("resume_from_checkpoint",), ("resume_mode",), "resume"),
)


def meant_by(key: str) -> Row | None:
    """The row of somebody else's word, which may stand behind other names: `actor_rollout_ref.rollout.n`."""
    parts = key.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return next((row for tail in tails for row in ROWS if tail in (*row.trl, *row.verl)), None)


def table() -> str:
    """All rows as `conf/README.md` has them."""
    lines = ["| TRL | verl | here |", "|---|---|---|"]
    for row in ROWS:
        cells = (", ".join(f"`{word}`" for word in words) for words in (row.trl, row.verl, (row.ours,)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
