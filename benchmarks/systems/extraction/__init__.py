"""Systems that extract: the way of the reference, our engine on one device or on two, and our service."""
