"""Other libraries' tests, run with their own classes and with ours in their place: `python -m interop`."""
