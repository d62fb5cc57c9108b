"""Entry point of `python -m vectormill.cli`, for child processes that must use the same interpreter."""

from vectormill.cli.app import main

if __name__ == "__main__":
    main()
