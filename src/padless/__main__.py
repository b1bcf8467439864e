"""``python -m padless``: the same as the ``padless`` command."""

from padless.cli import main

if __name__ == "__main__":
    main()
