"""Collections, and what fills them, searches them and keeps them fresh."""
