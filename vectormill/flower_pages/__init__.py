"""What Flower shows besides its own pages: the backlog, and the way to the console."""
