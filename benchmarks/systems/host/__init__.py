"""A whole stack, or an engine alone, whose device is made up: all that is measured is the host's."""
