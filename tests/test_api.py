"""The exported names and their signatures."""

from api import SNAPSHOT, snapshot


def test_the_public_interface_is_the_one_in_the_snapshot() -> None:
    """If the change is wanted, run `python tools/api.py` and commit tests/api.txt with it."""
    assert snapshot().splitlines() == SNAPSHOT.read_text().splitlines()
