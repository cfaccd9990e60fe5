"""Assigns GPUs, shares of their memory, and threads to the jobs that run at the same time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence

from grpo_cli.runs.record import SOURCE
from grpo_cli.settings import SHARE_VARIABLE
from grpo_cli.support.errors import UserError


def visible_gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES if set, else the number of every GPU of `nvidia-smi`. With PyTorch the launcher would
    hold memory on every GPU."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return re.findall(r"(?m)^GPU (\d+):", listed.stdout)


def chosen_gpus(typed: Sequence[str]) -> Sequence[str]:
    """Return the GPUs of `hydra.launcher.gpus`. UserError if one is not visible."""
    known = visible_gpus()
    if missing := [gpu for gpu in typed if gpu not in known]:
        there = f"there are {', '.join(known)}" if known else "there is none; leave hydra.launcher.gpus out"
        raise UserError(f"hydra.launcher.gpus asks for GPU {missing[0]}, which is not visible here: {there}")
    return typed


def places(jobs: int, gpus: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each concurrent job: its GPU, its share of the memory, its threads, and a PYTHONPATH
    that has this package."""
    here, path = str(SOURCE), environment.get("PYTHONPATH", "")
    if here != sysconfig.get_paths()["purelib"]:
        path = os.pathsep.join(filter(None, (path, here)))
    for_all = {"PYTHONPATH": path}
    if jobs > 1 and environment.get("OMP_NUM_THREADS", "") in ("", "0"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for_all["OMP_NUM_THREADS"] = str(max(1, cores // jobs))
    dealt = [gpus[i % len(gpus)] for i in range(jobs)] if gpus else []
    shares = [{"CUDA_VISIBLE_DEVICES": gpu, SHARE_VARIABLE: str(1 / dealt.count(gpu))} for gpu in dealt]
    return [for_all | share for share in shares or [{}] * jobs]
