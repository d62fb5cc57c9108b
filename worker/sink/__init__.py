"""Where finished vectors go."""
