"""A job as its pages show it, and how it went while somebody looked. Neither knows a template."""
