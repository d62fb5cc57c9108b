"""What API, scheduler and worker say to each other through Redis: a doorbell, never a store."""
