"""A run's settings: typed, frozen, and free of torch.

Ranges stand beside types, and pydantic checks both (`config.read`); `config.prepare` refuses settings that do not go
together. Defaults and comments are in `conf/` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field

from grpo_cli.support.formatting import parse_bytes
from grpo_cli.support.ranges import Count, MiBs

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

# What `fit` may choose: where a run is computed, and not what.
TOKENS, CHUNK, SLOTS = "train.micro_batch_tokens", "train.logprob_chunk", "sampler.slots"
RECOMPUTE, OFFLOAD = "model.gradient_checkpointing", "model.offload_activations"
PARK, STATE = "optim.park", "optim.offload"
CHOSEN_TO_FIT = {TOKENS, CHUNK, SLOTS, RECOMPUTE, OFFLOAD, PARK, STATE}

SHARE_VARIABLE = "GRPO_GPU_SHARE"  # in the environment of a sweep's job: its share of a GPU
Samples = Annotated[int, Field(ge=1, le=2**16)]  # completions of a prompt in an evaluation
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
Many = Annotated[int, Field(ge=1, le=2**22)]  # rollouts or prompts of a step: each is a Python object
Steps = Annotated[int, Field(ge=1, le=10**9)]
Device = Literal["auto", "cpu", "cuda"]
Temperature = Field(ge=1e-4, le=1e4)


class Strict:
    """Settings that pydantic reads without conversions, and without keys that it does not know."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, kw_only=True)
class SampleSettings(Strict):
    """The distribution of completions, except for the temperature. `top_p=1` and `top_k=0` are off.

    A completion ends with the token that completes one of the strings of `stop`, if not before. In an episode of
    several turns `max_new_tokens` bounds the whole, the environment's answers included, and `max_turn_tokens` each turn
    of the model.
    """

    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=0)]
    max_new_tokens: Count
    stop: tuple[Annotated[str, Field(min_length=1)], ...]
    max_turn_tokens: Count | None

    def at(self, temperature: float) -> Sampling:
        return Sampling(**{**asdict(self), "temperature": temperature})


@dataclass(frozen=True, kw_only=True)
class Sampling(SampleSettings):
    """Everything that determines how a completion is sampled. `temperature=0` is greedy."""

    temperature: Annotated[float, Temperature]

    @classmethod
    def plain(cls, max_new_tokens: int, temperature: float = 1.0) -> Sampling:
        """Return sampling from the model's own distribution: nothing is truncated, and no string ends a completion."""
        return cls(
            temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=max_new_tokens, stop=(), max_turn_tokens=None
        )


@dataclass(frozen=True)
class LoraSettings(Strict):
    """Low-rank adapters. `rank=0` is none: every weight is trained."""

    rank: Annotated[int, Field(ge=0)]
    alpha: Annotated[float, Field(gt=0, le=1e6)]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    dora: bool
    rslora: bool


@dataclass(frozen=True)
class ModelSettings(Strict):
    """The model: its weights, their precision, and which are trained.

    `architecture` holds the numbers of a config.json; it is used where no folder is named (see
    `model.load.model_config`)."""

    path: str
    dtype: Literal["auto", "float32", "bfloat16"]  # of the weights
    autocast: Literal["auto", "none", "bfloat16"]  # of the computation
    random_init: bool
    trust_remote_code: bool
    gradient_checkpointing: Literal["none", "elementwise", "full"]
    offload_activations: bool
    quantize: Literal["none", "8bit", "4bit"]  # of the frozen weights
    lora: LoraSettings
    adapter: str | None
    eos_tokens: tuple[str, ...]
    chat_template_kwargs: Mapping[str, Any] | None  # variables of the chat template
    architecture: Mapping[str, Any] | None
    recipe: Mapping[str, Any]  # what `auto` means in other groups (see `config.auto`)

    @property
    def adapted(self) -> bool:
        """True if adapters are trained, and the weights below them are not."""
        return self.lora.rank > 0 or self.adapter is not None

    @property
    def holds_reference(self) -> bool:
        """True if the reference is what lies below new adapters; saved ones are a part of it."""
        return self.adapted and self.adapter is None

    @property
    def without_files(self) -> bool:
        """Random weights of a shape given as numbers: there is no config to read and no tokenizer."""
        is_here = self.path == "tiny" or Path(self.path).expanduser().is_dir()
        return self.random_init and self.architecture is not None and not is_here


@dataclass(frozen=True)
class TrainSettings(Strict):
    steps: Steps
    prompts: Many
    micro_batch_tokens: Count | Literal["auto"]  # decided before anything is built (`memory.fit`)
    epochs: Count
    minibatches: Count
    logprob_chunk: Count
    max_bad_updates: Count
    checkpoint_every: Count
    keep_checkpoints: Count
    checkpoint: Literal["now", "lazy"]
    native: bool
    threads: Count | Literal["auto"]
    count_by: Literal["rollout", "prompt"]
    truncated: Literal["train", "leave_out", "zero"]
    max_generated: Annotated[float, Field(gt=0)] | None
    max_seconds: Annotated[float, Field(gt=0)] | None
    warmup: Literal["none", "sft"]
    warmup_steps: Count
    warmup_path: str | None
    warmup_field: str
    warmup_lr: Annotated[float, Field(gt=0, le=1)] | None


@dataclass(frozen=True)
class OptimSettings(Strict):
    lr: Annotated[float, Field(gt=0, le=1)]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    eps: Annotated[float, Field(gt=0, le=1)]
    weight_decay: Annotated[float, Field(ge=0)]
    warmup_steps: Annotated[int, Field(ge=0)]
    schedule: Literal["constant", "linear", "cosine"]
    max_grad_norm: Annotated[float, Field(gt=0, le=1e15)]
    name: Literal["adamw", "adamw8bit"]
    offload: bool
    park: bool
    ess: Literal["none", "sqrt", "linear"]
    ess_reference: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class ExamSettings(Strict):
    """The size of an evaluation, and the sampling of its completions. `problems=-1` means all."""

    problems: Count | Literal[-1]
    k: Samples
    temperature: Annotated[float, Temperature]


@dataclass(frozen=True, kw_only=True)
class EvalSettings(ExamSettings):
    problems: Count
    every: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class SplitExamSettings(ExamSettings):
    """The evaluation of `grpo eval`, which can also use the training problems."""

    split: Literal["eval", "train"]


@dataclass(frozen=True)
class RecordSettings(Strict):
    rollouts: Annotated[int, Field(ge=-1)]
    tokens: bool


# Of GPUs whose memory is known (`memory.profile`).
GpuWord = Literal["h200", "h100", "a100_80gb", "a100_40gb", "l40s", "l4", "a10", "t4", "rtx4090", "rtx3090"]


@dataclass(frozen=True)
class ProfileSettings(Strict):
    """The measurements of `grpo profile`; each setting is explained in `conf/profile.yaml`."""

    steps: Steps
    warmup: Annotated[int, Field(ge=0)]
    eval: bool
    lengths: Literal["natural", "full"]
    plan_only: bool
    for_gpu: Literal[False] | GpuWord

    @property
    def measures(self) -> bool:
        return not (self.plan_only or self.for_gpu)


@dataclass(frozen=True)
class RunSettings(Strict):
    """A whole training run. `parts` holds the swappable groups (task, engine, loss, ...) as plain mappings, each with
    the `_target_` that builds it."""

    n: Many
    m: Many
    seed: Seed
    resume: str | None
    accept_damage: bool
    fit: Literal["none", "auto"] | MiBs
    device: Device
    run_dir: str
    model: ModelSettings
    train: TrainSettings
    sampling: Sampling
    optim: OptimSettings
    eval: EvalSettings
    record: RecordSettings
    parts: Mapping[str, Mapping[str, Any]]

    @property
    def fit_bytes(self) -> int | None:
        """The size that was typed for `fit`."""
        return None if self.fit in ("none", "auto") else parse_bytes(self.fit)


@dataclass(frozen=True)
class ProfileRunSettings(RunSettings):
    """A training run, and how to profile it."""

    profile: ProfileSettings


@dataclass(frozen=True)
class EvalRunSettings(Strict):
    """A whole `grpo eval`: it samples at the temperature of `eval`. `parts` as in `RunSettings`, without
    what only training needs."""

    checkpoint: str | None
    seed: Seed
    device: Device
    run_dir: str
    model: ModelSettings
    sampling: SampleSettings
    eval: SplitExamSettings
    parts: Mapping[str, Mapping[str, Any]]


Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)
