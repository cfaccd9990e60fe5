"""Assigns GPUs, shares of their memory, and threads to the jobs that run at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpo_cli
from grpo_cli.support.errors import UserError


def visible_gpus() -> list[str]:
    """CUDA_VISIBLE_DEVICES if set, else every GPU that `nvidia-smi` lists, or its MIG slices.

    Not from PyTorch, with which the launcher would hold memory on every GPU.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    return [identifier for gpu in _gpus_here() for identifier in (gpu[1:] or gpu)]


def chosen_gpus(asked: Sequence[str]) -> Sequence[str]:
    """The GPUs of `hydra.launcher.gpus`: numbers or identifiers, which may be shortened. UserError if one does not
    exist."""
    known = visible_gpus()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        here = _gpus_here()
        known = [*map(str, range(len(here))), *(identifier for gpu in here for identifier in gpu)]
    for gpu in asked:
        short = gpu.startswith(("GPU-", "MIG-"))
        if not any(name == gpu or (short and name.startswith(gpu)) for name in known):
            there = f"there are {', '.join(known)}" if known else "there is none; leave hydra.launcher.gpus out"
            raise UserError(f"hydra.launcher.gpus asks for GPU {gpu}, which is not visible here: {there}")
    return asked


def _gpus_here() -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return gpus_listed(listed.stdout) if listed.returncode == 0 else []


def gpus_listed(text: str) -> list[list[str]]:
    """The identifiers in `nvidia-smi -L`: for each GPU its own, then those of its MIG slices."""
    gpus: list[list[str]] = []
    for line in text.splitlines():
        if "UUID: " in line:
            identifier = line.rpartition("UUID: ")[2].rstrip(") ")
            gpus += [] if line.startswith(" ") else [[identifier]]
            if line.startswith(" ") and gpus:
                gpus[-1].append(identifier)
    return gpus


def places(jobs: int, gpus: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each concurrent job: its GPU, its share of the memory, its threads."""
    for_all = {"PYTHONPATH": _python_path(environment)}
    if jobs > 1 and "OMP_NUM_THREADS" not in environment:
        for_all["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    if not gpus:
        return [dict(for_all) for _ in range(jobs)]
    dealt = [gpus[i % len(gpus)] for i in range(jobs)]
    return [{**for_all, "CUDA_VISIBLE_DEVICES": gpu, "GRPO_GPU_SHARE": str(1 / dealt.count(gpu))} for gpu in dealt]


def _python_path(environment: Mapping[str, str]) -> str:
    """A PYTHONPATH from which jobs can import this package, even if it is not installed."""
    here = str(Path(grpo_cli.__file__).resolve().parents[1])
    known = environment.get("PYTHONPATH", "")
    return known if here == sysconfig.get_paths()["purelib"] else os.pathsep.join(filter(None, (known, here)))
