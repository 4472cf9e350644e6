"""A stopwatch of the CPU seconds that stages of planning take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """CPU seconds of this process by stage; a stage that runs several times has their sum.

    >>> watch = Stopwatch({"trace": 1.0})
    >>> with watch.stage("solve"):
    ...     pass
    >>> list(watch.seconds), watch.seconds["solve"] < 1.0
    (['trace', 'solve'], True)
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside for the stage, also where it raises."""
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start
