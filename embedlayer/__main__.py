"""`python -m embedlayer` is the `embedlayer` command."""

from embedlayer.cli.main import main

if __name__ == "__main__":
    main()
