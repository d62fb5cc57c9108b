"""Workers' heartbeats and reports, and how other processes read them."""
