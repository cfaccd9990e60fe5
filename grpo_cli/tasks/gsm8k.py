"""Grade-school mathematics (GSM8K, https://arxiv.org/abs/2110.14168): 7,473 problems to train on, 1,319 to test.

The same task as `jsonl`, with GSM8K's fields and its places on the hub; its solutions end with `#### x`.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.tasks.prompting import Tokenizer
from grpo_cli.types import Prompt, Reward, Rollout

HUB_TRAIN = "hub:openai/gsm8k:main:train"
HUB_TEST = "hub:openai/gsm8k:main:test"


class Gsm8k:
    """The task. Without `path` both splits come from the hub (eval is GSM8K's test split, unless `eval_path` is given).

    With a local `path`, give the test file as `eval_path`, or a share of `path` is held out, as `Jsonl` says.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str | None = None,
        eval_path: str | None = None,
        system_prompt: str | None = None,
        template: str = "Question: {question}\nAnswer:",
        use_chat_template: bool = True,
        eval_fraction: float = 0.05,
        grading: str = "lenient",
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._problems = Jsonl(
            tokenizer,
            seed,
            path=HUB_TRAIN if path is None else path,
            eval_path=HUB_TEST if path is None and eval_path is None else eval_path,
            question_field="question",
            answer_field="answer",
            system_prompt=system_prompt,
            template=template,
            use_chat_template=use_chat_template,
            eval_fraction=eval_fraction,
            grading=grading,
            max_prompt_tokens=max_prompt_tokens,
        )

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self._problems.prompts(split)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return self._problems.reward(prompt, rollout)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._problems.text(token_ids)
