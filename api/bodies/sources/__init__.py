"""Request and answer bodies of sources and of runs."""
