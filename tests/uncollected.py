"""Imported first by the process whose forks are the ranks of `on_ranks`: what it imports stays."""

import gc

gc.disable()  # until the end of `tests.preloaded`
