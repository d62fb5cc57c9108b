"""What commands print: bars, tables and sentences."""
