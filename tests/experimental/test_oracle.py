"""A predictor of the lengths that an earlier run recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_predict import request, rollout

from grpo_cli.experimental.oracle import Oracle
from grpo_cli.support.errors import UserError


def trace_file(folder: Path, rows: Sequence[tuple[int, str, int, int]]) -> Path:
    path, names = folder / "rollouts.jsonl", ("step", "prompt_id", "sample", "length")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True)) | {"reply": "x"}) + "\n" for row in rows))
    return path


def test_a_prompt_gets_the_lengths_of_its_recorded_steps_in_turn_also_after_a_resume(tmp_path: Path) -> None:
    path = trace_file(tmp_path, [(4, "a", 0, 40), (1, "a", 1, 12), (1, "a", 0, 10), (4, "a", 1, 42), (1, "b", 0, 11)])
    predictor, both = Oracle(path), [request("a"), request("a", 1)]
    assert predictor.predict([*both, request("b")], None) == [10.0, 12.0, 11.0]
    predictor.learn([rollout(one, 10) for one in both], None)
    resumed = Oracle(path)
    resumed.load_state(json.loads(json.dumps(predictor.state())))
    for one in (predictor, resumed):
        assert one.predict(both, None) == [40.0, 42.0]
        with pytest.raises(UserError, match="sample 2 of prompt a .*record.rollouts=-1"):
            one.predict([request("a"), request("a", 2)], None)
        assert one.predict([request("not recorded")], None) is None
        assert one.predict([replace(request("a"), held_out=True)], None) is None
