"""Collectives without a consumer are waited for in a later call, not by the thread that frees them last."""

from __future__ import annotations

import threading
from typing import Any

from autopar.runtime.communication.unwanted import end_those_left, leave


class Under:
    """Replaces a flight, and records the threads that abandon it."""

    def __init__(self) -> None:
        self.ended_by: list[int] = []

    def abandon(self) -> None:
        self.ended_by.append(threading.get_ident())


def test_another_thread_leaves_them_to_the_next_call() -> None:
    flight: Any = Under()
    here = threading.get_ident()
    other = threading.Thread(target=leave, args=([flight], here))
    other.start()
    other.join()
    assert flight.ended_by == []
    end_those_left()
    end_those_left()
    assert flight.ended_by == [here]


def test_the_thread_of_the_call_ends_them_at_once() -> None:
    flight: Any = Under()
    leave([flight], threading.get_ident())
    assert flight.ended_by == [threading.get_ident()]
