"""The plain numbers and words a run is made with: typed, frozen, free of torch, and with no rule attached.

`config/` fills these from Hydra and checks how they relate; everybody else only reads them. The defaults live in
`conf/`, where each has its comment, so none is repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How completions are drawn, at whatever temperature. `top_p=1` and `top_k=0` are off.

    A completion ends with the token that completes one of the strings of `stop`, if not before.
    """

    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...]

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be drawn although the model gives them probability."""
        return self.top_p < 1.0 or self.top_k > 0

    def at(self, temperature: float) -> Sampling:
        return Sampling(**{**asdict(self), "temperature": temperature})


@dataclass(frozen=True, kw_only=True)
class Sampling(SampleSettings):
    """All that says how a completion is drawn. `temperature=0` is greedy."""

    temperature: float

    @classmethod
    def plain(cls, max_new_tokens: int, temperature: float = 1.0) -> Sampling:
        """As the model says: nothing is truncated, and no string ends a completion."""
        return cls(temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=max_new_tokens, stop=())


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters. `rank=0` is none: every weight is trained."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class ModelSettings:
    """Which weights, in which precision, and which of them are trained.

    `architecture` holds the numbers of a config.json; it speaks where no folder does (see `model.load.model_config`).
    """

    path: str
    dtype: str  # float32 | bfloat16: of the weights
    autocast: str  # none | bfloat16: of the computation
    random_init: bool
    trust_remote_code: bool
    gradient_checkpointing: bool
    offload_activations: bool
    quantize: str  # none | 8bit | 4bit: of the frozen weights
    lora: LoraSettings
    adapter: str | None
    eos_tokens: tuple[str, ...]
    architecture: Mapping[str, Any] | None
    recipe: Mapping[str, Any]  # what `auto` stands for in other groups (see `config.recipe`)

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and the weights below them are not."""
        return self.lora.rank > 0 or self.adapter is not None

    @property
    def without_files(self) -> bool:
        """Random weights of a shape given in numbers: there is no config to read, nor a tokenizer."""
        is_here = self.path == "tiny" or Path(self.path).expanduser().is_dir()
        return self.random_init and self.architecture is not None and not is_here


@dataclass(frozen=True)
class TrainSettings:
    steps: int
    prompts: int
    micro_batch_tokens: int | Literal["auto"]  # decided before anything is built (`profile.micro_batch`)
    epochs: int
    minibatches: int
    logprob_chunk: int
    max_bad_steps: int
    checkpoint_every: int
    keep_checkpoints: int
    padding_free: bool
    shared_prefix: bool
    compile: bool | None
    count_by: str  # rollout | prompt
    max_generated: int | float | None
    history: str | None


@dataclass(frozen=True)
class OptimSettings:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_steps: int
    schedule: str  # constant | linear | cosine
    max_grad_norm: float
    name: str  # adamw | adamw8bit
    offload: bool
    ess: str  # none | sqrt | linear
    ess_reference: float


@dataclass(frozen=True, kw_only=True)
class ExamSettings:
    """How many problems, how many samples of each, and how those are drawn. `problems=-1` is all."""

    problems: int
    k: int
    temperature: float


@dataclass(frozen=True, kw_only=True)
class EvalSettings(ExamSettings):
    every: int


@dataclass(frozen=True, kw_only=True)
class SplitExamSettings(ExamSettings):
    """Of `grpo eval`, which may also look at the problems to train on."""

    split: str  # eval | train


@dataclass(frozen=True)
class RecordSettings:
    rollouts: int
    tokens: bool


# Of GPUs whose memory and speed are known (`profile.roofline`).
GpuWord = Literal["h200", "h100", "a100_80gb", "a100_40gb", "l40s", "l4", "a10", "t4", "rtx4090", "rtx3090"]


@dataclass(frozen=True)
class ProfileSettings:
    """How `grpo profile` looks at a run; each word has its comment in `conf/profile.yaml`."""

    steps: int
    warmup: int
    eval: bool
    lengths: str  # natural | lognormal | full | trace
    mean: float | None
    cv: float
    trace_file: str | None
    device: str
    plan_only: bool
    for_gpu: bool | GpuWord
    fit: str | None
    trace: bool


@dataclass(frozen=True)
class RunSettings:
    """A whole training run. `parts` holds the swappable groups (task, engine, loss, ...) as plain mappings, each with
    the `_target_` that builds it."""

    n: int
    m: int
    seed: int
    resume: str | None
    resume_wait: float
    accept_damage: bool
    device: str
    run_dir: str
    model: ModelSettings
    train: TrainSettings
    sampling: Sampling
    optim: OptimSettings
    eval: EvalSettings
    record: RecordSettings
    parts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ProfileRunSettings(RunSettings):
    """A training run, and how it is to be looked at."""

    profile: ProfileSettings


@dataclass(frozen=True)
class EvalRunSettings:
    """A whole `grpo eval`: its samples are drawn at the temperature of `eval`. `parts` as in `RunSettings`, without
    what only training needs."""

    checkpoint: str | None
    seed: int
    device: str
    run_dir: str
    model: ModelSettings
    sampling: SampleSettings
    eval: SplitExamSettings
    parts: Mapping[str, Mapping[str, Any]]
