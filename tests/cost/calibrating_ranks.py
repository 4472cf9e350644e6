"""Run under torchrun: like `autopar profile`, but every rank also writes its result to OUT.<rank>."""

import os
import sys
from typing import Any

from autopar.cli import main
from autopar.cluster import Cluster
from autopar.profiling import calibrate

measure = calibrate.measure_host


def measured_and_written(*args: Any, **kwargs: Any) -> Cluster:
    cluster = measure(*args, **kwargs)
    cluster.save(f"{sys.argv[sys.argv.index('--out') + 1]}.{os.environ['RANK']}")
    return cluster


if __name__ == "__main__":
    calibrate.measure_host = measured_and_written
    main(["profile", *sys.argv[1:]])
