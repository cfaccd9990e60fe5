"""A run's settings: typed, frozen, and free of torch.

A range is declared beside its type; `config/` fills these from Hydra and checks how they relate. The defaults are in
`conf/`, each with its comment, and are not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_cli.support.ranges import Count, OneOf, Range

MOST_SAMPLES = 2**16
Seed = Annotated[int, Range(0, 2**64 - 1, "NumPy and PyTorch take no other")]
Steps = Annotated[int, Range(1, 10**9, "a thousand a second would take eleven days")]
Device = Annotated[str, OneOf(("auto", "cpu", "cuda"))]
Temperature = Range(1e-4, 1e4, "logits are divided by it, in float32, and greedy answers to a problem are all the same")


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How completions are drawn, except for the temperature. `top_p=1` and `top_k=0` are off.

    A completion ends with the token that completes one of the strings of `stop`, if not before. In an episode of
    several turns `max_new_tokens` bounds the whole, the environment's answers included, and `max_turn_tokens` each turn
    of the model.
    """

    top_p: Annotated[float, Range(0, 1, above=True)]
    top_k: Annotated[int, Range(0)]
    max_new_tokens: Count
    stop: tuple[str, ...]
    max_turn_tokens: Count | None

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be drawn although the model gives them probability."""
        return self.top_p < 1.0 or self.top_k > 0

    def at(self, temperature: float) -> Sampling:
        return Sampling(**{**asdict(self), "temperature": temperature})


@dataclass(frozen=True, kw_only=True)
class Sampling(SampleSettings):
    """Everything that determines how a completion is drawn. `temperature=0` is greedy."""

    temperature: Annotated[float, Temperature]

    @classmethod
    def plain(cls, max_new_tokens: int, temperature: float = 1.0) -> Sampling:
        """The model's own distribution: nothing is truncated, and no string ends a completion."""
        return cls(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            max_new_tokens=max_new_tokens,
            stop=(),
            max_turn_tokens=None,
        )


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters. `rank=0` is none: every weight is trained."""

    rank: Annotated[int, Range(0)]
    alpha: Annotated[float, Range(0, 1e6, "what adapters learn is multiplied by it", above=True)]
    dropout: Annotated[float, Range(0, 1, below=True)]
    targets: tuple[str, ...]
    dora: bool
    rslora: bool


@dataclass(frozen=True)
class ModelSettings:
    """Which weights, in which precision, and which of them are trained.

    `architecture` holds the numbers of a config.json; it is used where no folder is named (see
    `model.load.model_config`)."""

    path: str
    dtype: Annotated[str, OneOf(("auto", "float32", "bfloat16"))]  # of the weights
    autocast: Annotated[str, OneOf(("auto", "none", "bfloat16"))]  # of the computation
    random_init: bool
    trust_remote_code: bool
    gradient_checkpointing: Annotated[str, OneOf(("none", "elementwise", "full"))]
    offload_activations: bool
    quantize: Annotated[str, OneOf(("none", "8bit", "4bit"))]  # of the frozen weights
    lora: LoraSettings
    adapter: str | None
    eos_tokens: tuple[str, ...]
    chat_template_kwargs: Mapping[str, Any] | None  # for the model's own template; the task's take precedence
    architecture: Mapping[str, Any] | None
    recipe: Mapping[str, Any]  # what `auto` means in other groups (see `config.auto`)

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and the weights below them are not."""
        return self.lora.rank > 0 or self.adapter is not None

    @property
    def without_files(self) -> bool:
        """Random weights of a shape given as numbers: there is no config to read and no tokenizer."""
        is_here = self.path == "tiny" or Path(self.path).expanduser().is_dir()
        return self.random_init and self.architecture is not None and not is_here


@dataclass(frozen=True)
class TrainSettings:
    steps: Steps
    prompts: Count
    micro_batch_tokens: Count | Literal["auto"]  # decided before anything is built (`profile.micro_batch`)
    epochs: Count
    minibatches: Count
    logprob_chunk: Count
    max_bad_steps: Count
    checkpoint_every: Count
    keep_checkpoints: Count
    checkpoint: Annotated[str, OneOf(("now", "lazy"))]
    native: bool
    compile: bool | None
    threads: Count | Literal["auto"]
    count_by: Annotated[str, OneOf(("rollout", "prompt"))]
    truncated: Annotated[str, OneOf(("train", "leave_out", "zero"))]
    max_generated: Annotated[int | float | None, Range(0, because="it counts tokens; null is no bound", above=True)]
    warmup: Annotated[str, OneOf(("none", "sft"))]
    warmup_steps: Count
    warmup_path: str | None
    warmup_field: str
    warmup_lr: Annotated[float, Range(0, 1, above=True)] | None


@dataclass(frozen=True)
class OptimSettings:
    lr: Annotated[float, Range(0, 1, "an update of AdamW moves every weight by about as much", above=True)]
    betas: tuple[Annotated[float, Range(0, 1, below=True)], Annotated[float, Range(0, 1, below=True)]]
    eps: Annotated[float, Range(0, 1, "nothing is learnt with a larger one, which updates are divided by", above=True)]
    weight_decay: Annotated[float, Range(0)]
    warmup_steps: Annotated[int, Range(0)]
    schedule: Annotated[str, OneOf(("constant", "linear", "cosine"))]
    max_grad_norm: Annotated[float, Range(0, 1e15, "AdamW squares gradients, in float32", above=True)]
    name: Annotated[str, OneOf(("adamw", "adamw8bit"))]
    offload: bool
    park: bool
    ess: Annotated[str, OneOf(("none", "sqrt", "linear"))]
    ess_reference: Annotated[float, Range(0, 1, "it is a share of the rollouts", above=True)]


@dataclass(frozen=True, kw_only=True)
class ExamSettings:
    """How many problems, how many samples of each, and how those are drawn. `problems=-1` means all."""

    problems: int
    k: Annotated[int, Range(1, MOST_SAMPLES, "it is how many answers each problem is given")]
    temperature: Annotated[float, Temperature]


@dataclass(frozen=True, kw_only=True)
class EvalSettings(ExamSettings):
    problems: Count
    every: Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class SplitExamSettings(ExamSettings):
    """For `grpo eval`, which can also use the training problems."""

    split: Annotated[str, OneOf(("eval", "train"))]


@dataclass(frozen=True)
class RecordSettings:
    rollouts: Annotated[int, Range(-1)]
    tokens: bool


# Of GPUs whose memory is known (`profile.gpus`).
GpuWord = Literal["h200", "h100", "a100_80gb", "a100_40gb", "l40s", "l4", "a10", "t4", "rtx4090", "rtx3090"]


@dataclass(frozen=True)
class ProfileSettings:
    """What `grpo profile` measures; each setting is explained in `conf/profile.yaml`."""

    steps: Steps
    warmup: Annotated[int, Range(0)]
    eval: bool
    lengths: Annotated[str, OneOf(("natural", "lognormal", "full", "trace"))]
    mean: float | None
    cv: Annotated[float, Range(0, 100, "lengths are whole numbers up to sampling.max_new_tokens", above=True)]
    trace_file: str | None
    device: Device
    plan_only: bool
    for_gpu: bool | GpuWord
    fit: str | None
    trace: bool


@dataclass(frozen=True)
class RunSettings:
    """A whole training run. `parts` holds the swappable groups (task, engine, loss, ...) as plain mappings, each with
    the `_target_` that builds it."""

    n: Count
    m: int
    seed: Seed
    resume: str | None
    resume_wait: Annotated[float, Range(0)]
    accept_damage: bool
    fit: int | str  # bytes, auto or none (`profile.fit`)
    device: Device
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
    """A training run, and how to profile it."""

    profile: ProfileSettings


@dataclass(frozen=True)
class EvalRunSettings:
    """A whole `grpo eval`: its samples are drawn at the temperature of `eval`. `parts` as in `RunSettings`, without
    what only training needs."""

    checkpoint: str | None
    seed: Seed
    device: Device
    run_dir: str
    model: ModelSettings
    sampling: SampleSettings
    eval: SplitExamSettings
    parts: Mapping[str, Mapping[str, Any]]
