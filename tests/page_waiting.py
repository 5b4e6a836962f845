"""Waiting for the explorer's page in a browser."""

from typing import Any


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true; playwright's own way needs eval, which the page's policy forbids."""
    for _ in range(3000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"never true: {expression}")
