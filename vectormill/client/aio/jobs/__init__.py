"""Jobs: at work, and what they made."""
