"""Limits on the concurrent work, the connections and the slow clients of an API process."""
