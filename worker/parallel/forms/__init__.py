"""Forms: how a rank's kernels take the sequences of a batch, padded or packed, and which of the two all ranks take."""
