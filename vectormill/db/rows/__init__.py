"""The rows of a collection: vectors and what lies beside them, put one by one and deleted without a trace."""
