"""Time limits in CPU seconds, so that the load of a machine hardly changes the plan that is found.

HiGHS and CBC measure wall-clock time. So a limit in CPU seconds is converted for them by the ratio of the two that was
measured when HiGHS ran last (`Pace`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.errors import TimeLimitError

_MIN_MEASURED_SECONDS = 0.05  # CPU seconds of the shortest run that is measured: the system counts hundredths
_MAX_PACE = 50.0  # largest ratio: if it is higher, the process was suspended


def cpu_seconds() -> float:
    """CPU seconds of this process and of the solver processes that it started and that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class Pace:
    """Wall-clock seconds per CPU second: more than one if other processes use the CPU too."""

    def __init__(self) -> None:
        self._pace = 1.0

    def by_the_clock(self, cpu: float) -> float:
        """The wall-clock seconds that so many CPU seconds take."""
        return cpu * self._pace

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the ratio over the `with` block, if that runs for long enough."""
        cpu, begun = cpu_seconds(), time.monotonic()
        yield
        cpu, elapsed = cpu_seconds() - cpu, time.monotonic() - begun
        if cpu >= _MIN_MEASURED_SECONDS:
            self._pace = min(max(elapsed / cpu, 1.0), _MAX_PACE)


PACE = Pace()


class Clock:
    """Counts CPU seconds up to a limit, or up to `patience` as long as nothing was found."""

    def __init__(self, limit: float, patience: float) -> None:
        self.limit, self.patience = limit, patience
        self._start, self._begun = cpu_seconds(), time.monotonic()

    @property
    def elapsed(self) -> float:
        return cpu_seconds() - self._start

    def remaining(self, has_solution: bool) -> float:
        """Seconds until the limit; if it has passed and there is no solution, seconds until the end of patience.

        Raises TimeLimitError when the patience has passed too.
        """
        elapsed = self.elapsed
        if elapsed < self.limit or has_solution:
            return max(self.limit - elapsed, 0.0)
        if elapsed > self.patience:
            raise self.too_short()
        return self.patience - elapsed

    def too_short(self) -> TimeLimitError:
        elapsed = time.monotonic() - self._begun
        if max(self.elapsed, elapsed) < self.limit:
            return TimeLimitError(
                f"the solver gave up after {elapsed:.1f} of {self.limit:.0f} seconds, without a plan: numbers of this "
                "problem may lie too far apart for it; look at the figures of the cluster, latencies and rates"
            )
        return TimeLimitError(
            f"the solver found no plan within {self.patience:.0f} seconds: give it more time_limit, "
            "a larger memory budget or a constraint such as 'fsdp'"
        )
