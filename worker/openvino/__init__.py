"""A model on a processor, converted for openvino."""
