"""Questions with answers, from a file or the hub: the one class of `gsm8k`, `math`, `jsonl`, which differ in YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Unpack

from pydantic import Field

from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf
from grpo_cli.tasks.formats import OverlongTokens
from grpo_cli.tasks.judges import FORMATS_ON, GRADINGS, Completion, Judge, Numbers, Weighing, Weights
from grpo_cli.tasks.math_judge import MathJudge
from grpo_cli.tasks.model_judge import JudgeSettings, ModelJudge
from grpo_cli.tasks.own_reward import OwnReward
from grpo_cli.tasks.problems import LazyPrompts, Problem, of_json, read_problems, split_by_hash, value_of
from grpo_cli.tasks.prompting import Tokenizer, Warn
from grpo_cli.tasks.turns import DialogueTask, Episodes, TurnSettings
from grpo_cli.tasks.workers import JudgeWorkers
from grpo_cli.types import Prompt, Reward, Rollout

MOST_UNREADABLE = 0.01  # the share of rows without an answer that a file may have


class Jsonl(DialogueTask):
    """The task; `conf/task/jsonl.yaml` explains its settings. A prompt's id is split and line, as in `train-000012`.

    With `eval_path` that file is the eval split, and its questions are not trained on. Without, the `eval_fraction` of
    the questions with the smallest hashes is held out: the same for every seed, and copies of a question stay together.
    The data that `default_path` names is read when training needs it, a `path` at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        path: str | None,
        eval_path: str | None,
        default_path: str | None,
        default_eval_path: str | None,
        question_field: str,
        answer_field: str,
        few_shot: Annotated[int, Field(ge=0)],
        eval_fraction: Annotated[float, Field(gt=0, le=1)],
        reward: str,
        grading: Annotated[str, OneOf(tuple(GRADINGS))],
        weights: Weights,
        formats_on: Annotated[str, OneOf(FORMATS_ON)],
        overlong_tokens: OverlongTokens,
        judge_seconds: Annotated[float, Field(gt=0)],
        judge_workers: JudgeWorkers,
        judge: JudgeSettings,
        run_dir: Path | None = None,
        max_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        warn: Warn,
        **turns: Unpack[TurnSettings],
    ) -> None:
        if not (source := path or default_path):
            raise UserError("task.path is missing: give a file (.jsonl, .csv, ...), or hub:<dataset>:<split>")
        self._set_up(tokenizer, turns, chat_template_kwargs, warn)
        main, environment = GRADINGS[grading], self._environment
        score = environment.score if isinstance(environment, Episodes) and environment.scores else None
        if grading != "lenient" and reward not in ("numbers", "math"):
            raise UserError("task.grading=strict is for task.reward=numbers and math: leave it out")
        if reward == "environment" and score is None:
            raise UserError("task.reward=environment needs a task.environment with get_reward()")
        judges: Mapping[str, Callable[[], Judge]] = {
            "numbers": lambda: Numbers(main),
            "math": lambda: MathJudge(main, judge_seconds, judge_workers),
            "judge": lambda: ModelJudge(judge, run_dir, warn),
            "environment": lambda: OwnReward(reward, score),
        }
        self._judge = judges.get(reward, lambda: OwnReward(reward))()
        self._weighing = Weighing(weights, formats_on, self._judge.main, overlong_tokens)
        self._fields, self._source, self._eval_fraction = (question_field, answer_field), source, eval_fraction
        self._eval_source = eval_path or (default_eval_path if path is None else None)
        self._eval_key = "task.eval_path" if eval_path else "task.path"  # what helps where the hub does not
        if few_shot:
            self._prompting = replace(self._prompting, examples=self._examples(few_shot))
        self._limits = (self._prompting, max_prompt_tokens, warn, self._opening)
        if path and self._own_problems[0]:
            self.prompts("train")  # so that what is wrong with it is found at once
        self.prompts("eval")

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return self.rewards([(prompt, rollout)])[0]

    def rewards(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Reward]:
        """Judge many rollouts at once, each with its prompt."""
        completions = [
            Completion(
                place=f"sample {rollout.request.sample} of prompt {prompt.id}",
                turns=[self.text(turn) for turn in rollout.turns],
                reference=prompt.answer,
                finished=rollout.finish.complete,
                length=rollout.num_sampled,
                problem=self._problem(prompt),
            )
            for prompt, rollout in pairs
        ]
        # replies first: a function of your own may change its turns
        judged = zip([it.reply for it in completions], self._judge(completions), pairs, strict=True)
        return [
            self._weighing.reward(parts, reply, rollout) if parts else Reward(0.0, judged=False)
            for reply, parts, (_, rollout) in judged
        ]

    def take_metrics(self) -> Mapping[str, float]:
        return {**super().take_metrics(), **self._judge.take_metrics()}

    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        return of_json(self._problem(prompt).row)

    def _problem(self, prompt: Prompt) -> Problem:
        return (self._train if prompt.id.startswith("train-") else self._eval).of[prompt.id]

    @cached_property
    def _train(self) -> LazyPrompts:
        train, evaluated = self._own_problems[0], {problem.question for problem in self._held_out}
        left = [problem for problem in train if problem.question not in evaluated]
        if train and not left:
            raise UserError(f"all of {self._source} is also in {self._eval_source}; give two files of different rows")
        if len(left) < len(train):
            self._warn(
                f"{len(train) - len(left)} of the {len(train)} problems of {self._source} are also in "
                f"{self._eval_source}; they are not trained on"
            )
        if not left:
            raise UserError(f"nothing of {self._source} is left to train on; lower task.eval_fraction or task.few_shot")
        return LazyPrompts("train", left, *self._limits)

    @cached_property
    def _eval(self) -> LazyPrompts:
        return LazyPrompts("eval", self._held_out, *self._limits)

    @cached_property
    def _held_out(self) -> list[Problem]:
        if self._eval_source is None:
            return self._own_problems[1]
        return self._without_examples(self._read(self._eval_source, self._eval_key))

    @cached_property
    def _own_problems(self) -> tuple[list[Problem], list[Problem]]:
        """The problems of `path` to train on and, without an eval source, those to evaluate on."""
        problems = self._without_examples(self._all)
        return (problems, []) if self._eval_source else split_by_hash(problems, self._eval_fraction, self._source)

    @cached_property
    def _all(self) -> list[Problem]:
        return self._read(self._source, "task.path")

    def _without_examples(self, problems: list[Problem]) -> list[Problem]:
        examples = dict(self._prompting.examples)
        return [problem for problem in problems if problem.question not in examples]

    def _examples(self, count: int) -> tuple[tuple[str, str], ...]:
        """Return the first `count` questions of what is trained on, with their answers as they were written."""
        problems = self._all[:count]
        if len(problems) < count:
            raise UserError(f"task.few_shot={count}, but {self._source} has only {len(problems)} problems")
        if chat := next((problem for problem in problems if problem.messages), None):
            raise UserError(f"{chat.place}: messages are no example, and are put as they are: set task.few_shot=0")
        return tuple((it.question, str(value_of(it.row, self._fields[1])).strip()) for it in problems)

    def _read(self, source: str, key: str) -> list[Problem]:
        """Read a source's problems. Those whose answer the judge cannot read are left out with a warning. Raise
        UserError for more than `MOST_UNREADABLE` of them."""
        found = [(it, self._judge.reference(it.answer)) for it in read_problems(source, key, *self._fields)]
        if bad := [problem for problem, reference in found if reference is None]:
            others = f" (and {len(bad) - 1} more of {len(found)} rows)" if len(bad) > 1 else ""
            answer = bad[0].answer if len(bad[0].answer) <= 80 else f"...{bad[0].answer[-80:]}"
            fault = f"{bad[0].place}{others}: no answer was understood in the field {self._fields[1]!r}: {answer!r}"
            if len(bad) > MOST_UNREADABLE * len(found):
                raise UserError(f"{fault}; {self._judge.advice}")
            self._warn(f"{fault}; such rows are left out")
        return [replace(problem, answer=reference) for problem, reference in found if reference is not None]
