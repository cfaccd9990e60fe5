"""The vLLM rollout engine: vLLM in this process, under the same protocol, schedulers and samplers as the torch engine.

It has a copy of the weights, made for the first rollouts after an update and never written to disk. vLLM batches and
caches; which request enters when is decided here, by the scheduler's plan, one request per free slot. So `full` and
`infinite` are continuous batching in `slots` rows (vLLM's `max_num_seqs`), `micro` is rounds.
"""

from __future__ import annotations

import json
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from grpo_cli.engine.common import EngineParts, Tally, check_context
from grpo_cli.engine.sequence import Sequence
from grpo_cli.engine.serving import Serving, ServingEngine
from grpo_cli.engine.vllm_process import BIASING, guest, head_sizes, only
from grpo_cli.engine.vllm_served import Served
from grpo_cli.interfaces import facts
from grpo_cli.model.anatomy import merged_weights, unwrapped
from grpo_cli.support.errors import UserError, reason_of
from grpo_cli.support.extras import require
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import give_back_cached, held_by_others
from grpo_cli.types import Request

# Free bytes of a GPU withheld from vLLM, which checks again after its first allocations.
MARGIN = 2**29


@facts(is_policy=False)
class VllmEngine(ServingEngine):
    """Rollouts by vLLM. Seeds are per request, but rounding, and so tokens, may depend on the batch."""

    choice = "vllm"
    _llm: Any = None
    _stale, _asleep, _dead = True, False, ""

    def __init__(
        self,
        parts: EngineParts,
        *,
        memory: Annotated[float, Field(gt=0, lt=1)],
        max_model_len: Annotated[int, Field(ge=2)] | None,
        prefix_caching: bool,
        eager: bool | None,
        sleep: bool | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(parts)
        self._device: torch.device = next(parts.model.parameters()).device
        on_gpu = self._device.type == "cuda"
        if on_gpu and torch.cuda.get_per_process_memory_fraction() < 1:
            # PyTorch counts the memory of a sleeping vLLM as the process's own.
            raise UserError("engine=vllm needs a GPU of its own, and jobs share this one: set hydra.launcher.jobs=1")
        self._memory, self._max_model_len, self._prefix_caching = memory, max_model_len, prefix_caching
        self._eager = not on_gpu if eager is None else eager
        self._sleeps = on_gpu if sleep is None else sleep
        self._options = dict(options or {})
        own = "with a CUDA GPU, in an environment of its own"
        require("vllm", "engine=vllm", f"{own}. In a checkout: scripts/install_vllm.sh, then .venv-vllm/bin/grpo")
        if word := next(filter(BIASING.__contains__, self._options), None):
            raise UserError(f"engine.options.{word} would bias the importance ratio: leave it out")
        self._served = Served.of(parts.model, head_sizes(self._device))

    def _start(self, requests: Seq[Request]) -> Mapping[str, float]:
        more = ", or raise engine.max_model_len, engine.memory or sampler.kv_budget if they limit it"
        if self._llm is not None and self._device.type == "cpu" and _longest(requests) > self._limit():
            self.close()  # it was started for shorter requests; on a GPU, for the longest that fit
        check_context(requests, self._limit(), more)
        for temperature in (request.sampling.temperature for request in requests):
            if not (temperature == 0 or 0.01 <= temperature <= 2):
                raise UserError(f"sampling.temperature={temperature}: engine=vllm takes 0.01 to 2, or 0, greedy")
        seconds = self._wake(requests)
        check_context(requests, self._limit(), more)  # which vLLM may have lowered to what fits
        return {"engine/weight_update_seconds": seconds}

    def _advance(self, serving: Serving, entered: Seq[Sequence]) -> None:
        """Start requests and run one step. vLLM reports tokens one by one, or all at the end, which takes less time, if
        nothing depends on them before."""
        token_by_token = serving.enough is not None or any(one.request.sampling.stop for one in serving.sequences)
        for sequence in entered:
            self._enter(sequence, token_by_token)
        for output in self._step(serving.tally, len(serving.running)):
            sequence, made = serving.sequences[int(output.request_id)], output.outputs[0]
            has_ended = sequence.finish is not None
            if has_ended:
                continue  # what was on its way when it was aborted
            if not sequence.tokens:
                serving.tally.prefilled += sequence.prompt_length - (output.num_cached_tokens or 0)
            greedy = sequence.request.sampling.temperature == 0  # which draws from a point mass
            for token, logprob in zip(made.token_ids, made.logprobs.logprobs, strict=True):
                serving.add(sequence, token, 0.0 if greedy else logprob)
            assert sequence.finish or not output.finished, "vLLM gave half a completion"
            if sequence.finish and not output.finished:
                self._abort([sequence])

    def _stop(self, serving: Serving) -> None:
        """Abort what is unfinished, and free memory."""
        if not self._dead:
            self._abort(serving.running)
            if self._sleeps:
                with self._answering("does not come to rest"):
                    self._llm.sleep(level=2)  # weights too: they are copied again from the policy
                    self._asleep, self._stale = True, True

    def _abort(self, sequences: Seq[Sequence]) -> None:
        if sequences:
            with self._answering("does not come to rest"):
                self._llm.llm_engine.abort_request([str(sequence.index) for sequence in sequences])

    def _enter(self, sequence: Sequence, token_by_token: bool) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, sampling = sequence.request, sequence.request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            seed=request.seed % 2**63,  # vLLM keeps it in 64 bits with a sign on a GPU; -1 would be no seed
            stop_token_ids=list(self._parts.eos_token_ids),
            ignore_eos=True,  # only `stop_token_ids` end a completion
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if token_by_token else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        with self._answering("takes no request"):
            prompt = {"prompt_token_ids": list(request.prompt.token_ids)}
            self._llm.llm_engine.add_request(str(sequence.index), prompt, params)

    def _step(self, tally: Tally, running: int) -> list[Any]:
        """Run one forward pass of vLLM; `eager` also keeps its sampling helpers from being compiled. It counts as a
        decode step, since vLLM reads prompts in the same passes."""
        stance = "force_eager" if self._eager else "default"
        with (
            self._answering(f"failed after {tally.steps} steps with {running} rollouts under way"),
            torch.compiler.set_stance(stance),
        ):
            outputs = self._llm.llm_engine.step()
            if not outputs and not self._llm.llm_engine.has_unfinished_requests():
                raise RuntimeError(f"{running} requests were lost")
        tally.steps += 1
        tally.row_steps += running
        return list(outputs)

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Wrap every call into vLLM: disable the learner's autocast, under which vLLM would start, and adapters be
        merged, in the wrong precision; and turns whatever vLLM raises into a one-line UserError."""
        if self._dead:
            raise UserError(self._dead)
        try:
            with torch.autocast(self._device.type, enabled=False):
                yield
        except UserError:
            raise
        except Exception as error:
            self._dead = (
                f"vLLM {what}: {reason_of(error)}; go on with grpo train resume=auto, and another engine.memory or "
                "sampler.slots, or engine=torch"
            )
            raise UserError(self._dead) from error

    def _limit(self) -> int:
        """Return the most tokens of a request, prompt and reply together."""
        if self._llm is not None:
            return int(self._llm.llm_engine.vllm_config.model_config.max_model_len)
        context: int = unwrapped(self._parts.model).config.max_position_embeddings
        return min(context, self._max_model_len or context)

    def _wake(self, requests: Seq[Request]) -> float:
        """Take memory and copy the policy's weights; return the seconds of the copy."""
        if self._llm is None:
            self._build(requests)
        if self._asleep:
            give_back_cached()
        with self._answering("cannot take up its memory and weights"):
            if self._asleep:
                self._llm.wake_up(tags=["weights"])
            start = time.perf_counter()
            if self._stale:
                self._update()
            seconds = time.perf_counter() - start
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        return seconds

    def _update(self) -> None:
        weights = self._served.weights(merged_weights(self._parts.model))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the cache of prompts could not be emptied")
        self._stale = False

    def _build(self, requests: Seq[Request]) -> None:
        """Start vLLM with the slots that requests like these leave room for."""
        parts, on_gpu = self._parts, self._device.type == "cuda"
        dtype = next(parts.model.parameters()).dtype
        if torch.is_autocast_enabled(self._device.type):
            dtype = torch.get_autocast_dtype(self._device.type)
        self._served.check_dtype(dtype, self._device)
        block = self._served.token_bytes(dtype) * self._block
        longest = _longest(requests)
        rows, per_step = -(-longest // self._block), parts.rollouts_per_step
        self._slots = parts.sampler.slots_for(max(len(requests), per_step or 0), per_step)
        blocks = 1 + self._slots * rows  # vLLM keeps one block for itself
        if (budget := parts.sampler.budget_for((1 + rows) * block)) is not None:
            blocks = budget // block
            self._slots = min(self._slots, (blocks - 1) // rows)
        kwargs: dict[str, Any] = {"max_model_len": self._limit(), "dtype": str(dtype).removeprefix("torch.")}
        if budget is not None or not on_gpu:
            kwargs["kv_cache_memory_bytes"] = blocks * block
            kwargs["max_model_len"] = min(self._limit(), (blocks - 1) * self._block)
        elif self._max_model_len is None:
            kwargs["max_model_len"] = -1  # vLLM chooses the longest that fits
        if on_gpu:
            kwargs["gpu_memory_utilization"] = self._share()
        with guest(), tempfile.TemporaryDirectory() as folder, self._answering("could not be started"):
            only(self)
            self._llm = self._started(Path(folder), kwargs)
        engine = self._llm.llm_engine
        self._kv_bytes = engine.vllm_config.cache_config.num_gpu_blocks * block
        self._shutdown = weakref.finalize(self, engine.engine_core.shutdown)

    def _share(self) -> float:
        """Return the share of the whole GPU that vLLM may take: it refuses to start if that much is not free."""
        give_back_cached()
        others, free, total = held_by_others(self._device)
        if free <= MARGIN:
            found = f"{gib(free)} of the GPU's {gib(total)} are free, and other processes hold {gib(others)}"
            raise UserError(f"engine=vllm cannot start: {found}; free some of it, or use engine=torch")
        return min(self._memory, (free - MARGIN) / total)

    def close(self) -> None:
        """Shut vLLM down; the next rollouts wait for a new start."""
        if self._llm is not None:
            self._shutdown()  # runs once; the finalizer would hold vLLM's memory as long as this engine lives
            self._llm, self._stale, self._asleep = None, True, False

    @property
    def _block(self) -> int:
        """Tokens of a cache block: the fewest that vLLM's kernels support."""
        return 16 if self._device.type == "cuda" else 32

    def _started(self, folder: Path, kwargs: Mapping[str, Any]) -> Any:
        from vllm import LLM

        (folder / "config.json").write_text(json.dumps(self._served.config), encoding="utf-8")
        return LLM(
            model=str(folder),
            load_format="dummy",  # the weights come from the policy
            skip_tokenizer_init=True,
            seed=self._parts.seed % 2**32,
            max_num_seqs=self._slots,
            block_size=self._block,
            enable_prefix_caching=self._prefix_caching,
            enable_sleep_mode=self._sleeps,
            enforce_eager=self._eager,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            **kwargs,
            **self._options,
        )

    def facts(self) -> Mapping[str, Any]:
        """Return the engine's part of `summary.json`."""
        return {"invariant": False}

    def update_weights(self) -> None:
        """Have the next `generate` copy the weights first, when the update's memory is free again."""
        self._stale = True


def _longest(requests: Seq[Request]) -> int:
    """Return the most tokens of a request, prompt and reply together."""
    return max(len(request.prompt.token_ids) + request.sampling.max_new_tokens for request in requests)
