"""What runs on the device: the network and its head. The only folder of this task that names torch."""
