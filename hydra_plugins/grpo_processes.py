"""Where Hydra looks for launchers: it takes them only from this namespace, which other plugins share."""

from __future__ import annotations

from grpo_cli.sweep import launcher


class ProcessLauncher(launcher.ProcessLauncher):
    """`hydra/launcher=processes`, the default of `-m`."""
