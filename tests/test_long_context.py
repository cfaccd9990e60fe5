"""What long completions are predicted to take (scripts/long_context.py), lever by lever."""

from __future__ import annotations

import long_context
import pytest

pytestmark = pytest.mark.study


def test_no_lever_raises_the_peak_and_those_of_the_update_lower_it() -> None:
    small = ["model=smollm2_135m", "model.architecture.num_hidden_layers=2"]
    asked = long_context.options([*small, "--tokens", "600", "--prompt", "20", "--n", "4", "--rank", "4"])
    found = dict(long_context.predictions(asked))
    peaks = [prediction.peak for prediction in found.values()]
    assert list(found) == list(long_context.LEVERS) and peaks == sorted(peaks, reverse=True)
    assert len(set(peaks[:4])) == 4


def test_eight_completions_of_20000_tokens_take_less_than_40_gb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token's keys and values are 131,072 bytes: those of 8 x 20,000 and of a prompt of 256 are 21 GB, and while the
    last of them come, those of a layer's keys lie there twice (a 64th)."""
    words = [words for name, words in long_context.LEVERS.items() if "slots" not in name][:-1]
    monkeypatch.setattr(long_context, "LEVERS", {"all": sum(words, ())})
    long_context.main([])
    name, _, kv, _, _, peak = capsys.readouterr().out.splitlines()[1].split()
    assert name == "all" and float(kv) == pytest.approx(21.0 * 65 / 64, abs=0.1) and float(kv) < float(peak) < 40
