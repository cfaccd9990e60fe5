"""Partial rollouts: the request that continues one where it was stopped, and the joining of both into one rollout.

An engine gets a longer prompt, so it remembers nothing of what was stopped. Number t of a random stream is a
hash of `seed + t * golden ratio` (`engine/sampling.py`), so with the seed moved on by k of these the torch engine
draws the very tokens that it would have sampled, and log-probabilities agree to rounding: the first k are read, not
decoded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.engine.sampling import GOLDEN
from grpo_cli.types import ENVIRONMENT, Finish, Request, Rollout, Span


def unstarted(request: Request) -> Rollout:
    """Return a rollout without any tokens yet."""
    return Rollout(request, (), (), Finish.PARTIAL)


def remaining_request(partial: Rollout) -> Request:
    """Return the request for the tokens that a partial rollout still lacks.

    The longer prompt's id depends on its tokens, since engines compute prompts of the same id once.
    """
    request, count = partial.request, len(partial)
    assert partial.is_partial, "only a partial rollout can continue"
    if not count:
        return request
    added = hashlib.blake2b(",".join(map(str, partial.token_ids)).encode(), digest_size=8).hexdigest()
    prompt = request.prompt
    return replace(
        request,
        prompt=replace(prompt, id=f"{prompt.id}+{added}", token_ids=prompt.token_ids + partial.token_ids),
        seed=(request.seed + count * GOLDEN) % 2**64,
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - count),
        resumed_tokens=count,
        turn_tokens=partial.turn_tokens,
    )


def with_limit(partial: Rollout, limit: int) -> Rollout:
    """Return a partial rollout whose request ends at `limit` tokens; nothing may be learned from its length."""
    sampling = partial.request.sampling
    cut = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, limit))
    return replace(partial, request=replace(partial.request, sampling=cut, held_out=True))


def without_limit(made: Rollout, before: Rollout) -> Rollout:
    """Return what was made of a limited rollout, under the request that it had before; partial if it met the limit."""
    cut = made.finish is Finish.LENGTH and len(made) < before.request.sampling.max_new_tokens
    return replace(made, request=before.request, finish=Finish.PARTIAL if cut else made.finish)


def joined(partial: Rollout, rest: Rollout, version: int) -> Rollout:
    """Join a partial rollout and its continuation by weights of `version`, under the first request; still partial if
    the continuation is. An engine does not set versions."""
    spans = list(partial.spans)
    for span in rest.spans or (Span(version, len(rest)),) * (len(rest) > 0):
        which, count = (span.version if span.version == ENVIRONMENT else version), span.count
        if spans and spans[-1].version == which:
            count += spans.pop().count
        spans.append(Span(which, count))
    return Rollout(
        request=partial.request,
        token_ids=partial.token_ids + rest.token_ids,
        sampler_logprobs=partial.sampler_logprobs + rest.sampler_logprobs,
        finish=rest.finish,
        spans=tuple(spans),
    )


def with_observation(episode: Rollout, reply: Sequence[int]) -> Rollout:
    """Return an episode whose turn is over, with its observation: partial, since it continues."""
    return replace(
        episode,
        token_ids=episode.token_ids + tuple(reply),
        sampler_logprobs=episode.sampler_logprobs + (math.nan,) * len(reply),
        finish=Finish.PARTIAL,
        spans=(*episode.spans, Span(ENVIRONMENT, len(reply))),
    )
