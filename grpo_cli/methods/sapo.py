"""SAPO: groups that other runs have recorded, trained on here (arXiv 2509.08721).

    own problems = max(ceil((1 - foreign) * prompts), prompts - recorded groups);  the others are recorded groups, drawn
    uniformly without replacement

What is read is JSON, and every line is checked before any of it is used. A token counts as drawn only where the
record has its log-probability; every other one was given.

Not measured.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from grpo_cli.collect.same import Places
from grpo_cli.collect.stored import drawn, to_plain
from grpo_cli.history import of_kind
from grpo_cli.interfaces import Task
from grpo_cli.runs.layout import ROLLOUTS
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Range
from grpo_cli.tracking.examples import written
from grpo_cli.types import (
    ENVIRONMENT,
    FOREIGN,
    GIVEN,
    LARGEST_REWARD,
    Finish,
    Prompt,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Span,
)

WRITE_IT = "record.rollouts=-1 record.tokens=true"
_TEXTS, _NUMBERS = ("prompt_id", "prompt", "reply", "answer", "finish"), ("step", "sample")
_LARGEST_LOGPROB = 1e-3  # rounding may bring one above 0


@dataclass(frozen=True)
class ForeignRow:
    """A line of a record, known to hold what is needed. `said` is what stands there; `token_ids` is None where it has
    none, and a log-probability NaN where the token was given."""

    place: str
    said: Mapping[str, Any]
    finish: Finish
    reward: Reward
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """How much of a file was read, a checksum of it, and whether half a line came after it."""

    name: str
    size: int
    crc: int
    cut: bool


@facts(replays=True, foreign=True)
class RunFolder:
    """Whole groups of other runs take the place of `foreign` of a step's problems, drawn without replacement within a
    step and each alike, those of problems that the step asks anew after all others. With fewer groups than that, more
    problems are asked anew.

    The records are read once, whole lines only, so that a run does not depend on when others write; a checkpoint knows
    how far. Used are the groups of problems that this task has under the same id, prompt and answer, whose rewards
    differ and that are no longer than `sampling.max_new_tokens`. Rewards are the recorded ones. Token ids count as this
    tokenizer's if they all read as the recorded replies.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...],
        vocabulary: int,
        sampling: Sampling,
        run_dir: Path,
        warn: Any,
        *,
        path: str | None,
        foreign: Annotated[float, Range(0, 1, "at least one problem of a step is asked of the model", below=True)],
        reencode: bool,
    ) -> None:
        refuse([*self.refuses(path=path)])
        assert path is not None, "it would have been refused"
        self._task, self._tokenizer, self._eos, self._vocabulary = task, tokenizer, eos_token_ids, vocabulary
        self._sampling, self._run_dir, self._path, self._reencode = sampling, run_dir, Path(path).expanduser(), reencode
        self._share = 1 - Fraction(str(foreign))
        self._sources, self._groups = list[Source](), list[Mapping[str, Any]]()
        if given := self._read(None):
            warn(
                f"replay.path={path}: {given} of the {len(self._groups)} groups have no log-probabilities of this "
                "tokenizer, so that no correction can tell how far they are from the policy; let runs record with "
                f"{WRITE_IT}"
            )

    @staticmethod
    def refuses(*, path: str | None) -> Iterator[str]:
        """What is wrong with its settings."""
        if path is None or not path.strip():
            yield f"replay=folder needs replay.path=<folder of other runs>, which record with {WRITE_IT}"
        elif not (folder := Path(path).expanduser()).is_dir():
            found = f"a file: name the folder that {folder.name} is in" if folder.exists() else "not there"
            yield f"replay.path={path} is {found}; other runs leave their records there with {WRITE_IT}"

    def fresh(self, prompts: int, version: int) -> int:
        return max(math.ceil(self._share * prompts), prompts - len(self._groups))

    def draw(
        self, count: int, fresh: Sequence[ScoredGroup], version: int, rng: np.random.Generator
    ) -> Sequence[ScoredGroup]:
        return [*fresh, *drawn(self._groups, count, fresh, rng)]

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """How far each file was read: the groups themselves stay where they are."""
        return {"kind": "folder", "read": [(s.name, s.size, s.crc, s.cut) for s in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._read([Source(*source) for source in of_kind(state, "replay", "folder")["read"]])

    def _read(self, before: Sequence[Source] | None) -> int:
        """All that the files hold, or what they held `before`; in how many groups a token's sampler is not known.
        UserError if there is nothing to be used."""
        rows = list[list[ForeignRow]]()
        self._sources, self._groups = [], []
        for name in self._files() if before is None else [source.name for source in before]:
            known = next((source for source in before or () if source.name == name), None)
            data, source = self._data(name, known)
            self._sources.append(source)
            rows += _grouped([*self._rows(name, data)], source.cut)
        problems, given, left = self._problems({group[0].said["prompt_id"] for group in rows}), 0, Counter[str]()
        for group in rows:
            prompt = problems.get(group[0].said["prompt_id"])
            text = None if prompt is None else written(self._task, prompt.token_ids)
            if prompt is None or {(row.said["prompt"], row.said["answer"]) for row in group} != {(text, prompt.answer)}:
                left["of other problems"] += 1
            elif len({row.reward.total for row in group}) == 1:
                left["of equal rewards"] += 1
            else:
                rollouts = tuple(self._rollout(prompt, row) for row in group)
                if max(map(len, rollouts)) > self._sampling.max_new_tokens:
                    left["with more tokens than sampling.max_new_tokens"] += 1
                    continue
                given += any(span.version == GIVEN for rollout in rollouts for span in rollout.spans)
                self._groups.append(to_plain(ScoredGroup(prompt, rollouts, tuple(row.reward for row in group))))
        if not self._groups:
            found = "".join(f", {count} {why}" for why, count in left.items())
            raise UserError(
                f"replay.path={self._path} holds nothing to train on: {len(rows)} groups{found}. It takes groups of "
                "this task's problems (the same ids, prompts and answers, so also the same seed where it makes them "
                f"up), recorded with {WRITE_IT}"
            )
        return given

    def _files(self) -> list[str]:
        """The records below the folder, without those of this run."""
        own = self._run_dir.resolve()
        files = [file for file in self._path.rglob(ROLLOUTS) if file.is_file() and file.parent.resolve() != own]
        if not files:
            raise UserError(
                f"replay.path={self._path} holds no {ROLLOUTS} of another run; runs leave one there with {WRITE_IT}"
            )
        return sorted(file.relative_to(self._path).as_posix() for file in files)

    def _data(self, name: str, before: Source | None) -> tuple[bytes, Source]:
        """The whole lines of a file, or those that were read of it before."""
        file = self._path / name
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(f"{file}, which replay.path names, cannot be read: {error.strerror}") from error
        if before is None:
            whole = data[: data.rfind(b"\n") + 1]
            return whole, Source(name, len(whole), zlib.crc32(whole), len(whole) < len(data))
        if zlib.crc32(data[: before.size]) != before.crc:
            raise UserError(
                f"{file} is not what this run has replayed: its first {before.size} bytes have changed. Put back what "
                "was there, or start a new run"
            )
        return data[: before.size], before

    def _rows(self, name: str, data: bytes) -> Iterator[ForeignRow]:
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            place = f"line {number} of {self._path / name}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{place} is no JSON: replay.path takes folders of runs, whose {ROLLOUTS} they alone have written"
                ) from error
            yield _row(row, place, self._reencode)

    def _problems(self, wanted: Set[str]) -> dict[str, Prompt]:
        """The problems of these ids."""
        prompts = self._task.prompts("train")
        places = Places(prompts)
        return {name: prompts[place] for name in wanted if (place := places.of(name)) is not None}

    def _rollout(self, prompt: Prompt, row: ForeignRow) -> Rollout:
        token_ids, logprobs = self._tokens(row), row.logprobs
        if row.token_ids is None:
            logprobs = (math.nan,) * len(token_ids)
        drawn = [GIVEN if math.isnan(logprob) else FOREIGN for logprob in logprobs]
        for start, end in row.said.get("environment") or ():
            drawn[start:end] = [ENVIRONMENT] * (end - start)
        spans = tuple(Span(version, len([*some])) for version, some in groupby(drawn))
        request = Request(prompt, row.said["sample"], 0, self._sampling)
        return Rollout(request, token_ids, logprobs, row.finish, 0, spans)

    def _tokens(self, row: ForeignRow) -> tuple[int, ...]:
        """The reply's tokens. UserError for ids that are not this tokenizer's."""
        if row.token_ids is None:
            try:
                encoded = self._tokenizer.encode(row.said["reply"], add_special_tokens=False)
            except (UnicodeError, TypeError) as error:
                raise UserError(f"{row.place}: its reply is no text that this tokenizer can read: {error}") from error
            return (*encoded, *self._eos[:1]) if row.finish is Finish.EOS else tuple(encoded)
        unknown = [token for token in row.token_ids if not 0 <= token < self._vocabulary]
        if unknown:
            raise UserError(
                f"{row.place}: token {unknown[0]} does not exist in this run's vocabulary of {self._vocabulary}: it "
                "was written with another tokenizer; replay.reencode=true reads the replies as text"
            )
        ends = row.finish is not Finish.EOS or row.token_ids[-1:] in [(token,) for token in self._eos]
        if not ends or self._task.text(row.token_ids) != row.said["reply"]:
            raise UserError(
                f"{row.place}: its token ids do not read as its reply here: it was written with another tokenizer; "
                "replay.reencode=true reads the replies as text"
            )
        return row.token_ids


def _grouped(rows: Sequence[ForeignRow], cut: bool) -> list[list[ForeignRow]]:
    """The rollouts of each problem and step; `cut`: the last group may lack some. UserError for a part of a group."""
    groups = [[*some] for _, some in groupby(rows, lambda row: (row.said["step"], row.said["prompt_id"]))]
    groups = groups[: len(groups) - cut]
    for group in groups:
        samples, of = [row.said["sample"] for row in group], group[0].said
        if len(group) < 2 or samples != [*range(len(group))]:
            raise UserError(
                f"{group[0].place}: of problem {of['prompt_id']!r} step {of['step']} holds the samples "
                f"{', '.join(map(str, samples))} alone, and groups are trained on whole; let runs record with "
                f"{WRITE_IT}"
            )
    return groups


def _row(row: Any, place: str, reencode: bool) -> ForeignRow:
    """A line as it was read, known to hold what it must. UserError if it does not."""
    lacking = [key for key in _TEXTS if not (isinstance(row, dict) and type(row.get(key)) is str)]
    lacking += [key for key in _NUMBERS if not (isinstance(row, dict) and type(row.get(key)) is int)]
    if lacking or not _is_number(row.get("reward")) or row["finish"] not in set(Finish) - {Finish.PARTIAL}:
        what = ", ".join(lacking) or "a reward, and how the rollout ended"
        raise UserError(
            f"{place} does not say {what}: it is no {ROLLOUTS} of a run, or was written by an older version"
        )
    parts = row.get("parts")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise UserError(f"{place}: the parts of its reward are no finite numbers")
    reward = Reward(float(row["reward"]), {part: float(value) for part, value in parts.items()})
    token_ids, logprobs = (None, ()) if reencode or "token_ids" not in row else _drawn(row, place)
    if row.get("turns") and token_ids is None:
        raise UserError(
            f"{place} is an episode of several turns, whose tokens alone say what the model drew: let runs record with "
            f"{WRITE_IT}, and leave replay.reencode out"
        )
    return ForeignRow(place, row, Finish(row["finish"]), reward, token_ids, logprobs)


def _drawn(row: Mapping[str, Any], place: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probabilities, NaN for a token that was given."""
    ids, logprobs = row["token_ids"], row.get("logprobs")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError(f"{place}: its token ids are no list of whole numbers")
    known = isinstance(logprobs, list) and all(said is None or _is_logprob(said) for said in logprobs)
    if logprobs is None or not known or len(logprobs) != len(ids):
        raise UserError(
            f"{place}: its log-probabilities are not one for each of its {len(ids)} tokens, null or a number up to 0"
        )
    theirs = row.get("environment") or []
    if not isinstance(theirs, list) or not all(_is_range(place, len(ids)) for place in theirs):
        raise UserError(f"{place}: the places of its environment's tokens are no pairs within its {len(ids)} tokens")
    return tuple(ids), tuple(math.nan if said is None else float(said) for said in logprobs)


def _is_range(value: Any, most: int) -> bool:
    whole = isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value)
    return whole and 0 <= value[0] < value[1] <= most


def _is_logprob(value: Any) -> bool:
    return _is_number(value) and value <= _LARGEST_LOGPROB


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST_REWARD
