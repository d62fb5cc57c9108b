"""The network of the task extract and its head, which run on the device.

The only folder of the task that imports torch.
"""
