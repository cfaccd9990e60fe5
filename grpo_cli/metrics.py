"""The list of all metric names, each with a sentence, and the functions that compute metrics from values.

Nothing is stored or sent here: the trainer merges these dictionaries into a `Record`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grpo_cli.types import GIVEN, Batch, Finish, Group, ScoredGroup

# A name in angle brackets stands for one word, or for a number where the name is `k`.
METRICS: Mapping[str, str] = {
    "reward/mean": "Mean total reward over all n rollouts of every prompt, before any selection. Like all of reward/*, "
    "group/* and response/* without kept, it counts rollouts generated in this step only: a step that trains on stored "
    "groups alone has none.",
    "reward/std": "Standard deviation of the total reward over all rollouts of the step; exactly 0 if all are equal.",
    "reward/kept_mean": "Mean total reward over the rollouts that were trained on (as rollouts/trained counts them); "
    "selection biases it.",
    "reward/<part>": "Mean of this part of the reward over the rollouts that have it.",
    "group/zero_std": "Share of groups whose rewards are all exactly equal, from which an advantage that compares "
    "within a group learns nothing; one rollout alone is no group.",
    "group/mixed": "Number of groups whose rewards differ: the yardstick at equal tokens, but for advantages that "
    "learn from even groups too.",
    "group/zero_std_kept": "The same share after selection, among the rollouts that were chosen, before a correction "
    "took any of them out of the policy loss.",
    "response/length_mean": "Mean number of tokens per rollout, with the end-of-sequence token and, in an episode of "
    "several turns, with what the environment answered.",
    "response/length_max": "Number of tokens of the longest rollout of the step.",
    "response/truncated": "Share of rollouts that were cut off at sampling.max_new_tokens or, in the last turn of an "
    "episode, at sampling.max_turn_tokens.",
    "turns/mean": "Mean number of the model's turns in an episode, where the task has several.",
    "turns/errors": "Observations that name an error: of a tool call that could not be read, or of the user's code.",
    "tokens/environment": "Tokens of the step that environments answered: read, not sampled, and not trained on.",
    "prompts/distinct": "Different problems that rollouts were made of since the run began.",
    "collect/rounds": "Rounds in which the collector requested the step's rollouts.",
    "collect/problems": "Problems that rollouts were made of in the step.",
    "collect/rollouts_min": "Fewest rollouts of a problem in the step.",
    "collect/rollouts_max": "Most rollouts of a problem in the step.",
    "collect/carried_rollouts": "Rollouts that collector=partial leaves for the next step, begun or not.",
    "collect/carried_tokens": "Tokens that they have so far.",
    "collect/dropped_groups": "Whole groups that the collector made and did not return; they count in reward/* and "
    "group/* all the same.",
    "collect/tokens_dropped": "Tokens that were generated for them.",
    "collect/unjudged_groups": "Groups of the step left out as the judge failed for each of their rollouts.",
    "warmup/loss": "Mean negative log-likelihood of a token at sampling.temperature, in a step of train.warmup=sft.",
    "judge/questions": "Questions that task.reward=judge has put to its model since the last step.",
    "judge/kept": "Completions whose question had been answered before, and was not asked again.",
    "judge/failed": "Questions without an answer in the end; what they were about is left out.",
    "collect/<figure>": "A figure that the chosen collector reports about itself.",
    "curriculum/predicted_rate": "Mean share of right rollouts that curriculum=target expected of the step's problems.",
    "curriculum/<figure>": "A figure that the chosen curriculum reports about itself.",
    "tokens/generated": "Tokens generated for training since the run began.",
    "tokens/trained": "Response tokens trained on since the run began: those with a weight other than 0 in the policy "
    "loss, after the correction, be their advantage 0 or not. A token counts once a step, "
    "however many epochs go over it.",
    "rollouts/generated": "Rollouts generated for training since the run began.",
    "rollouts/trained": "Rollouts trained on since the run began: those with at least one such token.",
    "loss/total": "The scalar that was minimised: policy loss plus weighted KL, mean over the step's updates.",
    "loss/policy": "The policy-gradient part of the loss.",
    "loss/kl": "Estimated KL divergence from the policy to the reference, before its coefficient.",
    "loss/clip_fraction": "Share of the tokens in the loss, whatever their weight, whose policy ratio was clipped.",
    "loss/policy_ratio_mean": "Mean over the same tokens of learner probability / old policy probability.",
    "policy/entropy": "Exact entropy, in nats, of the policy's distribution over the next token at "
    "sampling.temperature: mean over trained tokens (as tokens/trained counts them), then over the step's updates, of "
    "the policy before each. log V if all V tokens are equally likely, 0 if the policy is certain.",
    "optim/lr": "Learning rate of the step, with what optim.ess has taken from it; mean over the step's updates.",
    "optim/grad_norm": "Norm of the gradient before clipping, mean over the step's updates.",
    "optim/skipped_updates": "Updates skipped since the run began because the loss or the gradient was not finite.",
    "optim/empty_steps": "Steps without an update since the run began: nothing was left to train on, or no gradient.",
    "mismatch/ratio_mean": "Mean over sampled tokens of old policy (no dropout) / sampler probability; 1 if equal. "
    "Like all of mismatch/*, of the rollouts that are trained on, or of all if the correction can reject some.",
    "mismatch/ratio_min": "Smallest of those ratios in the step.",
    "mismatch/log_ratio_q001": "0.1% quantile of the logarithm of that ratio.",
    "mismatch/log_ratio_q01": "1% quantile of the logarithm of that ratio.",
    "mismatch/kl": "Estimated KL divergence from the sampler to the dense policy, per token.",
    "mismatch/rejected": "Share of rollouts that the correction took out of the loss altogether.",
    "mismatch/masked_tokens": "Share of response tokens that the correction took out of the loss.",
    "mismatch/weight_mean": "Mean importance weight over the response tokens left in the loss.",
    "off/token_share": "Share of the trained tokens that weights of earlier updates have sampled.",
    "off/lag_mean": "By how many updates the weights that sampled a trained token are older, on average.",
    "off/given_share": "Share of the trained tokens that no policy sampled: they come from demonstrations.",
    "off/ess": "Effective sample size of an update's rollouts by their importance weights, as a share of their number.",
    "off/active": "Share of tokens neither masked nor clipped; below 0.9 correction.prox=ewma averages again.",
    "off/prox_resets": "How often that average has begun again since the run began.",
    "engine/decode_steps": "Batched forward passes that made one token per busy slot.",
    "engine/slots": "Slots the engine decoded with; under sampler.kv_budget the most rollouts that ran at a time.",
    "engine/slot_utilisation": "Share of slot-steps that produced a token.",
    "engine/kv_peak_bytes": "Most bytes of the key-value pool in use, in whole blocks; on a GPU all of the pool.",
    "engine/kv_held_bytes": "Most bytes of it that rollouts and prompts held at once, without what is empty.",
    "engine/preemptions": "How often a rollout was preempted because sampler.kv_budget ran out.",
    "engine/prefill_tokens": "Prompt tokens that were run through the model.",
    "engine/weight_update_seconds": "Seconds until an engine with weights of its own had those of this step.",
    "engine/<detail>": "A detail that the chosen engine, scheduler or sparsity reports about itself.",
    "predictor/mean_absolute_error": "Mean absolute difference of predicted and true lengths, in tokens.",
    "time/rollout": "Seconds of this step spent generating.",
    "time/environment": "Of time/rollout, seconds in which all that was left waited for an environment's answer.",
    "time/reward": "Seconds of this step spent judging.",
    "time/logprobs": "Seconds of this step spent on log-probabilities that need no gradient.",
    "time/update": "Seconds of this step spent on forward, backward and optimizer.",
    "time/old_logprobs": "Of time/logprobs, what the policy's own took.",
    "time/ref_logprobs": "Of time/logprobs, what the reference's took.",
    "time/forward": "Of time/update, what the passes forward took.",
    "time/backward": "Of time/update, what the passes backward took.",
    "time/optimizer": "Of time/update, what clipping and the optimizer's step took.",
    "time/eval": "Seconds of this step spent on evaluation.",
    "time/checkpoint": "Seconds spent saving since the record before (a checkpoint comes after its step's record).",
    "time/step": "Seconds of the whole step.",
    "time/<phase>": "Seconds of this step spent in this phase.",
    "clock/train_seconds": "Seconds of training since the run began, evaluation left out.",
    "speed/tokens_per_second": "Generated tokens per second of rollout time.",
    "memory/peak_bytes": "Peak memory: resident size of the process on a CPU, what was allocated at a time on a GPU.",
    "eval/accuracy": "Share of held-out problems (or of the eval.split) solved by greedy decoding.",
    "eval/accuracy_low": "Lower end of the 95% interval of eval/accuracy.",
    "eval/accuracy_high": "Upper end of the 95% interval of eval/accuracy.",
    "eval/problems": "How many problems the evaluation asked.",
    "eval/pass@<k>": "Probability that at least one of k sampled answers is right, unbiased, mean over problems.",
    "eval/pass@<k>_low": "Lower end of the 95% interval of that pass@k.",
    "eval/pass@<k>_high": "Upper end of the 95% interval of that pass@k.",
    "search/accuracy": "Share of problems solved by the answer that search= chose, beside greedy eval/accuracy.",
    "search/accuracy_low": "Lower end of the 95% interval of search/accuracy.",
    "search/accuracy_high": "Upper end of the 95% interval of search/accuracy.",
    "search/tokens": "Tokens that the search sampled for a problem, in all its replies, mean: compare at equal ones.",
    "search/sequential": "Those of them that had to be sampled one after the other, mean over problems.",
    "eval/length_mean": "Mean number of tokens of evaluation's greedy answers.",
}


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute metrics of all the step's rollouts, before selection. A step without rollouts has no means."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {"group/mixed": 0.0}
    lengths = [len(rollout) for rollout in rollouts]
    totals = np.concatenate([group.totals for group in groups])
    return {
        "reward/mean": float(totals.mean()),
        # The floating-point deviation of equal numbers need not be 0: that of (0.1, 0.1, 0.1) is 1.4e-17.
        "reward/std": float(totals.std()) if (totals != totals[0]).any() else 0.0,
        **_part_means(groups),
        "group/zero_std": zero_std_share([group for group in groups if len(group.rollouts) > 1]),
        "group/mixed": float(sum(group.rewards_differ for group in groups)),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": sum(rollout.finish is Finish.LENGTH for rollout in rollouts) / len(rollouts),
    }


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of episodes of several turns. Partial ones count in the step that finishes them."""
    episodes = [one for group in groups for one in group.rollouts if one.finish is not Finish.PARTIAL]
    if not episodes:
        return {}
    return {
        "turns/mean": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "tokens/environment": float(sum(len(episode) - episode.num_sampled for episode in episodes)),
    }


def kept_metrics(chosen: Sequence[ScoredGroup], trained: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return metrics of the rollouts that were chosen, and of those that are trained on. Means over no rollouts are
    left out."""
    totals = np.concatenate([np.zeros(0), *(group.totals for group in trained)])
    found = {"reward/kept_mean": float(totals.mean())} if len(totals) else {}
    return found | ({"group/zero_std_kept": zero_std_share(chosen)} if any(len(one.totals) for one in chosen) else {})


def reuse_metrics(batch: Batch) -> dict[str, float]:
    """Measure how much of what is trained on is old or was given. Lags are in updates, over sampled tokens. Empty if
    everything in the step is new."""
    if batch.token_ages is None:
        return {}
    trained = batch.trained_mask
    ages = batch.token_ages.clamp(min=0) * trained
    tokens, given = int(trained.sum()), int((trained & (batch.token_ages == GIVEN)).sum())
    return {
        "off/token_share": int((ages > 0).sum()) / max(tokens, 1),
        "off/lag_mean": int(ages.sum()) / max(tokens - given, 1),
        "off/given_share": given / max(tokens, 1),
    }


def zero_std_share(groups: Sequence[ScoredGroup]) -> float:
    """Return the share of the groups whose rewards are all exactly equal; groups without rollouts do not count.

    Equality and not a small standard deviation: a group of equal rewards has an advantage of exactly 0, and one of
    nearly equal rewards, once divided by its deviation, does not.
    """
    filled = [group for group in groups if group.rollouts]
    return sum(not group.rewards_differ for group in filled) / len(filled) if filled else 0.0


def _part_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for group in groups:
        for reward in group.rewards:
            for part, value in reward.parts.items():
                values.setdefault(part, []).append(value)
    for part in values:
        if f"reward/{part}" in METRICS:
            raise ValueError(f"a reward part cannot be called {part!r}: the metric reward/{part} means something else")
    return {f"reward/{part}": sum(items) / len(items) for part, items in values.items()}
