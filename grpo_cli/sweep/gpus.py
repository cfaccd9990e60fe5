"""Which GPU, which part of it, and how many threads each of the jobs that run at a time gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpo_cli


def visible_gpus() -> list[str]:
    """What this process may see: the environment's choice, else every GPU (or MIG slice) that `nvidia-smi` lists.

    PyTorch is not asked: the launcher would hold memory on every GPU.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return gpus_listed(listed.stdout) if listed.returncode == 0 else []


def gpus_listed(text: str) -> list[str]:
    """The identifiers in `nvidia-smi -L`. A GPU that is cut into slices is there as its slices only."""
    gpus: list[list[str]] = []
    for line in text.splitlines():
        if "UUID: " in line:
            identifier = line.rpartition("UUID: ")[2].rstrip(") ")
            gpus += [] if line.startswith(" ") else [[identifier]]
            if line.startswith(" ") and gpus:
                gpus[-1].append(identifier)
    return [identifier for gpu in gpus for identifier in (gpu[1:] or gpu)]


def places(jobs: int, gpus: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """What each of the jobs that run at a time has in its environment: its GPU, its part of it, its threads."""
    for_all = {"PYTHONPATH": _python_path(environment)}
    if jobs > 1 and "OMP_NUM_THREADS" not in environment:
        for_all["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    if not gpus:
        return [dict(for_all) for _ in range(jobs)]
    dealt = [gpus[i % len(gpus)] for i in range(jobs)]
    return [{**for_all, "CUDA_VISIBLE_DEVICES": gpu, "GRPO_GPU_SHARE": str(1 / dealt.count(gpu))} for gpu in dealt]


def _python_path(environment: Mapping[str, str]) -> str:
    """So that a job finds this very package, also where it is not installed."""
    here = str(Path(grpo_cli.__file__).resolve().parents[1])
    known = environment.get("PYTHONPATH", "")
    return known if here == sysconfig.get_paths()["purelib"] else os.pathsep.join(filter(None, (known, here)))
