"""Which backend is the faster one here, found by running both."""
