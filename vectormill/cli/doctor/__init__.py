"""What `vectormill doctor` looks at."""
