"""Stands first on the path of processes that tests start under `--without-numba`."""

raise ModuleNotFoundError("No module named 'numba'", name="numba")
