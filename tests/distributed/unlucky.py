"""`embedlayer train`, run by torchrun, with what the file that `ACCIDENTS` names does to it on the way.

`[[1, "step", 5], [0, "save", 6], [1, "machine", 7]]`: rank 1 is killed after step 5; next, whichever attempt that is,
rank 0 in the middle of the checkpoint of step 6; then rank 1 after step 7, with the torchrun that started it.
"""

import json
import os
import runpy
import signal
from pathlib import Path

from embedlayer import RunDirectory, Trainer

accidents = Path(os.environ["ACCIDENTS"])


def is_next(what: str, step: int) -> bool:
    return json.loads(accidents.read_text())[:1] == [[int(os.environ["RANK"]), what, step]]


def die(*others: int) -> None:
    rest = accidents.with_suffix(".rest")
    rest.write_text(json.dumps(json.loads(accidents.read_text())[1:]))
    rest.replace(accidents)
    for process in (*others, os.getpid()):
        os.kill(process, signal.SIGKILL)


update, save_checkpoint = Trainer._update, RunDirectory.save_checkpoint


def unlucky_update(trainer, optimizer, step, learning_rate):
    result = update(trainer, optimizer, step, learning_rate)
    if is_next("step", step + 1):
        die()
    if is_next("machine", step + 1):
        die(os.getppid())
    return result


def unlucky_flush(fd):
    """Flush a file that is written and has no name yet."""
    die()


def unlucky_save(directory, trainer):
    if is_next("save", trainer.step):
        os.fsync = unlucky_flush
    save_checkpoint(directory, trainer)


Trainer._update, RunDirectory.save_checkpoint = unlucky_update, unlucky_save
runpy.run_module("embedlayer", run_name="__main__")
