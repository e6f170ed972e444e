"""Export to ONNX: a graph of its own, verified and timed before it is published."""
