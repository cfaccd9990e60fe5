"""Assigns GPUs, shares of their memory, and threads to the jobs that run at the same time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpo_cli
from grpo_cli.support.errors import UserError


def visible_gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES if set, else every GPU that `nvidia-smi` lists, or its MIG slices. PyTorch is not
    asked, with which the launcher would hold memory on every GPU."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    return [identifier for gpu in _gpus_here() for identifier in (gpu[1:] or gpu)]


def chosen_gpus(typed: Sequence[str]) -> Sequence[str]:
    """Return the GPUs of `hydra.launcher.gpus`: numbers or identifiers, which may be shortened. UserError if one does
    not exist."""
    known = visible_gpus()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        here = _gpus_here()
        known = [*map(str, range(len(here))), *(identifier for gpu in here for identifier in gpu)]
    for gpu in typed:
        short = gpu.startswith(("GPU-", "MIG-"))
        if not any(name == gpu or (short and name.startswith(gpu)) for name in known):
            there = f"there are {', '.join(known)}" if known else "there is none; leave hydra.launcher.gpus out"
            raise UserError(f"hydra.launcher.gpus asks for GPU {gpu}, which is not visible here: {there}")
    return typed


def _gpus_here() -> list[list[str]]:
    """Return the identifiers in `nvidia-smi -L`: for each GPU its own, then those of its MIG slices."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    gpus: list[list[str]] = []
    for indent, identifier in re.findall(r"(?m)^(\s*)\S.*UUID: ([^) ]+)", listed.stdout * (listed.returncode == 0)):
        gpus[-1].append(identifier) if indent and gpus else gpus.append([identifier])
    return gpus


def places(jobs: int, gpus: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each concurrent job: its GPU, its share of the memory, its threads, and a PYTHONPATH
    that has this package."""
    here, path = str(Path(grpo_cli.__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")
    if here != sysconfig.get_paths()["purelib"]:
        path = os.pathsep.join(filter(None, (path, here)))
    for_all = {"PYTHONPATH": path}
    if jobs > 1 and "OMP_NUM_THREADS" not in environment:
        for_all["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    dealt = [gpus[i % len(gpus)] for i in range(jobs)] if gpus else []
    shares = [{"CUDA_VISIBLE_DEVICES": gpu, "GRPO_GPU_SHARE": str(1 / dealt.count(gpu))} for gpu in dealt]
    return [for_all | share for share in shares or [{}] * jobs]
