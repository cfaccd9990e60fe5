"""Where Hydra looks for launchers: it takes them only from this namespace, which other plugins share."""

from __future__ import annotations

from typing import Any

from hydra.plugins.launcher import Launcher


class ProcessLauncher(Launcher):
    """`hydra/launcher=processes`, the default of `-m`. Hydra imports it for every command, and it ours for a sweep."""

    def __init__(self, jobs: Any, gpus: Any) -> None:
        from grpo_cli.sweep import launcher

        self._ours = launcher.ProcessLauncher(jobs, gpus)

    def setup(self, **words: Any) -> None:
        self._ours.setup(**words)

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        return self._ours.launch(job_overrides, initial_job_idx)
