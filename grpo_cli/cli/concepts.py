"""Technical terms that are not settings: a sentence each, with the related settings and metrics."""

from __future__ import annotations

from collections.abc import Mapping

CONCEPTS: Mapping[str, str] = {
    "adapter": "Small matrices beside frozen weights, which alone are trained (LoRA): model.lora.rank, model.adapter.",
    "advantage": "How much better a rollout's reward is than those of its group: what its tokens are made likelier by.",
    "baseline": "What a reward is compared with: the mean of the group, or what advantage= says.",
    "checkpoint": "Weights and all that a run needs to go on from a step: train.checkpoint_every, resume, grpo eval.",
    "clip": "The loss takes no account of how far a ratio leaves a band around 1: loss.clip_low, loss.clip_high.",
    "completion": "What the model writes after a prompt, up to sampling.max_new_tokens tokens; a reply.",
    "entropy": "How undecided the policy is about the next token; if it falls to nothing, all rollouts are the same.",
    "eviction": "Leaving keys and values out of the cache while a rollout is made: sparsity=.",
    "group": "The n rollouts of one prompt, whose rewards are compared with each other.",
    "kl": "How far the policy is from what drew the rollouts (mismatch/kl), or from the start (loss.kl_coef).",
    "kv": "Keys and values of the tokens so far, which each decode step reads: sampler.kv_budget, sparsity=.",
    "mask": "Which tokens or rollouts count in the loss: those of prompts never do, others as correction= says.",
    "mismatch": "That rollouts were drawn from other probabilities than the policy's; answered by correction=.",
    "off-policy": "Trained on what other weights drew: train.epochs, collector=partial; see correction=.",
    "policy": "The model that is trained, as a distribution over the next token.",
    "prompt": "A problem of the task, as tokens; train.prompts of them make a step.",
    "ratio": "Probability of a token under the policy over that under what drew it.",
    "recipe": "Numbers that a model or a task brings along, for settings that say auto: model.recipe, task.recipe.",
    "reference": "The model as it was at the start, for a KL term: loaded only with loss.kl_coef above 0.",
    "reward": "What a rollout earns: the sum of weight times part, task.weights; reward/<part> are their means.",
    "rollout": "One completion of a prompt with the log-probabilities that it was drawn with.",
    "slot": "A place in which one rollout is decoded at a time: sampler.slots.",
    "step": "Rollouts of train.prompts problems, and the updates made from them.",
    "truncated": "Cut off at sampling.max_new_tokens before it ended: response/truncated is their share.",
    "update": "One step of the optimizer: train.epochs times train.minibatches of them in a step.",
}
