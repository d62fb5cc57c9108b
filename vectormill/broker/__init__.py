"""Messages between API, scheduler and worker through Redis, which is a wake-up channel and never a store."""
