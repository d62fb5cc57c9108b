"""Models that are converted to openvino and run on a CPU."""
