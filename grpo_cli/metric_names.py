"""All metric names, each with a sentence: what `grpo explain` prints, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

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
    "prompts/distinct": "Different problems of which a group was finished since the run began.",
    "collect/rounds": "Rounds in which the collector requested the step's rollouts.",
    "collect/problems": "Problems that rollouts were made of in the step.",
    "collect/rollouts_min": "Fewest rollouts of a problem in the step.",
    "collect/rollouts_max": "Most rollouts of a problem in the step.",
    "collect/carried_rollouts": "Rollouts that collector=partial leaves for the next step, begun or not.",
    "collect/carried_tokens": "Tokens that they have so far.",
    "collect/dropped_groups": "Whole groups that the collector made and did not return; they count in reward/* and "
    "group/* all the same.",
    "collect/tokens_dropped": "Tokens generated for these, and for what the collector gave up before its end.",
    "collect/unjudged_groups": "Groups of the step left out as the judge failed for each of their rollouts.",
    "warmup/loss": "Mean negative log-likelihood of a token at sampling.temperature, in a step of train.warmup=sft.",
    "judge/questions": "Questions that task.reward=judge has put to its model in the step.",
    "judge/kept": "Completions whose question had been answered before, and was not asked again.",
    "judge/failed": "Questions without an answer in the end; what they were about is left out.",
    "collect/<figure>": "A figure that the chosen collector reports about itself.",
    "curriculum/predicted_rate": "Mean share of right rollouts that curriculum=target expected of the step's problems.",
    "probe/<figure>": "A figure that an advantage reports about its probe of the model.",
    "prune/<figure>": "A figure that a collector reports about the rollouts that it prunes.",
    "curriculum/<figure>": "A figure that the chosen curriculum reports about itself.",
    "tokens/generated": "Tokens generated for training since the run began.",
    "tokens/trained": "Response tokens trained on since the run began: those with a weight other than 0 in the policy "
    "loss, after the correction, be their advantage 0 or not. A token counts once a step, "
    "however many epochs go over it, also if the update was skipped.",
    "rollouts/generated": "Rollouts made for training since the run began: judged ones, of groups that are done; not "
    "what a collector gave up.",
    "rollouts/trained": "Rollouts trained on since the run began: those with at least one such token.",
    "loss/total": "The scalar that was minimised: policy loss plus weighted KL, mean over the step's updates.",
    "loss/policy": "The policy-gradient part of the loss.",
    "loss/kl": "Estimated KL divergence from the policy to the reference, before its coefficient.",
    "loss/clip_fraction": "Share of the tokens in the loss that have a weight and whose policy ratio was clipped.",
    "loss/<figure>": "A figure that the chosen loss reports about itself.",
    "loss/policy_ratio_mean": "Mean over the same tokens of learner probability / old policy probability.",
    "policy/entropy": "Exact entropy, in nats, of the policy's distribution over the next token at "
    "sampling.temperature: mean over trained tokens (as tokens/trained counts them), then over the step's updates, of "
    "the policy before each. log V if all V tokens are equally likely, 0 if the policy is certain.",
    "optim/lr": "Learning rate of the step, with what optim.ess has taken from it; mean over the step's updates.",
    "optim/grad_norm": "Norm of the gradient before clipping, mean over the step's updates.",
    "optim/skipped_updates": "Updates skipped since the run began because the loss or the gradient was not finite.",
    "optim/empty_steps": "Steps without an update since the run began: nothing was left to train on, or no gradient.",
    "mismatch/ratio_mean": "Mean over sampled tokens of old policy (no dropout) / sampler probability; 1 if equal. "
    "Like all of mismatch/*, of the rollouts that were chosen, or of all if the correction can reject some.",
    "mismatch/ratio_min": "Smallest of those ratios in the step.",
    "mismatch/log_ratio_q001": "0.1% quantile of the logarithm of that ratio.",
    "mismatch/log_ratio_q01": "1% quantile of the logarithm of that ratio.",
    "mismatch/kl": "Estimated KL divergence from the sampler to the dense policy, per token.",
    "mismatch/rejected": "Share of rollouts that the correction took out of the loss altogether.",
    "mismatch/masked_tokens": "Share of response tokens that the correction took out of the loss.",
    "mismatch/weight_mean": "Mean importance weight over the response tokens left in the loss.",
    "off/token_share": "Share of the trained tokens that weights of earlier updates have sampled.",
    "off/lag_mean": "By how many updates the weights that sampled a trained token are older, on average.",
    "off/given_share": "Share of the trained tokens that were given to their rollout, not sampled for it: a "
    "demonstration, a hint, or the beginning of another rollout.",
    "off/ess": "Effective sample size of an update's rollouts by their importance weights, as a share of their number.",
    "off/active": "Share of tokens neither masked nor clipped; below 0.9 correction.prox=ewma averages again.",
    "off/prox_resets": "How often that average has begun again since the run began.",
    "engine/decode_steps": "Batched forward passes in which each busy slot made a token, or read a known one.",
    "engine/slots": "Slots the engine decoded with; under sampler.kv_budget the most rollouts that ran at a time.",
    "engine/slot_utilisation": "Share of slot-steps that made a token, or read a known one.",
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
    "eval/problems": "Number of problems in the evaluation.",
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
