"""What the host spends on a text when the device costs nothing, and what a fast device would wait for."""
