"""Questions with answers, from a JSONL file of one's own or the hub: what `gsm8k`, `math` and `jsonl` have in common.

What differs between them are their sources, their fields and who judges; all of that is in their YAML files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

from grpo_cli.support.errors import UserError, refuse
from grpo_cli.tasks.judges import GRADINGS, Completion, Judge, Numbers, weighing
from grpo_cli.tasks.math_judge import MathJudge, limit_problems
from grpo_cli.tasks.own_reward import OwnReward
from grpo_cli.tasks.problems import LONG_PROMPTS, LazyPrompts, Problem, Reading, check_disjoint, split_by_hash
from grpo_cli.tasks.prompting import Prompting, Tokenizer
from grpo_cli.tasks.rows import read_rows
from grpo_cli.tasks.turns import Speaks, TurnSettings, environment_of
from grpo_cli.types import Prompt, Reward, Rollout


class Jsonl(Speaks):
    """The task. A prompt's id is its split and its line in the file, as in `train-000012`.

    With `eval_path` that file is the eval split, and no question may be in both. Without, the `eval_fraction` of the
    questions with the smallest hashes is held out: the same for every seed, and copies of a question stay together.
    `reward` is `numbers`, `math` or `module:function`; what else there is to set is said in `conf/task/jsonl.yaml`.
    The data that `default_path` names is read when training asks for it, a `path` at once.
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
        system_prompt: str | None,
        template: str,
        use_chat_template: bool,
        few_shot: int,
        few_shot_path: str | None,
        long_prompts: str,
        eval_fraction: float,
        max_unreadable: float,
        reward: str,
        grading: str,
        weights: Mapping[str, Any] | None,
        formats_on: str,
        judge_seconds: float,
        judge_workers: int,
        on_crash: str,
        max_prompt_tokens: int | None = None,
        warn: Callable[[str], None],
        **turns: Unpack[TurnSettings],
    ) -> None:
        del seed  # nothing here is random: runs that differ in their seed share their problems
        _check(path or default_path, eval_fraction, max_unreadable, grading, long_prompts, few_shot)
        environment = environment_of(turns, self._is_right)
        if reward == "environment":
            if environment is None or environment.score is None:
                raise UserError("task.reward=environment needs a task.environment with get_reward()")
            self._judge: Judge = OwnReward("environment", environment.score)
        else:
            self._judge = _judge(reward, GRADINGS[grading], judge_seconds, judge_workers, on_crash)
        refuse([*limit_problems(judge_seconds, judge_workers, on_crash)])
        self._weighing = weighing(weights or {}, formats_on, self._judge.main)
        self._reading = Reading(self._judge.gold, self._judge.advice, answer_field, max_unreadable, warn)
        self._fields = (question_field, answer_field)
        self._sources: dict[str, list[Problem]] = {}
        self._source, self._is_default = path or default_path or "", path is None
        self._eval_source = default_eval_path if path is None and eval_path is None else eval_path
        self._eval_key = "task.path" if eval_path is None else "task.eval_path"  # what helps where the hub does not
        self._eval_fraction = eval_fraction
        self._few_shot, self._few_shot_source, self._warn = few_shot, few_shot_path, warn
        Prompting(tokenizer, template, system_prompt, use_chat_template)  # says what is wrong before any data is read
        tools = environment.tools if environment else ()
        self._prompting = Prompting(tokenizer, template, system_prompt, use_chat_template, self._examples(), tools)
        self._talk(environment, self._prompting, turns)
        self._limits = (self._prompting, max_prompt_tokens, long_prompts, warn)
        if not self._is_default and self._own_problems[0]:
            self.prompts("train")  # so that what is wrong with it is said at once
        self._eval = LazyPrompts("eval", self._held_out, *self._limits)

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
        return [self._weighing.reward(own, completion.text) for own, completion in zip(parts, completions, strict=True)]

    def text(self, token_ids: Sequence[int]) -> str:
        return self._prompting.decode(token_ids)

    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        return self._problem(prompt).row

    def _is_right(self, prompt: Prompt, text: str) -> bool:
        said = Completion(f"prompt {prompt.id}", text, (text,), prompt.answer, True, 0, self._problem(prompt))
        parts = self._judge([said])[0]
        return parts.get(self._judge.main or "correct", 0.0) >= 1.0

    def _completion(self, prompt: Prompt, rollout: Rollout) -> Completion:
        texts = tuple(self.text(turn) for turn in rollout.turns)
        return Completion(
            place=f"sample {rollout.request.sample} of prompt {prompt.id}",
            text=texts[-1] if texts else "",
            turns=texts,
            answer=prompt.answer,
            finished=rollout.finish.complete,
            length=rollout.num_drawn,
            problem=self._problem(prompt) if isinstance(self._judge, OwnReward) else None,
        )

    def _problem(self, prompt: Prompt) -> Problem:
        return (self._train if prompt.id.startswith("train-") else self._eval).of(prompt.id)

    @cached_property
    def _train(self) -> LazyPrompts:
        train = self._own_problems[0]
        if not train:
            raise UserError(f"task.eval_fraction=1 leaves nothing of {self._source} to train on; lower it")
        if self._eval_source is not None and self._is_default:
            train = self._without_evaluated(train)
        elif self._eval_source is not None:
            check_disjoint(train, self._held_out, f"task.path={self._source}", self._eval_source)
        return LazyPrompts("train", train, *self._limits)

    def _without_evaluated(self, train: Sequence[Problem]) -> list[Problem]:
        """A published data set may repeat itself; nobody can be asked to repair it."""
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
        held_out = self._read(self._eval_source, self._eval_key)
        check_disjoint(self._shown, held_out, "the examples of task.few_shot", self._eval_source)
        return held_out

    @cached_property
    def _all(self) -> list[Problem]:
        return self._read(self._source, "task.path")

    @cached_property
    def _own_problems(self) -> tuple[list[Problem], list[Problem]]:
        """What to train on and, without a source of its own, what to evaluate on. Examples are in neither."""
        shown = {problem.question for problem in self._shown}
        problems = [problem for problem in self._all if problem.question not in shown]
        if self._eval_source is not None:
            return problems, []
        return split_by_hash(problems, self._eval_fraction, self._source)

    def _read(self, source: str, key: str) -> list[Problem]:
        """A source's problems. One that serves twice (for its examples too) is read, and warned of, once."""
        if source not in self._sources:
            self._sources[source] = self._reading.problems(read_rows(source, key, *self._fields), source)
        return self._sources[source]

    @cached_property
    def _shown(self) -> list[Problem]:
        """The examples: the first problems of `few_shot_path`, or of what is trained on."""
        if self._few_shot == 0:
            return []
        source = self._few_shot_source or self._source
        problems = self._all if self._few_shot_source is None else self._read(source, "task.few_shot_path")
        if len(problems) < self._few_shot:
            raise UserError(f"task.few_shot={self._few_shot} examples were asked for, but {source} has {len(problems)}")
        return problems[: self._few_shot]

    def _examples(self) -> tuple[tuple[str, str], ...]:
        """Questions with their answers as they are written."""
        return tuple((problem.question, str(problem.row[self._fields[1]]).strip()) for problem in self._shown)


def _judge(reward: str, main: str, seconds: float, workers: int, on_crash: str) -> Judge:
    if reward == "numbers":
        return Numbers(main)
    if reward == "math":
        return MathJudge(main, seconds, workers, on_crash)
    if main != GRADINGS["lenient"]:
        raise UserError("task.grading=strict is for task.reward=numbers and math; your own function grades as it likes")
    return OwnReward(reward)


def _check(
    source: str | None, eval_fraction: float, max_unreadable: float, grading: str, long_prompts: str, few_shot: int
) -> None:
    problems = []
    if not source:
        problems.append("task.path is missing: give a JSONL file, or hub:<dataset>:<split>")
    if not 0 < eval_fraction <= 1:
        problems.append(f"task.eval_fraction={eval_fraction} must be more than 0 and at most 1 (nothing to train on)")
    if not 0 <= max_unreadable < 1:
        problems.append(f"task.max_unreadable={max_unreadable} must be at least 0 and less than 1")
    if grading not in GRADINGS:
        problems.append(f"task.grading={grading} must be one of {', '.join(GRADINGS)}")
    if long_prompts not in LONG_PROMPTS:
        problems.append(f"task.long_prompts={long_prompts} must be one of {', '.join(LONG_PROMPTS)}")
    if few_shot < 0:
        problems.append(f"task.few_shot={few_shot} must be at least 0")
    refuse(problems)
