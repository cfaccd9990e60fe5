"""Questions with answers, from a JSONL file or the hub: the one class of `gsm8k`, `math` and `jsonl`.

They differ in their sources, their fields and who judges; all of that is in their YAML files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Unpack, cast

from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf, Range
from grpo_cli.tasks.formats import OverlongTokens, overlong
from grpo_cli.tasks.judges import FORMATS_ON, GRADINGS, Completion, Judge, Numbers, Weighing
from grpo_cli.tasks.math_judge import MOST_WORKERS, ON_CRASH, MathJudge
from grpo_cli.tasks.model_judge import JudgeSettings, ModelJudge
from grpo_cli.tasks.own_reward import OwnReward
from grpo_cli.tasks.problems import LONG_PROMPTS, LazyPrompts, Problem, Reader, check_disjoint, split_by_hash
from grpo_cli.tasks.prompting import Prompting, Tokenizer
from grpo_cli.tasks.rows import of_json, value_of
from grpo_cli.tasks.turns import Speaks, TurnSettings, environment_judge, environment_of
from grpo_cli.types import Prompt, Reward, Rollout


class Jsonl(Speaks):
    """The task. A prompt's id is its split and its line in the file, as in `train-000012`.

    With `eval_path` that file is the eval split, and no question may be in both. Without, the `eval_fraction` of the
    questions with the smallest hashes is held out: the same for every seed, and copies of a question stay together.
    `reward` is `numbers`, `math`, `judge`, `environment` or `module:function`; `conf/task/jsonl.yaml` explains the
    rest. The data that `default_path` names is read when training asks for it, a `path` at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str | None,
        eval_path: str | None,
        default_path: str | None,
        default_eval_path: str | None,
        question_field: str,
        answer_field: str,
        solution_field: str | None,
        few_shot: Annotated[int, Range(0)],
        few_shot_path: str | None,
        long_prompts: Annotated[str, OneOf(LONG_PROMPTS)],
        eval_fraction: Annotated[float, Range(0, 1, above=True)],
        max_unreadable: Annotated[float, Range(0, 1, below=True)],
        reward: str,
        grading: Annotated[str, OneOf(tuple(GRADINGS))],
        weights: Mapping[str, Any] | None,
        formats_on: Annotated[str, OneOf(FORMATS_ON)],
        overlong_tokens: OverlongTokens,
        judge_seconds: Annotated[float, Range(0, above=True)],
        judge_workers: Annotated[int, Range(1, MOST_WORKERS)],
        on_crash: Annotated[str, OneOf(ON_CRASH)],
        judge: JudgeSettings,
        run_dir: Path | None = None,
        max_prompt_tokens: int | None = None,
        chat_defaults: Mapping[str, Any] | None = None,
        warn: Callable[[str], None],
        **turns: Unpack[TurnSettings],
    ) -> None:
        del seed  # nothing here is random: runs that differ in their seed share their problems
        if not (source := path or default_path):
            raise UserError("task.path is missing: give a JSONL file, or hub:<dataset>:<split>")
        prompting = Prompting.of(tokenizer, turns, chat_defaults)
        environment = environment_of(turns, prompting)
        self._judge = (
            environment_judge(environment)
            if reward == "environment"
            else ModelJudge(judge, run_dir, warn)
            if reward == "judge"
            else _judge(reward, GRADINGS[grading], judge_seconds, judge_workers, on_crash)
        )
        self._weighing = Weighing(weights or {}, formats_on, self._judge.main)
        self._overlong_tokens = overlong_tokens
        self._reader = Reader(self._judge, question_field, answer_field, max_unreadable, warn)
        self._source, self._is_default, self._eval_fraction = source, path is None, eval_fraction
        self._eval_source = eval_path or (default_eval_path if path is None else None)
        self._eval_key = "task.eval_path" if eval_path else "task.path"  # what helps where the hub does not
        self._warn, self._solution_field = warn, solution_field or answer_field
        self._shown = self._examples(few_shot, few_shot_path)
        texts = tuple((problem.question, str(value_of(problem.row, answer_field)).strip()) for problem in self._shown)
        self._prompting = replace(prompting, examples=texts, tools=environment.tools if environment else ())
        self._talk(environment, self._prompting, turns, warn)
        opens = (environment.opens,) if environment else ()
        self._limits = (self._prompting, max_prompt_tokens, long_prompts, warn, *opens)
        if not self._is_default and self._own_problems[0]:
            self.prompts("train")  # so that what is wrong with it is found at once
        self.prompts("eval")

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split not in ("train", "eval"):
            raise UserError(f"the task was asked for the split {split!r}; it has train and eval")
        return self._train if split == "train" else self._eval

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return self.rewards([(prompt, rollout)])[0]

    def rewards(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Reward]:
        """Judge many rollouts at once, each with its prompt."""
        completions = [self._completion(prompt, rollout) for prompt, rollout in pairs]
        parts = self._judge(completions)
        judged = zip(parts, completions, pairs, strict=True)
        return [
            self._weighing.reward(own, completion.text, overlong(rollout, self._overlong_tokens))
            if own
            else Reward(0.0, judged=False)
            for own, completion, (_, rollout) in judged
        ]

    def counted(self) -> Mapping[str, float]:
        return {**super().counted(), **(self._judge.counted() if isinstance(self._judge, ModelJudge) else {})}

    def text(self, token_ids: Sequence[int]) -> str:
        return self._prompting.decode(token_ids)

    def written(self, token_ids: Sequence[int]) -> str:
        return self._prompting.written(token_ids)

    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], of_json(self._problem(prompt).row))

    def _problem(self, prompt: Prompt) -> Problem:
        return (self._train if prompt.id.startswith("train-") else self._eval).of(prompt.id)

    def _completion(self, prompt: Prompt, rollout: Rollout) -> Completion:
        texts = tuple(self.text(turn) for turn in rollout.turns)
        return Completion(
            place=f"sample {rollout.request.sample} of prompt {prompt.id}",
            text=texts[-1] if texts else "",
            turns=texts,
            answer=prompt.answer,
            finished=rollout.finish.complete,
            length=rollout.num_drawn,
            problem=self._problem(prompt) if isinstance(self._judge, OwnReward | ModelJudge) else None,
        )

    @cached_property
    def _train(self) -> LazyPrompts:
        train = self._own_problems[0]
        if not train:
            raise UserError(f"nothing of {self._source} is left to train on; lower task.eval_fraction or task.few_shot")
        if self._eval_source is not None and self._is_default:
            train = self._without_evaluated(train)
        elif self._eval_source is not None:
            check_disjoint(train, self._held_out, f"task.path={self._source}", self._eval_source)
        return LazyPrompts("train", train, *self._limits)

    @cached_property
    def _eval(self) -> LazyPrompts:
        return LazyPrompts("eval", self._held_out, *self._limits)

    def _without_evaluated(self, train: Sequence[Problem]) -> list[Problem]:
        """A published data set may repeat itself, and a user cannot be asked to repair it."""
        evaluated = {problem.question for problem in self._held_out}
        left = [problem for problem in train if problem.question not in evaluated]
        if len(left) < len(train):
            self._warn(
                f"{len(train) - len(left)} of the {len(train)} problems of {self._source} are also in "
                f"{self._eval_source}; they are not trained on"
            )
        return left

    @cached_property
    def _held_out(self) -> Sequence[Problem]:
        if self._eval_source is None:
            return self._own_problems[1]
        held_out = self._reader.read(self._eval_source, self._eval_key)
        check_disjoint(self._shown, held_out, "the examples of task.few_shot", self._eval_source)
        return held_out

    @cached_property
    def _own_problems(self) -> tuple[list[Problem], list[Problem]]:
        """The problems of `path` to train on and, without an eval source, those to evaluate on; examples are in
        neither."""
        shown = {problem.question for problem in self._shown}
        problems = [problem for problem in self._reader.read(self._source) if problem.question not in shown]
        if self._eval_source is not None:
            return problems, []
        return split_by_hash(problems, self._eval_fraction, self._source)

    def _examples(self, count: int, path: str | None) -> list[Problem]:
        """The first `count` problems of `path`, or of what is trained on."""
        if count == 0:
            return []
        problems = self._reader.read(path, "task.few_shot_path") if path else self._reader.read(self._source)
        if len(problems) < count:
            raise UserError(f"task.few_shot={count}, but {path or self._source} has only {len(problems)} problems")
        if chat := next((problem for problem in problems[:count] if problem.messages), None):
            raise UserError(f"{chat.place}: messages are no example, and are put as they are: set task.few_shot=0")
        return problems[:count]


def _judge(reward: str, main: str, seconds: float, workers: int, on_crash: str) -> Judge:
    if reward == "numbers":
        return Numbers(main)
    if reward == "math":
        return MathJudge(main, seconds, workers, on_crash)
    if main != GRADINGS["lenient"]:
        raise UserError("task.grading=strict is for task.reward=numbers and math; your own function grades as it likes")
    return OwnReward(reward)
