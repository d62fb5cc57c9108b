"""What measurements come to: numbers with their spread, tables, and the README that holds the last of them."""
