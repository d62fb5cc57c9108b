"""The messages between API, scheduler and worker through Redis: a wake-up channel, never a store."""
