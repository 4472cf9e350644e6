"""Peak resident memory of this process since the last reset."""

from __future__ import annotations

import contextlib
import gc
import resource
from pathlib import Path


def restart_peak() -> None:
    """Reset the kernel's counter of this process's peak resident memory."""
    gc.collect()
    with contextlib.suppress(OSError):  # not on Linux: the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak resident memory, including libraries."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
