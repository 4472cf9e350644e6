"""What has to hold of peaks that ranks measured, beside what their plan predicted."""

from __future__ import annotations

from typing import Any


def check_peak(found: dict[str, Any], *, under: float, over: float) -> None:
    """`under`: what a run may need beyond the prediction; `over`: the prediction beyond a run; both in parts."""
    assert "value" in found, found
    measured, predicted = found["value"]["measured"], found["value"]["predicted"]
    assert len(set(measured)) == 1, f"the peak differs from run to run: {measured}"
    assert measured[0] <= predicted * (1 + under), f"{measured[0]} bytes, predicted {predicted}"
    assert predicted <= measured[0] * (1 + over), f"{measured[0]} bytes, predicted {predicted}"
