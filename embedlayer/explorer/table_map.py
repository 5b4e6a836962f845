"""The map of a table: a layout that keeps neighbours close, its clusters and their names.

A large table takes a minute, so the map is computed by a thread of its own, which reports its progress and can be
cancelled. Rows that are not learned or were never seen take no part: in the layout they would be one dense knot.

A computed layout is stored in the user's cache folder: `$EMBEDLAYER_CACHE`, else `$XDG_CACHE_HOME/embedlayer`, else
`~/.cache/embedlayer`. A file is named after the rows that it was computed from. A damaged file is computed again; a
folder that cannot be written costs one line in the log.
"""

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.clusters import PlaneClusters, plane_clusters, typical_tokens
from embedlayer.analysis.layout import MOVING, SEARCHING, NeighborLayout, OnProgress, compute_layout
from embedlayer.core.errors import EmbedLayerError, SizeError
from embedlayer.core.forks import call_in_forked_processes
from embedlayer.explorer.answers import Cluster, Clusters, LayoutProgress, LayoutRecall, LayoutState
from embedlayer.explorer.health import table_report
from embedlayer.explorer.tokens import EXPORTED_ROWS, Params, principal, to_bytes
from embedlayer.io.files import create_folder
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.vocab.map import row_fingerprint

CLUSTERS = (20, 150)
"""Largest number of clusters at each level: those that are named at first sight, and those named after zooming in."""

LARGEST_FOLDED = 0.5  # if a larger share of the rows is not learned, none is left out of the map

SECONDS_BETWEEN_REPORTS = 0.2

_SHARES = {SEARCHING: (0.0, 0.6), MOVING: (0.6, 0.35)}  # where a stage begins, and its share of the whole


@dataclass(frozen=True)
class TableMap:
    """What the page draws as the map of a table."""

    layout: NeighborLayout
    levels: tuple[PlaneClusters, ...]
    names: tuple[list[list[int]], ...]

    @property
    def cluster_of(self) -> Int[Tensor, "L V"]:
        """Return the number of each row's cluster at each level, as `to_json` counts them; -1 for none."""
        starts = [0, *(len(level.sizes) for level in self.levels)]
        return torch.stack(
            [level.of.where(level.of < 0, level.of + start) for level, start in zip(self.levels, starts, strict=False)]
        )

    def to_json(self) -> list[Cluster]:
        """Return all clusters, those of the first level first: names, size, coordinates, and level."""
        return [
            {"names": names, "size": size, "x": x, "y": y, "level": depth}
            for depth, (level, all_names) in enumerate(zip(self.levels, self.names, strict=True))
            for names, size, (x, y) in zip(all_names, level.sizes, level.peaks.tolist(), strict=True)
        ]


class _Cancelled(Exception):
    """The user has cancelled the computation."""


class MapJob:
    """Compute the `TableMap` of a source once, in a thread of its own. A forked process has no running computation."""

    def __init__(self, source: OpenedModel) -> None:
        self._source = source
        self._map: TableMap | None = None
        self._refusal: EmbedLayerError | None = None
        self._forget_thread()
        call_in_forked_processes(self._forget_thread)

    def _forget_thread(self) -> None:
        """Begin without a thread, with the map if there is one, as in a forked process."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop, self._ended = threading.Event(), threading.Event()
        self._state: LayoutState = "absent" if self._map is None else "ready"
        self._share = 0.0 if self._map is None else 1.0
        self._stage = self._error = ""
        if self._map is not None:
            self._ended.set()

    def start(self) -> None:
        """Start the computation, unless it is running or ready; one that failed or was cancelled starts again."""
        with self._lock:
            if self._state in ("running", "ready"):
                return
            self._stop, self._ended = threading.Event(), threading.Event()
            self._state, self._stage, self._share, self._error = "running", SEARCHING, 0.0, ""
            self._refusal = None
            self._thread = threading.Thread(target=self._run, args=(self._stop, self._ended), name="map", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """End a running computation, and wait until its thread has ended."""
        with self._lock:
            thread = self._thread
            self._stop.set()
        if thread is not None:
            thread.join()

    def progress(self) -> LayoutProgress:
        """Return state, stage, share of the work that is done, and the error if it failed."""
        with self._lock:
            return {
                "state": self._state,
                "stage": self._stage,
                "share": round(self._share, 3),
                "error": self._error or None,
            }

    def result(self) -> TableMap:
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if self._map is None:
                raise SizeError(f"The layout is not ready: its state is {self._state!r}. Request layout-start first.")
            return self._map

    def wait(self, on_progress: OnProgress = lambda stage, share: None) -> TableMap:
        """Start the computation if need be, wait for it, and return the map."""
        self.start()
        try:  # not `join` with a timeout: if Ctrl-C ends it, Python 3.11 takes the thread for ended
            while not self._ended.wait(SECONDS_BETWEEN_REPORTS):
                on_progress(self._stage, self._share)
        except BaseException:
            self.cancel()
            raise
        return self.result()

    def _run(self, stop: threading.Event, ended: threading.Event) -> None:
        """Compute the map; every way to end leaves a final state."""

        def report(stage: str, share: float) -> None:
            if stop.is_set():
                raise _Cancelled
            begin, part = _SHARES[stage]
            with self._lock:
                self._stage, self._share = stage, begin + part * share

        state: LayoutState = "failed"
        error, result = "The computation ended with an error; the terminal shows it.", None
        refusal: EmbedLayerError | None = None
        try:
            result = compute_map(self._source, report)
            state, error = "ready", ""
        except _Cancelled:
            state, error = "cancelled", ""
        except MemoryError as problem:
            error = f"There is not enough memory for the layout: {problem}"
        except EmbedLayerError as problem:  # a damaged file, say
            error, refusal = str(problem), problem
        finally:
            with self._lock:
                self._refusal = refusal
                self._state, self._stage, self._error, self._map = state, "", error, result
                self._share = 1.0 if state == "ready" else self._share
            ended.set()


def map_job(source: OpenedModel) -> MapJob:
    return source.once("map job", lambda: MapJob(source))


def folded_rows(source: OpenedModel) -> Bool[Tensor, " V"]:
    """Return a mask `(V,)` of the rows that are not learned or were never seen, are zero, or hold NaN or infinity."""
    report = table_report(source)
    folded = report.verdicts.is_unlearned.clone()
    if folded.float().mean() > LARGEST_FOLDED:
        folded.fill_(False)
    empty = torch.tensor([*report.zero_rows, *report.nonfinite_rows], dtype=torch.int64)
    return folded.index_fill_(0, empty, True)


def compute_map(source: OpenedModel, on_progress: OnProgress) -> TableMap:
    """Compute the map of a source; its layout is read from the cache, or computed and stored there."""
    keep = ~folded_rows(source)
    on_progress(SEARCHING, 0.0)
    path = layout_path(source.rows, keep)
    layout = load_layout(path, len(keep))
    if layout is None:
        start = principal(source).coordinates
        start = F.pad(start, (0, max(0, 2 - start.shape[1])))[:, :2]
        layout = compute_layout(source.rows, start, keep=keep, on_progress=on_progress)
        store_layout(path, layout)
    on_progress(MOVING, 1.0)
    smallest = (max(8, len(keep) // 1000), max(8, len(keep) // 5000))
    levels = tuple(
        plane_clusters(layout.places, most=most, smallest=fewest)
        for most, fewest in zip(CLUSTERS, smallest, strict=True)
    )
    names = tuple(
        typical_tokens(source.rows, level.of, source.token_texts, frequency=source.counts) for level in levels
    )
    return TableMap(layout, levels, names)


def start(source: OpenedModel, params: Params) -> LayoutProgress:
    """Start to compute the map, unless it is running or ready, and return `MapJob.progress`."""
    map_job(source).start()
    return map_job(source).progress()


def cancel(source: OpenedModel, params: Params) -> LayoutProgress:
    """Cancel the computation of the map if it is running, and return `MapJob.progress`."""
    map_job(source).cancel()
    return map_job(source).progress()


def progress(source: OpenedModel, params: Params) -> LayoutProgress:
    """Return `MapJob.progress`."""
    return map_job(source).progress()


def layout(source: OpenedModel, params: Params) -> bytes:
    """Return 2-D coordinates of the rows that keep nearest neighbours close, as the bytes of float32 `(2, V)`."""
    return to_bytes(map_job(source).result().layout.places.T)


def layout_recall(source: OpenedModel, params: Params) -> LayoutRecall:
    """Return the share of true nearest neighbours that the layout used; 1 if it was exact."""
    return {"recall": round(map_job(source).result().layout.recall, 4)}


def clusters(source: OpenedModel, params: Params) -> Clusters:
    """Return the clusters of the map, see `TableMap.to_json`."""
    return {"clusters": map_job(source).result().to_json()}


def cluster_of(source: OpenedModel, params: Params) -> bytes:
    """Return the cluster of each row at each level, as the bytes of int32 `(2, V)`; -1 for none."""
    return map_job(source).result().cluster_of.to(torch.int32).numpy().tobytes()


def folded(source: OpenedModel, params: Params) -> bytes:
    """Return which rows the map leaves out, see `folded_rows`, as the bytes of uint8 `(V,)`: 1 if so."""
    return folded_rows(source).to(torch.uint8).numpy().tobytes()


def exported_requests(source: OpenedModel) -> list[Params]:
    """Return the requests for the map that an exported page stores: one, or none for a large table."""
    return [{}] if prepare(source) else []


def prepare(source: OpenedModel, on_progress: OnProgress = lambda stage, share: None) -> bool:
    """Compute the map for an exported page; return whether it stores one, which it does not of a large table."""
    if source.table.vocab_size > EXPORTED_ROWS:
        return False
    map_job(source).wait(on_progress)
    return True


VERSION = "1"  # changes when the same rows get other coordinates

MOST_FILES = 64

log = logging.getLogger("embedlayer")


def layout_path(rows: Float[Tensor, "V D"], keep: Bool[Tensor, " V"]) -> Path:
    """Return the file in the cache that stores the layout of some rows, by a digest of the rows and of `keep`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("EMBEDLAYER_CACHE") or Path(base, "embedlayer"))
    return cache / "layouts" / f"{VERSION}-{row_fingerprint(rows)}-{row_fingerprint(keep)}.safetensors"


def load_layout(path: Path, size: int) -> NeighborLayout | None:
    """Read a layout; return `None` if there is no file, or it is damaged or not a layout of `size` rows."""
    if not path.is_file():
        return None
    with suppress(EmbedLayerError, KeyError, ValueError):
        tensors, metadata = load_tensors(path)
        places = tensors["places"]
        if places.shape == (size, 2) and places.dtype == torch.float32:
            return NeighborLayout(places, float(metadata["recall"]))
    log.warning("The stored layout %s cannot be read; it is computed again.", path)
    return None


def store_layout(path: Path, layout: NeighborLayout) -> None:
    """Write a layout atomically, and remove the oldest files above `MOST_FILES`; a failure is logged, not raised."""
    try:
        create_folder(path.parent)
        save_tensors(path, {"places": layout.places.float().contiguous()}, {"recall": repr(layout.recall)})
        files = sorted(path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MOST_FILES]:
            file.unlink(missing_ok=True)
    except (EmbedLayerError, OSError) as error:
        log.warning("The layout is not stored: %s", error)
