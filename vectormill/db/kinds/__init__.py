"""The kinds of collections: in which columns a generation keeps what comes of its items, and how that travels."""
