"""`torchrun --nproc-per-node 2 -m embedlayer ...`, whose workers are forks of this process, which has all they import.

The first argument is a free port, at which the workers meet.
"""

import runpy
import signal
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def worker(*arguments: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new interpreter, not as in torchrun
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["embedlayer", *arguments]
    runpy.run_module("embedlayer", run_name="__main__")


port, *command = sys.argv[1:]
config = LaunchConfig(
    *(1, 1, 2),
    run_id="none",
    rdzv_backend="static",
    rdzv_endpoint=f"127.0.0.1:{port}",
    rdzv_configs={"rank": 0},
    max_restarts=0,
    start_method="fork",
)
elastic_launch(config, worker)(*command)
