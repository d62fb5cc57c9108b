"""Search: which rows of a collection answer. Searches, filters and their SQL, plans, and the bodies."""
