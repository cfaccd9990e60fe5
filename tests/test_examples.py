"""The notebook, run from its first cell to its last in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "scripts" / "examples" / "first_run.ipynb"


@pytest.mark.process
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the extra dev has nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    for name, folder in (("JUPYTER_PATH", "jupyter"), ("IPYTHONDIR", "ipython")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "here"}
    (place := tmp_path / "jupyter" / "kernels" / "here").mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps({**spec, "language": "python"}))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert ["image/png" in output.get("data", {}) for output in kept].count(True) == 2
    assert not [output for output in kept if re.search("[ ~]/", output.get("text", ""))], "no place of a machine"
    here = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="here", resources=here).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    said = ["".join(out.get("text", "") or str(out.get("data", "")) for out in each) for each in outputs]
    assert "'completed'" in said[1] and "'image/png'" in said[3] and "'image/png'" in said[5]
    assert "with every rollout at full length" in said[-1]
    runs = sorted((tmp_path / "outputs" / "notebook").iterdir())
    ended = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [(one["step"], one["trained_rollouts"]) for one in ended] == [(20, 20 * 8 * 8), (20, 20 * 8 * 4)]
