"""`embedlayer train`, run by torchrun, with what the environment's `ACCIDENTS` does to it on the way.

`{"0": [[1, "step", 5]], "1": [[0, "save", 6]]}`: in the first attempt rank 1 is killed after step 5, in the second
rank 0 in the middle of the checkpoint of step 6.
"""

import json
import os
import signal

from embedlayer.cli.main import main
from embedlayer.distributed import gathered
from embedlayer.training.loop import Trainer
from embedlayer.training.run_directory import RunDirectory

accidents = json.loads(os.environ["ACCIDENTS"]).get(os.environ["TORCHELASTIC_RESTART_COUNT"], [])
mine = {what: step for rank, what, step in accidents if rank == int(os.environ["RANK"])}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


update, save_checkpoint, write_rows = Trainer._update, RunDirectory.save_checkpoint, gathered._write_rows


def unlucky_update(trainer, optimizer, step, learning_rate):
    result = update(trainer, optimizer, step, learning_rate)
    if mine.get("step") == step + 1:
        die()
    return result


def unlucky_save(directory, trainer):
    if mine.get("save") == trainer.step:
        gathered._write_rows = lambda file, own, rows: (gathered._write(file, own), die())
    save_checkpoint(directory, trainer)


Trainer._update, RunDirectory.save_checkpoint = unlucky_update, unlucky_save
main()
