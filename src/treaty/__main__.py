"""``python -m treaty``: the command line."""

from treaty.cli.main import main

if __name__ == "__main__":
    main()
