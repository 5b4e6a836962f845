"""What each test costs in CPU seconds, with all that it started, and the list of the slow ones: `slow_tests.txt`.

`pytest --slow-tests write` writes the list after a run of the whole suite. `pytest --slow-tests check` fails if a test
that is not in it is slow. Seconds of the CPU, unlike those of a clock, depend little on how busy the machine is. What a
process does once, such as importing transformers or compiling a kernel, is paid by the test that happens to come first:
so a slow test is run again, and the cheaper run counts.
"""

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

LIST = Path(__file__).with_name("slow_tests.txt")
LIMIT = 3.0
"""CPU seconds above which a test is listed."""
TOLERANCE = 1.5
"""How much more an unlisted test may take: the same work takes that much longer on a machine that is busy."""
SHOWN = 20
TICK = os.sysconf("SC_CLK_TCK")
QUICK = 0.1
"""Seconds of the clock below which what living processes did in a test is not asked for: a millisecond for each."""

BROWSER_DRIVER = "node"
"""Name of the process that starts the browser: its processes live on, with hundreds of threads to ask."""


def cpu_seconds(*, with_browser: bool = True) -> float:
    """CPU seconds of this process and its descendants, with those that ended and were waited for."""
    return _own() + _of_living(with_browser)


def _own() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _of_living(with_browser: bool) -> float:
    children = [pid for pid in _children(os.getpid()) if with_browser or _name(pid) != BROWSER_DRIVER]
    return sum(map(_of_tree, children))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _of_tree(pid: int) -> float:
    try:  # utime, stime, cutime and cstime: the fields 12 to 15 behind the name, which is in parentheses
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, fields)) / TICK + sum(map(_of_tree, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it has ended, or this system has no /proc
        return found
    return found


def listed() -> list[str]:
    """The tests in the list, the slowest first."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return [line.split(maxsplit=1)[1] for line in lines if not line.startswith("#")]


def file_of(test: str) -> str:
    """The file that the ID of a test names."""
    return test.partition("::")[0]


class CpuSeconds:
    """The plugin: measures tests in the process that runs them, and reports in the one that the user started."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.listed = listed() if action == "check" else []
        self.limit = TOLERANCE * LIMIT if action == "check" else LIMIT
        self.seconds: dict[str, float] = {}
        self.living = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        """Measure a test with its fixtures, and once more if it is slow."""
        with_browser = "browser" in getattr(item, "fixturenames", ())
        own, clock = _own(), time.monotonic()
        living = _of_living(True) if with_browser else self.living
        result = yield
        took = _own() - own
        if with_browser:
            took += _of_living(True) - living
        elif time.monotonic() - clock > QUICK:
            self.living = _of_living(False)
            took += self.living - living
        if took > self.limit and item.nodeid not in self.listed:
            began = cpu_seconds(with_browser=with_browser)
            runtestprotocol(item, log=False, nextitem=nextitem)
            took = min(took, cpu_seconds(with_browser=with_browser) - began)
            self.living = _of_living(False)  # else the next test would have what this one did
        self.seconds[item.nodeid] = max(took, 0.0)  # a browser takes what its processes took along when it ends
        return result

    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a test process measured."""
        self.seconds |= getattr(node, "workeroutput", {}).get("cpu_seconds", {})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over what was measured, or write the list, or compare with it."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = self.seconds
        elif self.action == "write":
            LIST.write_text(self.text(), encoding="utf-8")
        elif self.unlisted() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the slowest tests, and those that are slow and not in the list."""
        terminalreporter.section(f"{sum(self.seconds.values()):.0f} CPU seconds, of which the slowest tests took")
        for test in self.slowest()[:SHOWN]:
            terminalreporter.write_line(f"{self.seconds[test]:6.1f} {test}")
        for test in self.unlisted():
            terminalreporter.write_line(
                f"ERROR {test} took {self.seconds[test]:.1f} CPU seconds twice and is not in {LIST.name}: make it "
                "faster, or mark it `long` if a shorter test has its law, or write the list again (CONTRIBUTING.md)."
            )

    def unlisted(self) -> list[str]:
        """The tests that are slow and not in the list, if it is compared with."""
        tests = self.slowest() if self.action == "check" else []
        return [test for test in tests if self.seconds[test] > self.limit and test not in self.listed]

    def slowest(self) -> list[str]:
        """All tests, the slowest first."""
        return sorted(self.seconds, key=lambda test: -self.seconds[test])

    def text(self) -> str:
        """The list."""
        slow = [test for test in self.slowest() if self.seconds[test] > LIMIT]
        total = sum(self.seconds[test] for test in slow)
        head = f"# Tests that take more than {LIMIT:g} CPU seconds: {len(slow)}, in all {total:.0f} of the"
        lines = [f"{head} {sum(self.seconds.values()):.0f} of the suite.", "# Written by pytest --slow-tests write."]
        return "\n".join([*lines, *(f"{self.seconds[test]:6.1f} {test}" for test in slow), ""])
