"""Fixtures shared by all tests."""

import atexit
import functools
import gc
import logging
import math
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

# Threads of OpenMP that wait for each other sleep: those that spin take the cores from the other test processes. The
# library reads this when it is loaded, with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jaxtyping
import pytest
import torch
from _pytest.runner import runtestprotocol
from covering import LONG
from hypothesis import settings
from releases import is_older

ROOT = Path(__file__).resolve().parents[1]

# Of programs that tests start too: the test processes share the cores, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files of tests lie in memory where Linux offers enough of it: to wait for a disk takes a tenth of the time.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# For small graphs: torch's cache of inferred shapes saves less than its keys cost, and nothing to collect is left.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# Each test process imports all tests, and rewriting their asserts takes as long as importing torch: keep the result.
sys.dont_write_bytecode = False


def states_a_shape(annotation: Any) -> bool:
    """Return whether an annotation has the shape of a tensor, such as `Float[Tensor, "T D"] | None`."""
    if isinstance(annotation, str):
        return "[Tensor" in annotation
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else get_args(annotation)
    return any(map(states_a_shape, parts))


def jaxtyped_if_shaped(*, typechecker: Any, jaxtyped: Any = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    """Check what states a shape, in the first calls of a test: to check all of all took a third of the time."""

    def decorate(function: Any) -> Any:
        if not any(map(states_a_shape, getattr(function, "__annotations__", {}).values())):
            return function
        if isinstance(function, type):
            return jaxtyped(function, typechecker=typechecker)

        @functools.wraps(function)
        def first_calls_checked(*arguments: Any, **options: Any) -> Any:
            if is_unchecked or calls[function] >= checked_calls:
                return function(*arguments, **options)
            calls[function] += 1
            if function not in checked:  # a millisecond for each
                checked[function] = jaxtyped(function, typechecker=typechecker)
            return checked[function](*arguments, **options)

        return first_calls_checked

    return decorate


is_unchecked = False
"""Whether a test has switched the checks off: jaxtyping's own switch is a lock, which Dynamo cannot trace."""

checked_calls: float = 16
"""Calls of each function that are checked in each test; all with `--all`."""
calls: Counter[Any] = Counter()
checked: dict[Any, Callable[..., Any]] = {}
"""Functions that check what they are called with, by the function."""


# Shapes are checked in the modules that state them. A checked call costs up to 0.1 ms: other modules are left out. So
# is one whose objects are created inside compiled functions: Dynamo cannot trace a wrapped method of a new object.
CREATED_IN_GRAPHS = ROOT / "embedlayer/losses/uncomputed_logits.py"
jaxtyping.jaxtyped = jaxtyped_if_shaped  # type: ignore[assignment]
jaxtyping.install_import_hook(
    [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in ROOT.glob("embedlayer/**/*.py")
        if "from jaxtyping import" in file.read_text(encoding="utf-8") and file != CREATED_IN_GRAPHS
    ],
    "beartype.beartype",
)

for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():  # torch would keep each seed for later, with a text of the stack
        devices.manual_seed_all = lambda seed: None

gc.disable()  # until all tests are collected: what is imported stays
gc.freeze()

# The same examples in every run, however busy the machine: a failure is a change of ours.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch writes all that it compiles to this log once anyone listens, and pytest listens to logs that do not propagate.
logging.getLogger("torch.__trace").propagate = True

SHARED = ROOT.parent / "shared" / "data"

SLOWEST_FILES = ("vocab/test_mesh_edits.py", "explorer/test_learn.py", "distributed/test_resume.py", "test_site.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-all`."""
    parser.addoption("--all", action="store_true", help="Also run what is left out for time: `make test-all`.")
    parser.addoption("--case", default="", help="Of laws over many cases in one test, run those with this text.")


def pytest_xdist_auto_num_workers() -> int:
    """As many processes as there are cores that this one may use; xdist counts those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_configure(config: pytest.Config) -> None:
    """With `--all`, check the shapes of all calls."""
    global checked_calls
    if config.getoption("--all"):
        checked_calls = math.inf


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Send what a test did to the process that shows it, and what its fixtures did only if they failed.

    By itself, xdist sends five messages for each test, which take longer than half of the tests do.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Skip a test of a model type that an older transformers lacks."""
    report = yield
    error = call.excinfo and call.excinfo.value
    if type(error).__name__ == "LacksType" and is_older():
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, f"transformers has no {' '.join(error.args)}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Create no test for the cases that are marked `long`, half of all, which `make test-all` runs; one if all are."""
    yield
    if not metafunc.config.getoption("--all"):
        is_long = metafunc.definition.get_closest_marker("long") is not None
        short = [] if is_long else [call for call in metafunc._calls if LONG.mark not in call.marks]
        metafunc._calls[:] = short or metafunc._calls[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked `long`, unless `--all` is set, and run the slowest files first.

    A process that begins such a file last would end long after the others.
    """
    items.sort(key=lambda item: not item.path.as_posix().endswith(SLOWEST_FILES))
    if not config.getoption("--all"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(autouse=True, scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for computed layouts in place of the user's cache, and what makes small tests slow or too easy."""
    from small_blocks import small_blocks

    # Small tests are computed as large inputs: what is few is more than most tests have, and on CUDA more than any.
    few = 1 << 16
    on_cpu, on_cuda = small_blocks(few_logits=few), small_blocks(device="cuda", few_logits=few, few_scores=0)
    with pytest.MonkeyPatch.context() as patch, on_cpu, on_cuda:
        patch.setenv("EMBEDLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        # torch's measurement of a graph's guards, for a log, flushes the caches of the cores.
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported and collected out of garbage collections, and the logs out of tests that read none."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # the last collection finds everything: extensions report what is left as a leak
    gc.set_threshold(10_000, 10, 20)
    session.config.pluginmanager.register(LogsIfRead(session.config.pluginmanager))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a process of xdist without taking apart, object by object, all that it has imported."""
    if hasattr(config, "workerinput"):
        atexit._run_exitfuncs()
        os._exit(0)


@pytest.fixture(autouse=True, scope="module")
def frozen_rest() -> Iterator[None]:
    """Leave what is left of the tests of a file out of garbage collections and searches for optimizers too."""
    yield
    gc.collect()
    gc.freeze()


class LogsIfRead:
    """pytest's plugin for logs takes part in tests with `caplog`: it looks at all loggers six times in each test."""

    def __init__(self, manager: pytest.PytestPluginManager) -> None:
        self.manager, self.logs = manager, manager.unregister(name="logging-plugin")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Let the plugin take part in a test that asks for `caplog`."""
        if reads_logs := "caplog" in getattr(item, "fixturenames", ()):
            self.manager.register(self.logs)
        try:
            return (yield)
        finally:
            if reads_logs:
                self.manager.unregister(self.logs)


@pytest.fixture(autouse=True)
def own_state() -> Iterator[Callable[[], None]]:
    """One thread, as the test processes share the cores, a fixed seed and a new count of calls for each test.

    accelerate keeps the first precision for the whole process: it forgets it after each test.
    """

    def renew() -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        calls.clear()

    renew()
    yield renew
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch jaxtyping's checks off: for wrong input that must meet our own errors, and for torch.compile."""
    global is_unchecked
    jaxtyping.config.update("jaxtyping_disable", True)
    is_unchecked = True
    yield
    is_unchecked = False
    jaxtyping.config.update("jaxtyping_disable", False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what one test compiled counts towards the next one's limit


@pytest.fixture
def kernels() -> Iterator[None]:
    """For tests of compiled kernels: skip without numba, and fail if one could not be compiled."""
    pytest.importorskip("numba")
    from kernel_paths import compilation_failure
    from small_blocks import small_blocks

    with small_blocks(few_vectors=0):
        yield
    assert compilation_failure() is None


@pytest.fixture(params=["kernels", "torch operators"])
def both_paths(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with compiled kernels, and again as where numba is not installed."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
        yield request.param
    else:
        from kernel_paths import without_numba  # it imports the package, whose shapes are checked from now on

        with without_numba():
            yield request.param


@pytest.fixture(params=["Linux", "macOS", "POSIX"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with all calls of this system, and again without those that others lack; see `hidden_calls.py`."""
    from hidden_calls import hide  # it imports the package, whose shapes are checked from now on

    hide(request.param, monkeypatch)
    return request.param


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real texts, tokenizers and models that stand beside the checkout; skips where they do not."""
    if not SHARED.is_dir():
        pytest.skip(f"the real inputs at {SHARED} are not on this machine")
    return SHARED


SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--renderer-process-limit=1",  # pages of one context share their renderer
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium, best its small headless build, with a profile of its own that is thrown away."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser extra (playwright) is not installed")
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("neither chromium-headless-shell nor chromium is installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(SWITCHES))
        yield launched
        launched.close()
