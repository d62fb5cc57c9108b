"""What the switches of worker/encoder/switches.py turn on in a packed network, and the probe that has the last word."""
