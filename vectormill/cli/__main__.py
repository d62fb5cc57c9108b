"""`python -m vectormill.cli`, for children that must run under this very interpreter."""

from vectormill.cli.app import main

if __name__ == "__main__":
    main()
