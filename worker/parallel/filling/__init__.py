"""From files to the part of a network that one rank holds: an outline without weights, which is divided and filled."""
