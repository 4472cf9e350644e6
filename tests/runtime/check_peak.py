"""The check of peaks that ranks measured against the prediction of their plan."""

from __future__ import annotations

from typing import Any


def check_peak(found: dict[str, Any], *, under: float, over: float) -> None:
    """As fractions: by how much a measured peak may exceed the prediction (`under`), and be below it (`over`)."""
    assert "value" in found, found
    measured, predicted = found["value"]["measured"], found["value"]["predicted"]
    assert len(set(measured)) == 1, f"the peak differs from run to run: {measured}"
    assert measured[0] <= predicted * (1 + under), f"{measured[0]} bytes, predicted {predicted}"
    assert predicted <= measured[0] * (1 + over), f"{measured[0]} bytes, predicted {predicted}"
