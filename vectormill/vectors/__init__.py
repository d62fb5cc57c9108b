"""The numbers that vectors are kept in."""
