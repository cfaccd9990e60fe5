"""Puts the choices of `grpo_cli/experimental/conf/` on the path where Hydra looks for choices."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from grpo_cli.config.choices import EXPERIMENTAL


class Experimental(SearchPathPlugin):
    """Those of `conf/` come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("grpo-experimental", f"file://{EXPERIMENTAL}")
