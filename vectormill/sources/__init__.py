"""Sources: where the texts of a collection come from, what clients push, and changes of tables that are followed."""
