"""One file per group of commands. Each imports what it needs when it runs, so that --help stays quick."""
