"""Steps that check drafts (`draft.py`), and the drafters.

ngram   what followed the same tokens in the prompt or in any of its rollouts, finished or running (ours: others look
        in the row's own text alone)
self    the policy with weights rounded to int4 (`model/rounding.py`) draws one token after the other, over the keys and
        values of the policy; the check overwrites what it wrote. Its products are the ordinary ones, so that a draft
        takes as long as a step and never pays: it shows what would be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.kv.prompts import PromptPool
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.torch.draft import LONGEST, Kind, Pays, guess, leading
from grpo_cli.engine.torch.transcripts import StepTokens, Transcripts
from grpo_cli.engine.torch.workspace import Workspace
from grpo_cli.model.transfer import Fetched, send
from grpo_cli.types import Request


@dataclass
class Speculation:
    """What an engine has measured of its drafts, and whose they are. `small`: the policy's rounded copy, for `self`."""

    kind: Kind
    pays: Pays = field(default_factory=Pays)
    small: Decoder | None = None


class Checks:
    """The steps of one generation, with drafts where they pay."""

    def __init__(
        self,
        speculation: Speculation,
        workspace: Workspace,
        prompts: PromptPool,
        transcripts: Transcripts,
        requests: Sequence[Request],
        eos_token_ids: frozenset[int],
    ) -> None:
        self._pays, self._small, self._ends = speculation.pays, speculation.small, eos_token_ids
        self._decoder, self._kv, self._slots = workspace.decoder, workspace.kv, workspace.slots
        self._prompts, self._transcripts, self._requests = prompts, transcripts, requests
        self._copied = False
        self._of_prompt: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            self._of_prompt.setdefault(request.prompt.id, []).append(index)
        self._checked: tuple[int, list[int], list[int], float] | None = None
        self._began = 0.0
        self._passes = self._drafts = self._kept = 0

    def gamma(self, running: int) -> int:
        """Drafts for each row of a step that begins now; 0: none."""
        self._began = self._pays.clock()
        return self._pays.gamma(running, self._slots.count)

    def took(self, running: int) -> None:
        """That step is over."""
        seconds = self._pays.clock() - self._began
        if self._checked is None:
            self._pays.plain(running, seconds)
        else:
            gamma, drafts, kept, drafting = self._checked
            self._passes, self._drafts, self._kept = (
                self._passes + 1,
                self._drafts + sum(drafts),
                self._kept + sum(kept),
            )
            self._pays.checked(gamma, drafts, kept, drafting, seconds)
        self._checked = None

    def step(self, running: int, gamma: int) -> tuple[Tensor, list[StepTokens]]:
        """Draft and check; what was drawn, as by one plain step after the other, and the checked rows' last states."""
        slots = self._slots
        most = np.minimum(gamma, slots.room_ahead(running))
        drafts = (self._guessed if self._small is None else self._drawn)(running, most)
        drafting = self._pays.clock() - self._began
        counts = np.array([1 + len(some) for some in drafts])
        starts, owner = np.cumsum(counts) - counts, np.repeat(np.arange(running), counts)
        ahead = np.arange(len(owner)) - starts[owner]
        given, first = np.zeros(len(owner), dtype=np.int64), starts.copy()
        given[ahead > 0] = [token for some in drafts for token in some]
        tokens, at = send(self._decoder.device, given, first)
        tokens[at] = slots.last(running)
        rows, uniform = slots.rows_ahead(owner, ahead, tokens, self._prompts, self._decoder.promises_bits)
        hidden = self._decoder.step(rows, self._kv, slots.keeper)
        drawn = slots.sample(owner, self._decoder.logits(hidden), uniform)
        here = Fetched(*drawn[:2]).read()[0]
        kept = [leading(some, here[start:], self._ends) for some, start in zip(drafts, starts, strict=True)]
        self._checked = gamma, [len(some) for some in drafts], kept, drafting
        return hidden, slots.take(drawn, starts, np.array(kept) + 1)

    def details(self) -> dict[str, float]:
        found = {"engine/draft_passes": float(self._passes), "engine/drafted_tokens": float(self._drafts)}
        return found | ({"engine/draft_kept": self._kept / self._drafts} if self._drafts else {})

    def _guessed(self, running: int, most: np.ndarray) -> list[list[int]]:
        """By n-grams."""
        texts: dict[str, np.ndarray] = {}
        found = []
        for sequence, room in zip(self._slots.sequences[:running], most.tolist(), strict=True):
            assert sequence is not None, "a running row has a sequence"
            prompt = sequence.request.prompt
            if prompt.id not in texts:
                texts[prompt.id] = self._transcripts.text(prompt.token_ids, self._of_prompt[prompt.id])
            behind = self._transcripts.tail(sequence.request, sequence.index, LONGEST)
            missing = LONGEST - len(behind)
            behind = [*prompt.token_ids[-missing:], *behind] if missing else behind
            found.append(guess(texts[prompt.id], behind, room) if room else [])
        return found

    def _drawn(self, running: int, most: np.ndarray) -> list[list[int]]:
        """By the rounded policy, which is copied when it is first used."""
        assert self._small is not None, "it drafts"
        if not self._copied:
            began = self._pays.clock()
            self._small, self._copied = self._small.in_its_precision().for_steps(watched=False, drafts=True), True
            self._pays.lose(self._pays.clock() - began)
            self._began = self._pays.clock()
        slots, owner, fed = self._slots, np.arange(running), self._slots.last(running)
        drafts: list[Tensor] = []
        for ahead in range(int(most.max())):
            # A row without room for more drafts writes over its last one, and what it draws is not read.
            rows, uniform = slots.rows_ahead(owner, np.minimum(ahead, most), fed, self._prompts, apart=False)
            hidden = self._small.step(rows, self._kv, slots.keeper)
            fed = slots.sample(owner, self._small.logits(hidden), uniform)[0]
            drafts.append(fed)
        tokens = torch.stack(drafts, 1).tolist() if drafts else [[]] * running
        return [row[:count] for row, count in zip(tokens, most.tolist(), strict=True)]
