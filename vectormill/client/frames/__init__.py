"""Tables of other libraries as items, and results as such tables. None of them is imported before it is needed."""
