"""The vLLM rollout engine: vLLM in this process, under the same protocol, schedulers and samplers as the torch engine.

It has a copy of the weights, made for the first rollouts after an update and never written to disk. vLLM batches and
caches; which request enters when is decided here, by the scheduler's plan, one request per free slot. So `full` and
`infinite` are continuous batching in `slots` rows (vLLM's `max_num_seqs`), `micro` is rounds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
from pydantic import Field

from grpo_cli.engine.admission import Admission
from grpo_cli.engine.common import SequenceEngine, Tally, check_context
from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.length_predictor import Predictor
from grpo_cli.engine.samplers import KvShape, Sampler
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Decode, Sequence, Status
from grpo_cli.engine.vllm_process import OLD_RUNNER, check_options, guest, head_sizes, only, require_vllm, runner_of
from grpo_cli.engine.vllm_served import Served
from grpo_cli.interfaces import Meter, facts
from grpo_cli.model.anatomy import unwrapped
from grpo_cli.model.weights import merged_weights
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.formatting import gib, parse_bytes
from grpo_cli.support.memory import asked_of_allocator, give_back_cached, held_by_others
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import EngineStats, Finish, Request, Rollout

# Free bytes of a GPU withheld from vLLM, which checks again after its first allocations.
MARGIN = 2**29


@facts(is_policy=False)
class VllmEngine(SequenceEngine):
    """Rollouts by vLLM. Seeds are per request, but rounding, and so tokens, may depend on the batch."""

    reads_stop_strings = True

    def __init__(
        self,
        model: Any,
        eos_token_ids: Seq[int],
        sampler: Sampler,
        scheduler: Scheduler,
        predictor: Predictor,
        sparsity: Dense | Budget,
        rollouts_per_step: int | None = None,
        seed: int = 0,
        decode: Decode | None = None,
        meter: Meter | None = None,
        warn: Callable[[str], None] = print,
        *,
        memory: Annotated[float, Field(gt=0, lt=1)],
        max_model_len: Annotated[int, Field(ge=2)] | None,
        prefix_caching: bool,
        eager: bool | None,
        sleep: bool | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        self._span, self._warn = (meter or NullMeter()).span, warn
        self._model, self._eos, self._decode = model, tuple(eos_token_ids), decode
        self._sampler, self._scheduler, self._predictor = sampler, scheduler, predictor
        self._rollouts_per_step, self._seed = rollouts_per_step, seed
        self._memory, self._max_model_len, self._options = memory, max_model_len, dict(options or {})
        self._device: torch.device = next(model.parameters()).device
        on_gpu = self._device.type == "cuda"
        self._eager = not on_gpu if eager is None else eager
        self._sleeps = on_gpu if sleep is None else sleep
        self._prefix_caching = prefix_caching
        problems = [*self.refuses(scheduler, predictor, sparsity)]
        if self._sleeps and not on_gpu:
            problems.append("engine.sleep=true needs a GPU: vLLM cannot give back a CPU's memory; leave it out")
        if self._sleeps and (asked := asked_of_allocator(os.environ, "expandable_segments:True")):
            problems.append(
                f"{asked} in the environment: vLLM sleeps by an allocator of its own, which has no segments that grow; "
                "unset it, or let vLLM keep its memory while weights are updated, engine.sleep=false"
            )
        refuse(problems)
        require_vllm()
        check_options(self._options)
        self._served = Served.of(model, head_sizes(self._device))
        self._llm: Any = None
        self._slots = self._kv_bytes = 0
        self._stale, self._asleep, self._dead = True, False, ""
        self._runner: str | None = None

    @staticmethod
    def refuses(scheduler: Scheduler, predictor: Predictor, sparsity: Dense | Budget) -> Iterator[str]:
        """Yield what can be checked without a model."""
        if isinstance(sparsity, Budget):
            name = type(sparsity).__name__.lower()
            yield f"sparsity={name} is not supported by engine=vllm; choose engine=torch or sparsity=dense"
        if scheduler.needs_lengths and predictor.prefix_tokens > 0:
            yield (
                "engine=vllm does not expose its hidden states, which predictor=prefix reads; choose predictor=mean, "
                "or scheduler=fifo"
            )

    def generate(self, requests: Seq[Request], enough: Callable[[Rollout], bool] | None = None) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of finishing. With `enough` or stop strings vLLM reports every token
        when it is sampled, which costs some time; once `enough` returns True, unfinished requests are aborted, and are
        partial."""
        self._stats = EngineStats()
        if not requests:
            return
        self._check(requests)
        details = {"engine/memory_before_bytes": self._held()}
        details["engine/weight_update_seconds"] = self._wake(requests)
        details["engine/memory_awake_bytes"] = self._held()
        sequences, tally = [Sequence(index, one) for index, one in enumerate(requests)], Tally(self._slots)
        if predicts := self._predictor.prefix_tokens == 0:
            self._predict(sequences)
        served = list[tuple[Sequence, Rollout]]()
        try:
            for sequence, rollout in self._serve(sequences, enough, tally):
                served.append((sequence, rollout))
                yield rollout
        finally:
            self._rest([one for one in sequences if one.status is Status.RUNNING])
            details["engine/memory_after_bytes"] = self._held()
            if predicts and len(served) == len(requests):
                details |= self._learn(served)
            self._stats = tally.stats(self._kv_bytes, details | dict(self._scheduler.details))

    def _serve(
        self, sequences: Seq[Sequence], enough: Callable[[Rollout], bool] | None, tally: Tally
    ) -> Iterator[tuple[Sequence, Rollout]]:
        admission = Admission(self._slots, self._sampler.refills)
        admission.start(self._scheduler, sequences)
        running, stopped = list[Sequence](), False
        token_by_token = enough is not None or any(one.request.sampling.stop for one in sequences)
        while (admission or running) and not stopped:
            for sequence in admission.admit(running):
                self._enter(sequence, token_by_token)
                running.append(sequence)
            with self._span("decode"):  # prompts included: vLLM mixes them in
                outputs = self._step(tally, len(running))
            for output in outputs:
                sequence = sequences[int(output.request_id)]
                if sequence.status is not Status.RUNNING:
                    continue  # what was on its way when it was aborted
                self._note(sequence, output, tally)
                if sequence.finish is None:
                    assert not output.finished, "vLLM gave half a completion"
                    continue
                if not output.finished:
                    self._abort([sequence])
                sequence.status = Status.FINISHED
                running.remove(sequence)
                rollout = sequence.rollout()
                tally.generated += len(rollout)
                stopped = stopped or (enough is not None and enough(rollout))
                yield sequence, rollout
        self._abort(running)
        for sequence in sequences:  # if it was stopped
            if sequence.status is not Status.FINISHED:
                sequence.status = Status.FINISHED
                tally.generated += len(sequence.tokens)
                yield sequence, sequence.rollout(Finish.PARTIAL)

    def _note(self, sequence: Sequence, output: Any, tally: Tally) -> None:
        """Add the tokens that an output reports: all, or those since the previous one."""
        if not sequence.tokens:
            tally.prefilled += sequence.prompt_length - (output.num_cached_tokens or 0)
        made, greedy = output.outputs[0], sequence.request.sampling.temperature == 0  # which draws from a point mass
        for token, logprob in zip(made.token_ids, made.logprobs.logprobs, strict=True):
            sequence.append(token, 0.0 if greedy else logprob)
            sequence.kept = len(sequence.tokens) - 1
            if sequence.ends(self._eos, self._decode):
                break

    def _abort(self, sequences: Seq[Sequence]) -> None:
        if sequences:
            with self._answering("does not come to rest"):
                self._llm.llm_engine.abort_request([str(sequence.index) for sequence in sequences])

    def _enter(self, sequence: Sequence, token_by_token: bool) -> None:
        """Start a sequence. vLLM reports its tokens one by one, or all at the end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, sampling = sequence.request, sequence.request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            seed=request.seed % 2**63,  # vLLM keeps it in 64 bits with a sign on a GPU; -1 would be no seed
            stop_token_ids=list(self._eos),
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
        sequence.status = Status.RUNNING

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
        """Wraps every call into vLLM: disables the learner's autocast, under which vLLM would start, and adapters be
        merged, in the wrong precision; and turns whatever vLLM raises into a one-line UserError."""
        if self._dead:
            raise UserError(self._dead)
        try:
            with torch.autocast(self._device.type, enabled=False):
                yield
        except UserError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or "no reason given"
            self._dead = (
                f"vLLM {what}: {type(error).__name__}: {reason}; the last finished step is kept, go on from it with "
                "grpo train resume=auto, with less memory taken (engine.memory, sampler.slots) or with engine=torch"
            )
            raise UserError(self._dead) from error

    def _check(self, requests: Seq[Request]) -> None:
        check_context(requests, self._limit(), ", or raise engine.max_model_len or sampler.kv_budget if they limit it")
        for temperature in (request.sampling.temperature for request in requests):
            if not (temperature == 0 or 0.01 <= temperature <= 2):
                raise UserError(
                    f"sampling.temperature={temperature}: engine=vllm clamps it to 0.01 to 2 (or 0, greedy), and would "
                    "sample from another distribution"
                )

    def _limit(self) -> int:
        """Return the most tokens of a request, prompt and reply together."""
        if self._llm is not None:
            return int(self._llm.llm_engine.vllm_config.model_config.max_model_len)
        context: int = unwrapped(self._model).config.max_position_embeddings
        return min(context, self._max_model_len or context)

    def _wake(self, requests: Seq[Request]) -> float:
        """Take memory and copy the policy's weights; returns the seconds of the copy."""
        if self._llm is None:
            self._build(requests)
        if self._asleep:
            give_back_cached(self._device)
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
        weights = self._served.weights(merged_weights(self._model))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the cache of prompts could not be emptied")
        self._stale = False

    def _rest(self, running: Seq[Sequence]) -> None:
        """Abort what is unfinished, and free memory."""
        if self._dead:
            return
        self._abort(running)
        with self._answering("does not come to rest"):
            if self._sleeps:
                self._llm.sleep(level=2)  # weights too: they are copied again from the policy
                self._asleep, self._stale = True, True

    def _build(self, requests: Seq[Request]) -> None:
        dtype, kind = next(self._model.parameters()).dtype, self._device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self._served.check_dtype(dtype, self._device)
        block = self._served.token_bytes(dtype) * self._block
        rows = -(-max(_tokens(request) for request in requests) // self._block)
        at_once = self._rollouts_per_step or len(requests)
        # vLLM keeps one block for itself.
        shape = KvShape(at_once, prompts=1, prompt_bytes=block, page_bytes=rows * block, slot_bytes=rows * block)
        self._slots = self._sampler.fit(shape, at_once).slots
        kwargs: dict[str, Any] = {"max_model_len": self._limit()}
        blocks = 0 if self._device.type == "cuda" else 1 + self._slots * rows
        if self._sampler.kv_budget is not None:
            blocks = parse_bytes(self._sampler.kv_budget) // block
        if blocks:
            kwargs["kv_cache_memory_bytes"] = blocks * block
            kwargs["max_model_len"] = min(self._limit(), (blocks - 1) * self._block)
        if self._device.type == "cuda":
            kwargs["gpu_memory_utilization"] = self._share()
        with guest(), tempfile.TemporaryDirectory() as folder, self._answering("could not be started"):
            only(self)
            self._llm = self._started(Path(folder), kwargs | {"dtype": str(dtype).removeprefix("torch.")})
        self._runner = runner_of(self._llm)
        if self._device.type == "cuda" and self._runner == OLD_RUNNER:
            self._warn(
                "vLLM runs this model by its older runner, which draws for one rollout after the other, each by its "
                "own seed: slow with hundreds (VLLM_USE_V2_MODEL_RUNNER=1 in the environment asks for the other)"
            )
        cache = self._llm.llm_engine.vllm_config.cache_config
        self._kv_bytes = cache.num_gpu_blocks * block
        self._shutdown = weakref.finalize(self, self._llm.llm_engine.engine_core.shutdown)

    def _share(self) -> float:
        """Return the share of the whole GPU that vLLM may take: it refuses to start if that much is not free."""
        give_back_cached(self._device)
        others, free, total = held_by_others(self._device)
        most = (free - MARGIN) / total
        if most >= self._memory:
            return self._memory
        found = f"{gib(free)} of the GPU's {gib(total)} are free, and other processes hold {gib(others)}"
        if most <= 0:
            raise UserError(f"engine=vllm cannot start: {found}; free some of it, or use engine=torch")
        self._warn(
            f"engine.memory={self._memory:g}: {found}, so vLLM takes {most:.2f} of it. The optimizer takes its part in "
            "the first update: where nothing is left for it, lower engine.memory"
        )
        return most

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
            seed=self._seed % 2**32,
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

    def _held(self) -> float:
        """Return the bytes in use: of the whole GPU (vLLM has its own allocator), or resident in this process."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return float(total - free)
        return float(psutil.Process().memory_info().rss)

    def facts(self) -> Mapping[str, Any]:
        """Return facts for `summary.json`; `model_runner` is None before vLLM starts."""
        return {"invariant": False, "model_runner": self._runner}

    def update_weights(self) -> None:
        """Have the next `generate` copy the weights first, when the update's memory is free again."""
        self._stale = True


def _tokens(request: Request) -> int:
    return len(request.prompt.token_ids) + request.sampling.max_new_tokens
