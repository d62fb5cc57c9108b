"""The network and its head, which run on the device. The only folder of this task that names torch."""
