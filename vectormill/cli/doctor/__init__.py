"""The checks of `vectormill doctor`."""
